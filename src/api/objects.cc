#include "api/objects.h"

namespace nvte_ep {

ObjectTable<nvte_ep_comm, Communicator>& comms() {
  static auto* table = new ObjectTable<nvte_ep_comm, Communicator>();
  return *table;
}
ObjectTable<nvte_ep_group, Group>& groups() {
  static auto* table = new ObjectTable<nvte_ep_group, Group>();
  return *table;
}
ObjectTable<nvte_ep_handle, Handle>& handles() {
  static auto* table = new ObjectTable<nvte_ep_handle, Handle>();
  return *table;
}

}  // namespace nvte_ep
