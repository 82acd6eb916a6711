// Reads the golden vectors: vectors/index.json and the .npy files it names.
#ifndef NVTE_EP_TESTS_GOLDEN_H_
#define NVTE_EP_TESTS_GOLDEN_H_

#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace golden {

inline std::string read_file(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error("cannot read " + path);
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

// A little-endian array in C order, as NumPy's format version 1.0 stores it.
struct Array {
  std::string type;  // kind and bytes: "u1", "i8"
  std::vector<int64_t> shape;
  std::vector<uint8_t> bytes;

  int64_t size() const {
    int64_t n = 1;
    for (int64_t extent : shape) n *= extent;
    return n;
  }
  int64_t item_bytes() const { return type[1] - '0'; }
  template <typename T>
  T at(int64_t i) const {
    if (sizeof(T) != static_cast<size_t>(item_bytes())) throw std::runtime_error("array of " + type);
    if (i < 0 || i >= size()) throw std::runtime_error("index past the end of an array");
    T value;
    std::memcpy(&value, bytes.data() + static_cast<size_t>(i) * sizeof(T), sizeof(T));
    return value;
  }
  template <typename T>
  std::vector<T> to() const {
    std::vector<T> values;
    for (int64_t i = 0; i < size(); ++i) values.push_back(at<T>(i));
    return values;
  }
};

inline Array read_npy(const std::string& path) {
  const std::string file = read_file(path);
  const auto fail = [&](const char* what) -> std::runtime_error {
    return std::runtime_error(path + ": " + what);
  };
  if (file.size() < 10 || file.compare(0, 6, "\x93NUMPY") != 0 || file[6] != 1)
    throw fail("not a .npy 1.0 file");
  const size_t header_bytes = static_cast<uint8_t>(file[8]) + 256u * static_cast<uint8_t>(file[9]);
  const std::string header = file.substr(10, header_bytes);
  const auto value_of = [&](const std::string& key) {
    const size_t at = header.find("'" + key + "': ");
    if (at == std::string::npos) throw fail("header without a key");
    return header.substr(at + key.size() + 4);
  };
  if (value_of("fortran_order").compare(0, 5, "False") != 0) throw fail("Fortran order");
  Array array;
  const std::string descr = value_of("descr");  // '<u4' or '|u1'
  array.type = descr.substr(2, 2);
  if ((descr[1] != '<' && descr[1] != '|') || descr[4] != '\'') throw fail("element type");
  std::string shape = value_of("shape");
  shape = shape.substr(1, shape.find(')') - 1);
  for (size_t at = 0; at < shape.size();) {
    char* end = nullptr;
    array.shape.push_back(std::strtoll(shape.c_str() + at, &end, 10));
    at = static_cast<size_t>(end - shape.c_str());
    while (at < shape.size() && (shape[at] == ',' || shape[at] == ' ')) ++at;
  }
  array.bytes.assign(file.begin() + 10 + static_cast<std::ptrdiff_t>(header_bytes), file.end());
  if (static_cast<int64_t>(array.bytes.size()) != array.size() * array.item_bytes())
    throw fail("wrong length");
  return array;
}

// One case of the index. What a test reads is noted, so that it can tell whether it has looked at everything.
class Case {
 public:
  std::map<std::string, std::string>
      fields;  // values as text: strings without quotes, lists with their brackets

  const std::string& name() const { return text("name"); }
  const std::string& kind() const { return text("kind"); }
  bool has(const std::string& key) const {
    used_.insert(key);
    return fields.count(key) != 0;
  }
  const std::string& text(const std::string& key) const {
    if (!has(key)) throw std::runtime_error("case without " + key);
    return fields.at(key);
  }
  std::string text(const std::string& key, const std::string& otherwise) const {
    return has(key) ? fields.at(key) : otherwise;
  }
  int64_t number(const std::string& key) const { return std::stoll(text(key)); }
  int64_t number(const std::string& key, int64_t otherwise) const {
    return has(key) ? number(key) : otherwise;
  }
  std::vector<int64_t> numbers(const std::string& key) const {
    std::vector<int64_t> values;
    std::istringstream list(text(key).substr(1));
    for (int64_t value; list >> value;) {
      values.push_back(value);
      list.ignore();
    }
    return values;
  }
  Array array(const std::string& key) const {
    return read_npy(std::string(NVTE_EP_GOLDEN_DIR) + "/vectors/" + text(key));
  }
  std::vector<std::string> unread() const {
    std::vector<std::string> keys;
    for (const auto& field : fields) {
      if (used_.count(field.first) == 0) keys.push_back(field.first);
    }
    return keys;
  }

 private:
  mutable std::set<std::string> used_;
};

// index.json is {"cases": [{"key": "string" | number | [numbers], ...}, ...]}, nothing nested deeper.
inline std::vector<Case> read_index() {
  const std::string path = std::string(NVTE_EP_GOLDEN_DIR) + "/vectors/index.json";
  const std::string json = read_file(path);
  size_t at = json.find('[');
  const auto skip = [&](const char* characters) {
    while (at < json.size() && std::strchr(characters, json[at]) != nullptr) ++at;
  };
  const auto upto = [&](char end) {
    const size_t start = at;
    at = json.find(end, at);
    if (at == std::string::npos) throw std::runtime_error(path + ": ends early");
    return json.substr(start, at++ - start);
  };
  std::vector<Case> cases;
  if (at == std::string::npos) throw std::runtime_error(path + ": no list of cases");
  for (++at;;) {
    skip(" \n,");
    if (at >= json.size()) throw std::runtime_error(path + ": ends early");
    if (json[at] == ']') return cases;
    ++at;  // {
    Case one;
    for (;;) {
      skip(" \n,");
      if (at >= json.size() || json[at] == '}') break;
      ++at;  // "
      const std::string key = upto('"');
      skip(": ");
      std::string value;
      if (json[at] == '"') {
        ++at;
        value = upto('"');
      } else if (json[at] == '[') {
        value = upto(']') + "]";
      } else {
        const size_t start = at;
        at = json.find_first_of(",}", at);
        value = json.substr(start, at - start);
      }
      if (!one.fields.emplace(key, value).second) throw std::runtime_error(path + ": " + key + " twice");
    }
    ++at;  // }
    cases.push_back(one);
  }
}

}  // namespace golden

#endif  // NVTE_EP_TESTS_GOLDEN_H_
