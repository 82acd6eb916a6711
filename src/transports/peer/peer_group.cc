#include "transports/peer/peer_group.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "core/row_layout.h"
#include "transports/peer/prepare.h"
#include "transports/peer/prepare_few.h"

namespace nvte_ep {
namespace {

constexpr int32_t kRanksPerOutbox = 4;  // more of them make it larger: a compromise of memory and passes
constexpr int64_t kSmallOutbox = int64_t{16} << 20;
constexpr int64_t kLargestStep = 512;  // bytes of a partial row that has few columns, rounded up

}  // namespace

PoolLayout::PoolLayout(const GroupSettings& s, int32_t size) {
  int64_t at = kFlagBytes;
  const auto place = [&at](Area* area, int64_t area_bytes) {
    area->offset = at;
    area->bytes = round_up(std::max<int64_t>(area_bytes, 4), 256);
    at += 2 * area->bytes;
  };
  const int64_t tokens = s.max_tokens_per_rank;
  const int64_t choices = tokens * s.max_top_k;
  const int64_t row = row_layout(*find_format(NVTE_EP_FORMAT_BF16), s.hidden).row_bytes;  // the widest
  place(&indices, choices * 4);
  place(&histograms, prepare_chunks(tokens) * int64_t{s.num_experts} * 4);
  place(&inbox, prepare_inbox_bytes(size, s.max_tokens_per_rank, s.max_top_k));
  // Partial rows: all of them where that is little, and those of one token at least, of any type.
  const int64_t partial_rows = std::min((size - 1) * tokens * std::max(row, kLargestStep), kSmallOutbox);
  const int64_t least = (size - 1) * std::max(2 * row, kLargestStep);
  place(&outbox, std::max({tokens * row * std::max(1, size / kRanksPerOutbox), partial_rows, least}));
  place(&weights.area, choices * 4);
  place(&weights.given, 4);
  place(&gradients.area, (size - 1) * choices * 4);
  place(&gradients.given, 4);
  place(&exponents.area, int64_t{s.num_experts} * 4);
  bytes = at;
}

Status PeerGroup::open(Communicator* comm) {
  const int32_t size = comm->size();
  NVTE_EP_TRY(backend_->with_device(
      [&] { return describe_launches(settings_.device.id, settings_.num_sms, &context_); }));
  RouteMaps largest;
  largest.num_experts = settings_.num_experts;
  largest.top_k = settings_.max_top_k;
  NVTE_EP_TRY(check_prepare(largest, context_));
  NVTE_EP_TRY(backend_->preload());  // before any rank can wait for another one on the device
  layout_ = PoolLayout(settings_, size);
  NVTE_EP_TRY(open_peer_memory(comm, settings_, backend_, layout_.bytes, &memory_));

  const std::vector<uint8_t*>& pools = memory_->pools();
  NVTE_EP_TRY(pointers_.reserve(backend_, size * int64_t{8}));
  NVTE_EP_TRY(backend_->upload(pointers_.as<void>(), pools.data(), size * int64_t{8}, nullptr));
  NVTE_EP_TRY(words_.reserve(backend_, 2 * 4));
  pools_.base = pointers_.as<uint8_t*>();
  pools_.own = memory_->own_pool();
  pools_.rank = comm->rank();
  pools_.size = size;
  pools_.epoch = reinterpret_cast<uint32_t*>(pools_.own + kFlagBytes) - 1;

  meeting_.rank = pools_.rank;
  meeting_.size = size;
  meeting_.arrivals = pointers_.as<uint64_t*>();
  meeting_.epoch = reinterpret_cast<uint32_t*>(pools_.own + kFlagBytes) - 1;
  meeting_.failed = words_.as<int32_t>() + 1;
  meeting_.timeout_ns = settings_.timeout_ns;
  meeting_.report = memory_->report();
  meeting_.ended = memory_->ended();
  meeting_.ended_words = memory_->ended_words();
  meeting_.maxima = reinterpret_cast<uint32_t*>(pools_.own + layout_.exponents.area.offset);
  meeting_.maxima_distance = layout_.exponents.area.distance() / 4;
  meeting_.num_maxima = settings_.num_experts;
  // Nobody waits on a device for a rank that still allocates and copies there.
  return memory_->agree("group_create", {}, nullptr);
}

Status PeerGroup::wait(nvte_ep_stream_t stream) {
  for (;;) {
    bool idle = false;
    NVTE_EP_TRY(backend_->is_idle(stream, &idle));
    int32_t ignored;
    if (idle) return failure(&ignored);
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

}  // namespace nvte_ep
