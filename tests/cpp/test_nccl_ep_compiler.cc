// What NCCL EP needs to compile its kernels is found in made-up installations, and told by the environment.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "transports/nccl_ep_compiler.h"

namespace nvte_ep {
namespace {

namespace fs = std::filesystem;

constexpr const char* kVariables[] = {"NCCL_EP_JIT_NVCC",
                                      "NVCC",
                                      "CUDA_HOME",
                                      "CUDA_PATH",
                                      "PATH",
                                      "NCCL_HOME",
                                      "NCCL_EP_HOME",
                                      "NCCL_EP_JIT_SOURCE_DIR",
                                      "NCCL_EP_JIT_BUILD_INCLUDE_DIR",
                                      "NCCL_EP_JIT_CUDA_INCLUDE_DIR",
                                      "NVCC_CCBIN",
                                      "NVCC_PREPEND_FLAGS",
                                      "NVCC_APPEND_FLAGS",
                                      "NVCC_EXTRA_FLAGS"};

void put(const fs::path& path, const std::string& text = "", bool program = false) {
  fs::create_directories(path.parent_path());
  std::ofstream(path) << text;
  if (program) chmod(path.c_str(), 0755);
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

// A machine with everything: a toolkit, a host compiler, and the wheels of NCCL 2.30.7 and NCCL EP.
class NcclEpCompiler : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : kVariables) {
      saved_.emplace_back(name, variable(name));
      unsetenv(name);
    }
    char name[] = "/tmp/nvte_ep_compiler_XXXXXX";
    root_ = fs::canonical(mkdtemp(name));
    put(root_ / "toolkit/bin/nvcc", "", true);
    put(root_ / "toolkit/include/cuda_runtime.h");
    put(root_ / "bin/gcc", "", true);
    put(root_ / "site/nvidia/nccl/lib/libnccl.so.2");
    put(root_ / "site/nvidia/nccl/include/nccl_device.h");
    put(root_ / "site/nvidia/nccl/include/nccl.h",
        "#define NCCL_MAJOR 2\n#define NCCL_MINOR 30\n#define NCCL_PATCH 7\n");
    put(root_ / "site/nccl/ep/lib/cu13/libnccl_ep.so");
    put(root_ / "site/nccl/ep/include/nccl_ep/device/ht_ep.cuh");
    setenv("PATH", (root_ / "bin").c_str(), 1);
    setenv("CUDA_HOME", (root_ / "toolkit").c_str(), 1);
    nccl_.path = (root_ / "site/nvidia/nccl/lib/libnccl.so.2").string();
    nccl_.version = 23007;
  }
  void TearDown() override {
    for (const auto& [name, value] : saved_) {
      if (value.empty()) {
        unsetenv(name.c_str());
      } else {
        setenv(name.c_str(), value.c_str(), 1);
      }
    }
    fs::remove_all(root_);
  }

  Status provide() {
    return nccl_ep::provide_compiler((root_ / "site/nccl/ep/lib/cu13/libnccl_ep.so").string(), nccl_);
  }
  void expect_missing(const std::string& what) {
    const Status status = provide();
    EXPECT_EQ(status.code(), NVTE_EP_STATUS_UNSUPPORTED);
    EXPECT_NE(status.message().find(what), std::string::npos) << status.message();
  }

  fs::path root_;
  nccl::Api nccl_{};
  std::vector<std::pair<std::string, std::string>> saved_;
};

TEST_F(NcclEpCompiler, WheelsAndToolkitNeedNoVariable) {
  const Status status = provide();
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(variable("NCCL_EP_JIT_NVCC"), root_ / "toolkit/bin/nvcc");
  EXPECT_EQ(variable("NCCL_EP_JIT_SOURCE_DIR"), root_ / "site/nccl/ep/include/nccl_ep");
  EXPECT_EQ(variable("NCCL_EP_JIT_BUILD_INCLUDE_DIR"), root_ / "site/nvidia/nccl/include");
  EXPECT_EQ(variable("NCCL_EP_JIT_CUDA_INCLUDE_DIR"), root_ / "toolkit/include");
}

