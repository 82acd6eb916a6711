// Status: a class of failure and a text that names the argument. Levels add context with NVTE_EP_TRY.
#ifndef NVTE_EP_CORE_STATUS_H_
#define NVTE_EP_CORE_STATUS_H_

#include <sstream>
#include <string>
#include <utility>

#include "nvte_ep/nvte_ep.h"

namespace nvte_ep {

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(nvte_ep_status_t code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == NVTE_EP_STATUS_OK; }
  nvte_ep_status_t code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  nvte_ep_status_t code_ = NVTE_EP_STATUS_OK;
  std::string message_;
};

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <typename... Parts>
Status invalid_argument(const Parts&... parts) {
  return Status(NVTE_EP_STATUS_INVALID_ARGUMENT, text(parts...));
}
template <typename... Parts>
Status unsupported(const Parts&... parts) {
  return Status(NVTE_EP_STATUS_UNSUPPORTED, text(parts...));
}
template <typename... Parts>
Status bad_state(const Parts&... parts) {
  return Status(NVTE_EP_STATUS_BAD_STATE, text(parts...));
}

// Returns from the enclosing function when an expression of type Status is not OK.
#define NVTE_EP_TRY(expression)                        \
  do {                                                 \
    ::nvte_ep::Status nvte_ep_status_ = (expression);  \
    if (!nvte_ep_status_.ok()) return nvte_ep_status_; \
  } while (false)

}  // namespace nvte_ep

#endif  // NVTE_EP_CORE_STATUS_H_
