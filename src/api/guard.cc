#include "api/guard.h"

namespace nvte_ep {
namespace {

// A text that a caller holds while the next call fails (both in one printf, evaluated from the right) is that one's then, not freed
// memory.
constexpr size_t kUsualLength = 2000;

struct ThreadText {
  ThreadText() noexcept {
    try {
      text.reserve(kUsualLength);
    } catch (...) {  // then it grows when there is one
    }
  }
  std::string text;
  const char* fixed = nullptr;  // instead of text
};
ThreadText& thread_text() {
  thread_local ThreadText text;
  return text;
}

}  // namespace

void LastError::set(const char* function, const std::string& message) noexcept {
  try {
    std::string& text = thread_text().text;
    text.assign(function);
    text += ": ";
    text += message;
    thread_text().fixed = nullptr;
  } catch (...) {
    set_fixed("out of host memory while reporting an error");
  }
}
void LastError::set_fixed(const char* message) noexcept { thread_text().fixed = message; }
void LastError::clear() noexcept {
  thread_text().fixed = nullptr;
  thread_text().text.clear();
}
const char* LastError::get() noexcept {
  const ThreadText& t = thread_text();
  return t.fixed ? t.fixed : t.text.c_str();
}

}  // namespace nvte_ep
