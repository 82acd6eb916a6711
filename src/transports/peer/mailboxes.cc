#include "transports/peer/mailboxes.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <thread>
#include <utility>

#include "transports/peer/cuda_status.h"

namespace nvte_ep {

Mailboxes::~Mailboxes() {
  if (in_ != nullptr) backend_->release_shared(in_);
}

Status Mailboxes::open(Backend* backend, int32_t rank, std::vector<uint8_t*> boxes, nvte_ep_stream_t stream) {
  backend_ = backend;
  rank_ = rank;
  boxes_ = std::move(boxes);
  stream_ = stream;
  void* memory = nullptr;
  const int64_t mails = static_cast<int64_t>(boxes_.size()) + 2;
  NVTE_EP_TRY(backend->allocate_shared(mails * static_cast<int64_t>(sizeof(Mail)), &memory));
  in_ = static_cast<Mail*>(memory);
  out_ = in_ + boxes_.size();
  return Status();
}

Status Mailboxes::read(int64_t place) {
  const size_t bytes = boxes_.size() * sizeof(Mail);
  return backend_->with_device([&] {
    NVTE_EP_TRY(peer_cuda_status(
        cudaMemcpyAsync(in_, boxes_[static_cast<size_t>(rank_)] + static_cast<size_t>(place) * bytes, bytes,
                        cudaMemcpyDefault, stream_),
        "cudaMemcpyAsync"));
    return peer_cuda_status(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  });
}

Status Mailboxes::exchange(const AgreedValues& mine, int64_t timeout_ns, const std::function<Status()>& check,
                           const std::function<Status(const std::vector<int32_t>&)>& late,
                           std::vector<AgreedValues>* all) {
  if (out_ == nullptr) return bad_state("comm: its ranks' mailboxes were not opened");
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::nanoseconds(timeout_ns);
  const size_t ranks = boxes_.size();
  const int64_t place = ++round_ % 2;
  Mail& mail = out_[place];
  mail.values = mine;
  mail.round = round_;
  NVTE_EP_TRY(backend_->with_device([&]() -> Status {
    for (uint8_t* box : boxes_) {
      Mail* to =
          reinterpret_cast<Mail*>(box) + static_cast<size_t>(place) * ranks + static_cast<size_t>(rank_);
      NVTE_EP_TRY(peer_cuda_status(
          cudaMemcpyAsync(&to->values, &mail.values, sizeof(mail.values), cudaMemcpyDefault, stream_),
          "cudaMemcpyAsync"));
      NVTE_EP_TRY(peer_cuda_status(
          cudaMemcpyAsync(&to->round, &mail.round, sizeof(mail.round), cudaMemcpyDefault, stream_),
          "cudaMemcpyAsync"));
    }
    return Status();
  }));
  for (auto pause = std::chrono::microseconds(20);;
       pause = std::min(2 * pause, std::chrono::microseconds(1000))) {
    NVTE_EP_TRY(read(place));
    std::vector<int32_t> missing;
    for (size_t r = 0; r < ranks; ++r) {
      if (in_[r].round != round_) missing.push_back(static_cast<int32_t>(r));
    }
    if (missing.empty()) break;
    NVTE_EP_TRY(check());
    if (Clock::now() > deadline) return late(missing);
    std::this_thread::sleep_for(pause);
  }
  NVTE_EP_TRY(read(place));  // a number may have been seen before its values
  all->clear();
  for (size_t r = 0; r < ranks; ++r) all->push_back(in_[r].values);
  return Status();
}

}  // namespace nvte_ep
