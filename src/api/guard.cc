#include "api/guard.h"

namespace nvte_ep {
namespace {

struct ThreadText {
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
    thread_text().text = std::string(function) + ": " + message;
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
