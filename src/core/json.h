// JSON texts.
#ifndef NVTE_EP_CORE_JSON_H_
#define NVTE_EP_CORE_JSON_H_

#include <cstdio>
#include <string>

namespace nvte_ep {

// A string of JSON (RFC 8259): quotes, backslashes and control characters are escaped, bytes of UTF-8 stay.
inline std::string json_string(const std::string& value) {
  std::string out = "\"";
  for (char c : value) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      (void)std::snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned>(c));
      out += escaped;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

}  // namespace nvte_ep

#endif  // NVTE_EP_CORE_JSON_H_
