#include "transports/agreement.h"

namespace nvte_ep {

AgreedValues agreed_values(const char* step, const std::vector<Agreed>& mine) {
  AgreedValues values{};
  uint64_t name = 14695981039346656037ull;  // FNV-1a
  for (const char* c = step; *c != 0; ++c) name = (name ^ static_cast<uint8_t>(*c)) * 1099511628211ull;
  values[0] = static_cast<int64_t>(name);
  values[1] = static_cast<int64_t>(mine.size());
  for (size_t i = 0; i < mine.size() && i < kMaxAgreed; ++i) values[i + 2] = mine[i].value;
  return values;
}

Status check_agreement(const std::vector<Agreed>& mine, const std::vector<AgreedValues>& all) {
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r][0] != all[0][0] || all[r][1] != all[0][1]) {
      return invalid_argument("every rank of a group makes the same calls: rank ", r,
                              " is in another one than rank 0");
    }
    for (size_t i = 0; i < mine.size() && i < kMaxAgreed; ++i) {
      if (all[r][i + 2] == all[0][i + 2]) continue;
      return invalid_argument(mine[i].name, ": expected the same on every rank, got ", all[0][i + 2],
                              " on rank 0 and ", all[r][i + 2], " on rank ", r);
    }
  }
  return Status();
}

}  // namespace nvte_ep
