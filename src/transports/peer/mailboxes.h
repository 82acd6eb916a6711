// Values that the hosts of a group tell each other through the ranks' pools, by copies on a stream of the group's own: no
// kernel of NCCL that could wait for ever, and a rank that is late is known by name.
//
// A rank writes round n to place n % 2 of its mailbox at every rank, values first, then the number. It has read a round when
// all numbers are there. Two places are enough: who writes round n + 2 has finished round n + 1, to which every rank came
// after it had read round n.
#ifndef NVTE_EP_TRANSPORTS_PEER_MAILBOXES_H_
#define NVTE_EP_TRANSPORTS_PEER_MAILBOXES_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "core/backend.h"
#include "transports/agreement.h"

namespace nvte_ep {

class Mailboxes {
 public:
  struct Mail {
    int64_t round;
    AgreedValues values;
  };
  static int64_t bytes(int32_t ranks) { return ranks * 2 * static_cast<int64_t>(sizeof(Mail)); }

  ~Mailboxes();
  // boxes [ranks]: every rank's mailboxes, zero at first, as this rank's device addresses them.
  Status open(Backend* backend, int32_t rank, std::vector<uint8_t*> boxes, nvte_ep_stream_t stream);

  // This rank's values to everybody. check: whether to go on waiting; late: called with the ranks that are missing when
  // timeout_ns is over.
  Status exchange(const AgreedValues& mine, int64_t timeout_ns, const std::function<Status()>& check,
                  const std::function<Status(const std::vector<int32_t>&)>& late,
                  std::vector<AgreedValues>* all);

 private:
  Status read(int64_t place);

  Backend* backend_ = nullptr;
  int32_t rank_ = 0;
  std::vector<uint8_t*> boxes_;
  nvte_ep_stream_t stream_ = nullptr;
  int64_t round_ = 0;
  Mail* in_ = nullptr;   // [ranks] on the host
  Mail* out_ = nullptr;  // [2]
};

}  // namespace nvte_ep

#endif  // NVTE_EP_TRANSPORTS_PEER_MAILBOXES_H_
