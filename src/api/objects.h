// Opaque handles of the C API: a pointer is good only while its object is in the table, so a stale or foreign one is an error
// and not a crash. Pointers are numbers that are given out once: a destroyed one never means a later object.
#ifndef NVTE_EP_API_OBJECTS_H_
#define NVTE_EP_API_OBJECTS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "core/group.h"
#include "core/status.h"
#include "core/transport.h"

struct nvte_ep_comm {};
struct nvte_ep_group {};
struct nvte_ep_handle {};

namespace nvte_ep {

// Odd, so that it is no object's address; the same for no two objects of any kind.
inline uintptr_t next_object_number() {
  static std::atomic<uintptr_t> next{0x10001};
  return next.fetch_add(2);
}

template <typename Opaque, typename Object>
class ObjectTable {
 public:
  Opaque* add(std::shared_ptr<Object> object) {
    const std::unique_lock<std::shared_mutex> lock(mutex_);
    Opaque* pointer = reinterpret_cast<Opaque*>(next_object_number());
    objects_.emplace(pointer, std::move(object));
    return pointer;
  }
  Status find(Opaque* pointer, const char* name, std::shared_ptr<Object>* object) const {
    if (pointer == nullptr) return invalid_argument(name, ": expected a live object, got NULL");
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    const auto found = objects_.find(pointer);
    if (found == objects_.end()) {
      return invalid_argument(name, ": expected a live object, got ", static_cast<const void*>(pointer),
                              " (destroyed, or not from this library)");
    }
    *object = found->second;
    return Status();
  }
  Status remove(Opaque* pointer, const char* name, std::shared_ptr<Object>* object) {
    NVTE_EP_TRY(find(pointer, name, object));
    const std::unique_lock<std::shared_mutex> lock(mutex_);
    objects_.erase(pointer);
    return Status();
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<Opaque*, std::shared_ptr<Object>> objects_;
};

// Never destroyed: objects may be alive at exit.
ObjectTable<nvte_ep_comm, Communicator>& comms();
ObjectTable<nvte_ep_group, Group>& groups();
ObjectTable<nvte_ep_handle, Handle>& handles();

}  // namespace nvte_ep

#endif  // NVTE_EP_API_OBJECTS_H_
