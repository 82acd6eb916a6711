// What goes into JSON comes out again.
#include "core/json.h"

#include <gtest/gtest.h>

namespace {

using nvte_ep::json_string;

TEST(Json, Strings) {
  EXPECT_EQ(json_string(""), "\"\"");
  EXPECT_EQ(json_string("a \"b\" \\c"), "\"a \\\"b\\\" \\\\c\"");
  EXPECT_EQ(json_string("no NCCL:\n  libnccl.so.2\t(\x01)"),
            "\"no NCCL:\\u000a  libnccl.so.2\\u0009(\\u0001)\"");
  EXPECT_EQ(json_string("\xc2\xb5s"), "\"\xc2\xb5s\"");
}

}  // namespace
