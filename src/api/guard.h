// The wall: what every exported function runs in. Nothing is thrown across it; the text of a failure is kept per thread.
#ifndef NVTE_EP_API_GUARD_H_
#define NVTE_EP_API_GUARD_H_

#include <exception>
#include <new>
#include <string>

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

#include "core/status.h"

namespace nvte_ep {

// Text of the last failure on this thread. A failure to store the text leaves a fixed one.
class LastError {
 public:
  static void set(const char* function, const std::string& message) noexcept;
  static void set_fixed(const char* message) noexcept;
  static void clear() noexcept;
  static const char* get() noexcept;
};

// The host's arithmetic must not depend on what the caller's thread has set: rounding mode, flushing of subnormals, traps.
class FloatEnvironment {
 public:
#if defined(__x86_64__)
  // One register rules all arithmetic but long double's: to save and set that one's environment, too, takes 0.2 us.
  FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(kUsual); }
  ~FloatEnvironment() { _mm_setcsr(saved_); }
#else
  FloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatEnvironment() { std::fesetenv(&saved_); }
#endif
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr unsigned kUsual = 0x1F80;  // MXCSR: to nearest, no flushing, every exception masked
  const unsigned saved_;
#else
  std::fenv_t saved_;
#endif
};

template <typename Function>
nvte_ep_status_t boundary(const char* name, const Function& function) noexcept {
  try {
    const FloatEnvironment environment;
    const Status status = function();
    if (status.ok()) {
      LastError::clear();
    } else {
      LastError::set(name, status.message());
    }
    return status.code();
  } catch (const std::bad_alloc&) {
    LastError::set(name, "out of host memory");
    return NVTE_EP_STATUS_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    LastError::set(name, error.what());
    return NVTE_EP_STATUS_INTERNAL;
  } catch (...) {
    LastError::set_fixed("unknown exception");
    return NVTE_EP_STATUS_INTERNAL;
  }
}

}  // namespace nvte_ep

#endif  // NVTE_EP_API_GUARD_H_
