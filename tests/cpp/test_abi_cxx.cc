// The header under every C++ standard from 14 on, and structs of other sizes than today's.
#include "model.h"

long header_user_14();
long header_user_17();
long header_user_20();

namespace {

using namespace ep_test;

TEST(Header, CompilesAndMeansTheSameInEveryStandard) {
  EXPECT_EQ(header_user_14(), 201402L);
  EXPECT_EQ(header_user_17(), 201703L);
  EXPECT_GE(header_user_20(), 201709L);
}

TEST(Library, VersionsAndNames) {
  EXPECT_EQ(nvte_ep_version(),
            NVTE_EP_VERSION_MAJOR * 10000 + NVTE_EP_VERSION_MINOR * 100 + NVTE_EP_VERSION_PATCH);
  EXPECT_EQ(nvte_ep_abi_version(), NVTE_EP_ABI_VERSION);
  const char* const names[] = {
      "OK",        "INVALID_ARGUMENT", "UNSUPPORTED", "BAD_STATE", "OUT_OF_MEMORY", "CUDA",
      "TRANSPORT", "PEER_FAILED",      "TIMEOUT",     "OVERFLOW",  "ABI_MISMATCH",  "INTERNAL"};
  for (int32_t status = 0; status < 12; ++status) EXPECT_STREQ(nvte_ep_status_name(status), names[status]);
  for (int32_t status : {-1, 12, 1000, std::numeric_limits<int32_t>::min()})
    EXPECT_STREQ(nvte_ep_status_name(status), "UNKNOWN");
}

TEST(Library, BuildInfoIsOneLivingText) {
  const char* first = nullptr;
  const char* second = nullptr;
  require(nvte_ep_build_info(&first));
  require(nvte_ep_build_info(&second));
  EXPECT_EQ(first, second);
  for (const char* part : {"\"version\"", "\"abi_version\": 1", "\"formats\"", "\"bf16\"", "\"mxfp8\"",
                           "\"nvfp4\"", "\"backends\"", "\"host\"", "\"cuda\"", "\"transports\"",
                           "\"threads\"", "\"peer\"", "\"nccl_ep\"", "\"nccl\""}) {
    EXPECT_NE(std::string(first).find(part), std::string::npos) << part << " in " << first;
  }
}

TEST(LastError, BelongsToItsThreadAndEndsWithASuccess) {
  int64_t bytes = 0;
  expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_row_bytes(NVTE_EP_FORMAT_NVFP4, 7, &bytes),
                {"nvte_ep_row_bytes: hidden: ", "16", "7"});
  const std::string mine = nvte_ep_last_error();
  std::thread([] {
    EXPECT_STREQ(nvte_ep_last_error(), "");
    int64_t ignored = 0;
    expect_status(NVTE_EP_STATUS_UNSUPPORTED, nvte_ep_row_bytes(99, 16, &ignored),
                  {"nvte_ep_row_bytes: format: "});
  }).join();
  EXPECT_EQ(mine, nvte_ep_last_error()) << "another thread's failure is not this one's";
  require(nvte_ep_row_bytes(NVTE_EP_FORMAT_NVFP4, 16, &bytes));
  EXPECT_STREQ(nvte_ep_last_error(), "");
}

// One printf of a call that fails and of its text may ask for the text first.
TEST(LastError, TextThatIsHeldIsTheNextFailures) {
  int64_t bytes = 0;
  require(nvte_ep_row_bytes(NVTE_EP_FORMAT_NVFP4, 16, &bytes));
  const char* const held = nvte_ep_last_error();
  expect_status(NVTE_EP_STATUS_INVALID_ARGUMENT, nvte_ep_row_bytes(NVTE_EP_FORMAT_NVFP4, 7, &bytes),
                {"nvte_ep_row_bytes: hidden: "});
  EXPECT_EQ(held, nvte_ep_last_error());
  EXPECT_EQ(std::string(held).rfind("nvte_ep_row_bytes: hidden: ", 0), 0u);
}

// An output struct of a later version: what this library knows is written, struct_size and the rest are the caller's.
TEST(Structs, OutputsOfALaterVersionKeepTheirTail) {
  struct Later {
    nvte_ep_format_info_t known = NVTE_EP_FORMAT_INFO_INIT;
    uint64_t added = 0;
  } later;
  later.known.struct_size = sizeof(Later);
  require(nvte_ep_format_info(NVTE_EP_FORMAT_NVFP4, &later.known));
  EXPECT_EQ(later.known.struct_size, sizeof(Later));
  EXPECT_STREQ(later.known.name, "nvfp4");
  EXPECT_EQ(later.added, 0u);
}

TEST(Structs, TheFirstVersionOfEachIsStillAccepted) {
  static_assert(sizeof(nvte_ep_group_config_t) >= NVTE_EP_GROUP_CONFIG_V1_SIZE, "structs only grow");
  run_ranks(1, [](Rank& rank) {
    nvte_ep_group_config_t config = group_config(2, 32, 4, 0);
    config.struct_size = NVTE_EP_GROUP_CONFIG_V1_SIZE;
    const Group group = make_group(rank, config);
    nvte_ep_handle_config_t settings = handle_config(1, 1);
    settings.struct_size = NVTE_EP_HANDLE_CONFIG_V1_SIZE;
    const Handle handle = make_handle(group, settings);
  });
}

}  // namespace