TEST_F(NcclEpCompiler, WhatIsSetStays) {
  put(root_ / "other/bin/nvcc", "", true);
  put(root_ / "mine/device/ht_ep.cuh");
  setenv("NCCL_EP_JIT_NVCC", (root_ / "other/bin/nvcc").c_str(), 1);
  setenv("NCCL_EP_JIT_SOURCE_DIR", (root_ / "mine").c_str(), 1);
  ASSERT_TRUE(provide().ok());
  EXPECT_EQ(variable("NCCL_EP_JIT_NVCC"), root_ / "other/bin/nvcc");
  EXPECT_EQ(variable("NCCL_EP_JIT_SOURCE_DIR"), root_ / "mine");
}

TEST_F(NcclEpCompiler, NvccIsFoundOnThePath) {
  unsetenv("CUDA_HOME");
  put(root_ / "bin/nvcc", "", true);
  ASSERT_TRUE(provide().ok());
  EXPECT_EQ(variable("NCCL_EP_JIT_NVCC"), root_ / "bin/nvcc");
}

TEST_F(NcclEpCompiler, NvccIsFoundAmongTheWheelsThatNcclIsOneOf) {
  if (fs::exists("/usr/local/cuda/bin/nvcc"))
    GTEST_SKIP() << "this machine has /usr/local/cuda, which goes first";
  unsetenv("CUDA_HOME");
  put(root_ / "site/nvidia/cu13/bin/nvcc", "", true);
  ASSERT_TRUE(provide().ok());
  EXPECT_EQ(variable("NCCL_EP_JIT_NVCC"), root_ / "site/nvidia/cu13/bin/nvcc");
}

TEST(NcclApi, Candidates) {
  EXPECT_EQ(nccl::site_of_nccl("/a/site/nvidia/nccl/lib/libnccl.so.2"), "/a/site");
  EXPECT_EQ(nccl::site_of_nccl("/usr/lib/x86_64-linux-gnu/libnccl.so.2"), "");
  EXPECT_EQ(nccl::site_of_nccl("libnccl.so.2"), "");
  using Paths = std::vector<std::string>;
  EXPECT_EQ(nccl::library_candidates("/x.so", {"/s"}, {"w.so"}, "n.so"), Paths{"/x.so"});
  EXPECT_EQ(nccl::library_candidates("", {"", "/s"}, {"v.so", "w.so"}, "n.so"),
            (Paths{"/s/v.so", "/s/w.so", "n.so"}));
  EXPECT_EQ(nccl::library_candidates(nullptr, {}, {"w.so"}, "n.so"), Paths{"n.so"});
}

TEST_F(NcclEpCompiler, AnInstallationBesideItsHeaders) {
  put(root_ / "ep/lib/libnccl_ep.so.0");
  put(root_ / "ep/include/nccl_ep/device/ht_ep.cuh");
  ASSERT_TRUE(nccl_ep::provide_compiler((root_ / "ep/lib/libnccl_ep.so.0").string(), nccl_).ok());
  EXPECT_EQ(variable("NCCL_EP_JIT_SOURCE_DIR"), root_ / "ep/include/nccl_ep");
}

TEST_F(NcclEpCompiler, WhatIsMissingIsNamed) {
  setenv("NCCL_EP_JIT_NVCC", "/nowhere/nvcc", 1);
  expect_missing("NCCL_EP_JIT_NVCC=/nowhere/nvcc is no program");
  unsetenv("NCCL_EP_JIT_NVCC");

  fs::remove(root_ / "bin/gcc");
  expect_missing("no host compiler");
  setenv("NVCC_CCBIN", "/usr/bin/g++-12", 1);
  EXPECT_TRUE(provide().ok());
}

TEST_F(NcclEpCompiler, NoHeadersOfNcclEp) {
  fs::remove(root_ / "site/nccl/ep/include/nccl_ep/device/ht_ep.cuh");
  expect_missing("device/ht_ep.cuh");
}

TEST_F(NcclEpCompiler, NoHeadersOfNccl) {
  setenv("NCCL_EP_JIT_BUILD_INCLUDE_DIR", "/nowhere", 1);
  expect_missing("nccl_device.h");
}

TEST_F(NcclEpCompiler, HeadersOfAnotherNccl) {
  nccl_.version = 23009;
  expect_missing("got 23007");
}

}  // namespace
}  // namespace nvte_ep
