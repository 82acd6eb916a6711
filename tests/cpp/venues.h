// Where layer tests run: every transport that nvte_ep_build_info lists as available, with every kind of memory it takes.
#ifndef NVTE_EP_TESTS_VENUES_H_
#define NVTE_EP_TESTS_VENUES_H_

#include <map>

#include "cuda_memory.h"
#include "layer.h"

namespace ep_test {

inline std::vector<std::string> available_transports() {
  const char* text = nullptr;
  require(nvte_ep_build_info(&text));
  const std::string json = text;
  std::vector<std::string> names;
  const std::string key = "\"name\": \"";
  for (size_t at = json.find("\"transports\""); (at = json.find(key, at)) != std::string::npos;) {
    at += key.size();
    const std::string name = json.substr(at, json.find('"', at) - at);
    const std::string item = json.substr(at, json.find('}', at) - at);
    if (item.find("\"available\": true") != std::string::npos) names.push_back(name);
  }
  return names;
}

inline bool takes_memory(int32_t transport, const Memory& memory) {
  const WorldId id;
  const Comm comm = make_comm(id, 0, 1);
  nvte_ep_group_config_t config = group_config(1, 32, 1, 0);
  config.transport = transport;
  config.device_type = memory.device_type;
  nvte_ep_group_t group = nullptr;
  if (nvte_ep_group_create(comm.get(), &config, &group) != NVTE_EP_STATUS_OK) return false;
  const Group owned(group);
  return true;
}

inline const std::vector<const Memory*>& memories() {
  static const std::vector<const Memory*> all = [] {
    std::vector<const Memory*> found = {&host_memory()};
    if (cuda_memory() != nullptr) found.push_back(cuda_memory());
    return found;
  }();
  return all;
}

// Transports whose ranks are threads here. Those of processes are tested by tests/distributed.
inline bool has_threads(const std::string& transport) {
  return transport != "nccl" && transport != "nccl_ep";
}

inline const std::vector<Venue>& venues() {
  static const std::vector<Venue> all = [] {
    const std::map<std::string, int32_t> ids = {{"threads", NVTE_EP_TRANSPORT_THREADS},
                                                {"peer", NVTE_EP_TRANSPORT_PEER},
                                                {"nccl_ep", NVTE_EP_TRANSPORT_NCCL_EP},
                                                {"nccl", NVTE_EP_TRANSPORT_NCCL}};
    std::vector<Venue> found;
    for (const std::string& name : available_transports()) {
      if (!has_threads(name)) continue;
      for (const Memory* memory : memories()) {
        if (!takes_memory(ids.at(name), *memory)) continue;
        Venue venue{name + "_" + memory->name, ids.at(name), memory};
        venue.exact_sums = venue.mxfp8_sums = name == "threads";
        if (memory->device_type != NVTE_EP_DEVICE_CPU) venue.max_ranks = 8;  // more only share the same GPU
        found.push_back(venue);
      }
    }
    return found;
  }();
  return all;
}

// Every item in every venue that takes so many ranks.
template <typename Item>
std::vector<std::pair<Venue, Item>> in_venues(const std::vector<Item>& items) {
  std::vector<std::pair<Venue, Item>> rows;
  for (const Venue& venue : venues()) {
    for (const Item& item : items) {
      if (item.ranks <= venue.max_ranks) rows.emplace_back(venue, item);
    }
  }
  return rows;
}

// A suite whose tests run in every venue, or on the host.
class InEveryVenue : public ::testing::TestWithParam<Venue> {
 protected:
  void run(const LayerCase& c, const std::vector<Step>& steps) { run_layer(GetParam(), c, steps); }
};
// Tests of host memory: a call is over, on every rank, when it returns. What they are about is tested on devices by
// tests/distributed and tests/cuda.
inline std::vector<Venue> host_venues() {
  std::vector<Venue> found;
  std::copy_if(venues().begin(), venues().end(), std::back_inserter(found),
               [](const Venue& v) { return v.memory->device_type == NVTE_EP_DEVICE_CPU; });
  return found;
}
inline std::string venue_name(const ::testing::TestParamInfo<Venue>& info) { return info.param.name; }

}  // namespace ep_test

#define NVTE_EP_ON_THE_HOST(suite) \
  INSTANTIATE_TEST_SUITE_P(Host, suite, ::testing::ValuesIn(ep_test::host_venues()), ep_test::venue_name)
#define NVTE_EP_IN_EVERY_VENUE(suite) \
  INSTANTIATE_TEST_SUITE_P(Venues, suite, ::testing::ValuesIn(ep_test::venues()), ep_test::venue_name)

#endif  // NVTE_EP_TESTS_VENUES_H_
