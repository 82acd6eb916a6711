#include "transports/nccl_gather.h"

#include <algorithm>
#include <cstring>

#include "transports/device_buffer.h"

namespace nvte_ep {

Status NcclGather::gather(const char* step, const void* mine, int64_t bytes, void* all,
                          nvte_ep_stream_t stream) const {
  const int64_t marked_bytes = bytes + static_cast<int64_t>(sizeof(Mark));
  std::vector<uint8_t> marked(static_cast<size_t>(marked_bytes * size_));
  const Mark mark = 1;
  std::memcpy(marked.data(), mine, static_cast<size_t>(bytes));
  std::memcpy(marked.data() + bytes, &mark, sizeof(mark));
  DeviceBuffer send, receive;
  NVTE_EP_TRY(send.reserve(backend_, marked_bytes));
  NVTE_EP_TRY(receive.reserve(backend_, marked_bytes * size_));
  NVTE_EP_TRY(backend_->upload(send.as<void>(), marked.data(), marked_bytes, stream));
  NVTE_EP_TRY(enqueue_(send.as<void>(), receive.as<void>(), marked_bytes, stream));
  NVTE_EP_TRY(wait_(step, stream));
  NVTE_EP_TRY(backend_->download(marked.data(), receive.as<void>(), marked_bytes * size_, stream));
  for (int32_t r = 0; r < size_; ++r) {
    const uint8_t* const came = marked.data() + r * marked_bytes;
    if (!has_come(came, marked_bytes)) {
      return Status(NVTE_EP_STATUS_TRANSPORT, text(step, ": NCCL has ended, and nothing came from rank ", r));
    }
    std::memcpy(static_cast<uint8_t*>(all) + r * bytes, came, static_cast<size_t>(bytes));
  }
  return Status();
}

bool NcclGather::has_come(const uint8_t* of_rank, int64_t bytes) {
  Mark mark;
  std::memcpy(&mark, of_rank + bytes - sizeof(mark), sizeof(mark));
  return mark != 0;
}

Status NcclGather::agree(const char* step, const std::vector<Agreed>& mine, nvte_ep_stream_t stream) const {
  const AgreedValues values = agreed_values(step, mine);
  std::vector<AgreedValues> all(static_cast<size_t>(size_));
  NVTE_EP_TRY(gather(step, &values, sizeof(values), all.data(), stream));
  return check_agreement(mine, all);
}

Status NcclGather::settle(const char* step, const Status& mine, nvte_ep_stream_t stream) const {
  struct Outcome {
    int32_t code;
    char message[1020];
  };
  Outcome own{mine.code(), {}};
  std::memcpy(own.message, mine.message().data(), std::min(mine.message().size(), sizeof(own.message) - 1));
  if (mine.message().size() >= sizeof(own.message))
    std::memcpy(own.message + sizeof(own.message) - 4, "...", 4);
  std::vector<Outcome> all(static_cast<size_t>(size_));
  NVTE_EP_TRY(gather(step, &own, sizeof(own), all.data(), stream));
  for (int32_t r = 0; r < size_; ++r) {
    const Outcome& outcome = all[static_cast<size_t>(r)];
    if (outcome.code == NVTE_EP_STATUS_OK) continue;
    return Status(outcome.code, text("rank ", r, ": ", outcome.message));
  }
  return Status();
}

}  // namespace nvte_ep
