// Runs the fuzz target without libFuzzer: over files named on the command line, else over --inputs random ones from --seed.
// A failing input is told apart by its number; with the same seed it comes again.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

uint64_t next(uint64_t* state) {  // splitmix64
  uint64_t z = (*state += 0x9E3779B97F4A7C15u);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Random bytes; long runs of one extreme value in some inputs.
std::vector<uint8_t> random_input(uint64_t seed) {
  uint64_t state = seed;
  std::vector<uint8_t> input(next(&state) % 1500);
  for (uint8_t& b : input) b = static_cast<uint8_t>(next(&state));
  const uint8_t extremes[] = {0x00, 0x7F, 0x80, 0xFF};
  if (next(&state) % 2 == 0 && input.size() > 100) {
    const size_t begin = 60 + next(&state) % (input.size() - 60);
    std::memset(input.data() + begin, extremes[next(&state) % 4], input.size() - begin);
  }
  return input;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t seed = 1;
  uint64_t inputs = 20000;
  int files = 0;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--seed") == 0 && i + 1 < argc) {
      seed = std::strtoull(argv[++i], nullptr, 0);
    } else if (std::strcmp(argv[i], "--inputs") == 0 && i + 1 < argc) {
      inputs = std::strtoull(argv[++i], nullptr, 0);
    } else {
      std::ifstream file(argv[i], std::ios::binary);
      if (!file) {
        std::fprintf(stderr, "%s: cannot be read\n", argv[i]);
        return 2;
      }
      const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
      std::fprintf(stderr, "%s\n", argv[i]);
      (void)LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
      ++files;
    }
  }
  if (files > 0) return 0;
  (void)LLVMFuzzerTestOneInput(nullptr, 0);
  for (uint64_t i = 0; i < inputs; ++i) {
    uint64_t state = seed * 0x100000000u + i;
    const std::vector<uint8_t> input = random_input(next(&state));
    if (i % 1000 == 0)
      std::fprintf(stderr, "inputs from %llu of seed %llu\n", static_cast<unsigned long long>(i),
                   static_cast<unsigned long long>(seed));
    (void)LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%llu inputs\n", static_cast<unsigned long long>(inputs));
  return 0;
}
