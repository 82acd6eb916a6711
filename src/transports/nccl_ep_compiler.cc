#include "transports/nccl_ep_compiler.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <vector>

namespace nvte_ep {
namespace nccl_ep {
namespace {

namespace fs = std::filesystem;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}
bool is_program(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error) && access(path.c_str(), X_OK) == 0;
}

fs::path on_path(const char* program) {
  const std::string folders = variable("PATH");
  for (size_t at = 0; at <= folders.size();) {
    const size_t end = std::min(folders.find(':', at), folders.size());
    const fs::path candidate = fs::path(folders.substr(at, end - at)) / program;
    if (end > at && is_program(candidate)) return candidate;
    at = end + 1;
  }
  return {};
}

// The folder that holds a library, links resolved.
fs::path folder_of(const std::string& library) {
  std::error_code error;
  const fs::path real = fs::canonical(library, error);
  return (error ? fs::path(library) : real).parent_path();
}

// The first of the folders that has the file.
fs::path first_with(const std::vector<fs::path>& folders, const char* file) {
  for (const fs::path& folder : folders) {
    if (!folder.empty() && is_there(folder / file)) return folder;
  }
  return {};
}

std::string list(const std::vector<fs::path>& folders) {
  std::string all;
  for (const fs::path& folder : folders) {
    if (!folder.empty()) all += (all.empty() ? "" : ", ") + folder.string();
  }
  return all;
}

// NCCL EP looks at NCCL_EP_JIT_NVCC, NVCC, CUDA_HOME and CUDA_PATH, then for the plain name.
Status find_nvcc(const std::vector<fs::path>& sites, fs::path* nvcc) {
  for (const char* name : {"NCCL_EP_JIT_NVCC", "NVCC"}) {
    const std::string given = variable(name);
    if (given.empty()) continue;
    *nvcc = given.find('/') == std::string::npos ? on_path(given.c_str()) : fs::path(given);
    return is_program(*nvcc) ? Status() : unsupported("NCCL EP: ", name, "=", given, " is no program");
  }
  std::vector<fs::path> candidates;
  for (const char* name : {"CUDA_HOME", "CUDA_PATH"}) {
    if (!variable(name).empty()) candidates.push_back(fs::path(variable(name)) / "bin/nvcc");
  }
  candidates.push_back(on_path("nvcc"));
  candidates.emplace_back("/usr/local/cuda/bin/nvcc");
  for (const fs::path& site : sites) {
    if (!site.empty()) candidates.push_back(site / "nvidia/cu13/bin/nvcc");
  }
  for (const fs::path& candidate : candidates) {
    if (!is_program(candidate)) continue;
    *nvcc = candidate;
    return Status();
  }
  return unsupported(
      "NCCL EP compiles its kernels at run time, and there is no nvcc: tried CUDA_HOME, CUDA_PATH, PATH, ",
      "/usr/local/cuda and the wheels; install the CUDA toolkit, or its wheels (pip install "
      "nvidia-cuda-nvcc), or set NCCL_EP_JIT_NVCC");
}

// nvcc takes the host compiler from PATH unless it is told otherwise.
Status check_host_compiler() {
  for (const char* name : {"NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_EXTRA_FLAGS"}) {
    if (!variable(name).empty()) return Status();
  }
  if (!on_path("gcc").empty() || !on_path("g++").empty()) return Status();
  return unsupported("NCCL EP compiles its kernels at run time with nvcc, and nvcc finds no host compiler: ",
                     "install g++ or set NVCC_CCBIN");
}

// MAJOR * 10000 + MINOR * 100 + PATCH of an nccl.h; 0 where it does not say.
int header_version(const fs::path& header) {
  std::ifstream file(header);
  int parts[3] = {-1, -1, -1};
  const char* names[3] = {"#define NCCL_MAJOR ", "#define NCCL_MINOR ", "#define NCCL_PATCH "};
  for (std::string line; std::getline(file, line);) {
    for (int i = 0; i < 3; ++i) {
      if (line.rfind(names[i], 0) == 0) parts[i] = std::atoi(line.c_str() + std::string(names[i]).size());
    }
  }
  return parts[0] < 0 || parts[1] < 0 || parts[2] < 0 ? 0 : parts[0] * 10000 + parts[1] * 100 + parts[2];
}

}  // namespace

Status provide_compiler(const std::string& nccl_ep_path, const nccl::Api& nccl) {
  fs::path nvcc;
  NVTE_EP_TRY(find_nvcc({nccl::site_packages(), nccl::site_of_nccl(nccl.path)}, &nvcc));
  NVTE_EP_TRY(check_host_compiler());

  const fs::path ep = folder_of(nccl_ep_path);
  std::vector<fs::path> sources = {variable("NCCL_EP_JIT_SOURCE_DIR")};
  if (sources[0].empty()) {
    if (!variable("NCCL_EP_HOME").empty()) {
      sources.push_back(fs::path(variable("NCCL_EP_HOME")) / "include/nccl_ep");
    }
    // An installation has lib/, the wheel lib/cu12/ and lib/cu13/.
    sources.push_back((ep / "../include/nccl_ep").lexically_normal());
    sources.push_back((ep / "../../include/nccl_ep").lexically_normal());
  }
  const fs::path source = first_with(sources, "device/ht_ep.cuh");
  if (source.empty()) {
    return unsupported("NCCL EP: its headers (device/ht_ep.cuh), which it compiles at run time, are not in ",
                       list(sources), "; set NCCL_EP_JIT_SOURCE_DIR");
  }

  std::vector<fs::path> includes = {variable("NCCL_EP_JIT_BUILD_INCLUDE_DIR")};
  if (includes[0].empty()) {
    includes.push_back((folder_of(nccl.path) / "../include").lexically_normal());
    if (!variable("NCCL_HOME").empty()) includes.push_back(fs::path(variable("NCCL_HOME")) / "include");
    includes.emplace_back("/usr/include");
  }
  const fs::path include = first_with(includes, "nccl_device.h");
  if (include.empty()) {
    return unsupported("NCCL EP: NCCL's headers (nccl_device.h), which it compiles at run time, are not in ",
                       list(includes), "; set NCCL_EP_JIT_BUILD_INCLUDE_DIR");
  }
  const int version = header_version(include / "nccl.h");
  if (version != nccl.version) {
    return unsupported("NCCL EP: expected NCCL's headers to be those of the library (", nccl.version, ", ",
                       nccl.path, "), got ", version, " in ", include.string(),
                       "; set NCCL_EP_JIT_BUILD_INCLUDE_DIR");
  }

  // nvcc knows its own headers; NCCL EP names their folder, too.
  fs::path cuda;
  std::error_code error;
  const fs::path real = fs::canonical(nvcc, error);
  if (!error) cuda = first_with({real.parent_path().parent_path() / "include"}, "cuda_runtime.h");

  setenv("NCCL_EP_JIT_NVCC", nvcc.c_str(), 0);
  setenv("NCCL_EP_JIT_SOURCE_DIR", source.c_str(), 0);
  setenv("NCCL_EP_JIT_BUILD_INCLUDE_DIR", include.c_str(), 0);
  if (!cuda.empty()) setenv("NCCL_EP_JIT_CUDA_INCLUDE_DIR", cuda.c_str(), 0);
  return Status();
}

}  // namespace nccl_ep
}  // namespace nvte_ep
