// Direct receive and scale tiles: the CUDA backend writes the host backend's bytes, and no others.
#include "codec_calls.h"

namespace nvte_ep::testing {
namespace {

class ReceiveParity : public CudaTest {
 protected:
  // Rows that look received: quantised tokens of one kind, some rows hostile.
  std::unique_ptr<Rows> make_rows(int32_t format, int64_t rows, int64_t hidden, Data kind, bool hostile,
                                  Rng* rng) {
    auto out =
        std::make_unique<Rows>(format, rows, hidden, true, true, 16 * static_cast<int64_t>((*rng)() % 2));
    Tokens tokens(DType::kBFloat16, rows, hidden, hidden);
    tokens.set(make_values(kind, rows, hidden, rng));
    EXPECT_TRUE(host_->quantize(format, tokens.on(false), out->on(false), CodecOptions(), nullptr).ok());
    if (hostile) {
      for (int64_t r = 0; r < rows; ++r) {
        if ((*rng)() % 4 != 0) continue;
        uint8_t* row = out->payload->host() + r * out->payload_stride;
        const std::vector<uint8_t> bytes = random_bytes(static_cast<size_t>(out->layout.row_bytes), rng);
        std::memcpy(row, bytes.data(), bytes.size());
        const float scales[] = {0.0f,          exp2_int(int((*rng)() % 222) - 116), NAN, -1.0f, exp2_int(105),
                                exp2_int(-116)};
        if (out->layout.token_scale_bytes)
          std::memcpy(row + out->layout.token_scale_offset, &scales[(*rng)() % 6], 4);
      }
    }
    out->payload->upload();
    return out;
  }
  void receive_both(Rows* rows, Mirror* counts, bool is_int64, Operand* operand, const Options& options,
                    const std::function<void(OperandView*)>& change = {}) {
    for (const bool cuda : {false, true}) {
      OperandView view = operand->on(cuda);
      if (change) change(&view);
      const Status status =
          (cuda ? cuda_ : host_)
              ->direct_receive(rows->format, rows->on(cuda), IndexView{counts->on(cuda), is_int64}, view,
                               options.on(cuda), nullptr);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    ASSERT_CUDA(cudaDeviceSynchronize());
    EXPECT_TRUE(operand->equal());
    if (options.findings) {
      EXPECT_TRUE(options.findings->equal("findings"));
    }
  }
  std::unique_ptr<Mirror> make_counts(const std::vector<int64_t>& counts, bool is_int64) {
    return is_int64 ? Mirror::of(counts) : Mirror::of(std::vector<int32_t>(counts.begin(), counts.end()));
  }
};

// Slabs that fill the capacity more or less.
std::vector<int64_t> random_counts(int32_t experts, int64_t capacity, int64_t alignment, Rng* rng) {
  std::vector<int64_t> counts(experts, 0);
  int64_t left = capacity / alignment;
  for (int32_t e = 0; e < experts; ++e) {
    const int64_t n = (*rng)() % 3 == 0
                          ? 0
                          : static_cast<int64_t>((*rng)() % static_cast<uint64_t>(2 * left / experts + 2));
    counts[e] = std::min(n, left) * alignment;
    left -= counts[e] / alignment;
  }
  return counts;
}

TEST_F(ReceiveParity, AnyShape) {
  Rng rng(11);
  int64_t cases = 0;
  for (const int32_t format : {NVTE_EP_FORMAT_NVFP4, NVTE_EP_FORMAT_MXFP8}) {
    for (const int64_t hidden : {32, 64, 96, 128, 160, 288, 512, 1024, 1056, 1312, 2048, 2720, 2880, 4096}) {
      for (const int32_t alignment : {1, 8, 16, 32, 128, 256}) {
        for (int i = 0; i < 3; ++i) {
          const bool columnwise = alignment >= find_format(format)->columnwise_alignment && i != 0;
          OperandShape shape;
          shape.format = format;
          shape.linear_scales = rng() % 3 == 0;
          shape.hidden = hidden;
          shape.alignment = alignment;
          shape.num_experts = 1 + static_cast<int32_t>(rng() % 9);
          shape.capacity = round_up(200 + static_cast<int64_t>(rng() % 500), alignment);
          SCOPED_TRACE(text("case ", cases++, " format ", format, " hidden ", hidden, " alignment ",
                            alignment, " experts ", shape.num_experts, " capacity ", shape.capacity,
                            columnwise ? " columnwise" : "", shape.linear_scales ? " linear" : ""));
          auto rows = make_rows(format, shape.capacity, hidden, kAllData[rng() % 6], rng() % 3 == 0, &rng);
          const bool is_int64 = rng() % 2;
          std::vector<int64_t> counts = random_counts(shape.num_experts, shape.capacity, alignment, &rng);
          if (rng() % 4 == 0)
            counts[rng() % counts.size()] = static_cast<int64_t>(rng() % 100000) - 100;  // clamped
          auto given = make_counts(counts, is_int64);
          Options options;
          options.with_findings();
          options.plain.column_max = rng() % 2;
          options.plain.scale_up = rng() % 2;
          options.plain.rank = static_cast<int32_t>(rng() % 1024);
          if (format == NVTE_EP_FORMAT_NVFP4 && rng() % 2)
            options.with_rng(static_cast<int64_t>(rng()), static_cast<int64_t>(rng()));
          if (format == NVTE_EP_FORMAT_NVFP4 && rng() % 3 == 0) {
            std::vector<float> fixed(shape.num_experts);
            for (float& f : fixed) f = rng() % 5 == 0 ? 3.0f : exp2_int(static_cast<int>(rng() % 40) - 25);
            options.fixed_expert_scale = Mirror::of(fixed);
          }
          Operand operand(shape, columnwise);
          receive_both(rows.get(), given.get(), is_int64, &operand, options);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// In shapes that compute-sanitizer gets through.
TEST_F(ReceiveParity, SmallShapes) {
  Rng rng(18);
  for (const int32_t format : {NVTE_EP_FORMAT_NVFP4, NVTE_EP_FORMAT_MXFP8}) {
    for (const int64_t hidden : {96, 1056}) {
      for (const bool columnwise : {false, true}) {
        for (const bool linear : {false, true}) {
          OperandShape shape;
          shape.format = format;
          shape.linear_scales = linear;
          shape.hidden = hidden;
          shape.alignment = 32;
          shape.num_experts = 3;
          shape.capacity = 224;
          auto rows = make_rows(format, shape.capacity, hidden, Data::kGaussian, true, &rng);
          auto counts = make_counts({32, 0, 160}, linear);
          Options options;
          options.with_findings();
          if (linear && format == NVTE_EP_FORMAT_NVFP4) options.with_rng(3, 4);
          Operand operand(shape, columnwise);
          receive_both(rows.get(), counts.get(), linear, &operand, options);
        }
      }
    }
  }
}

TEST_F(ReceiveParity, PartsThatAreNotWanted) {
  Rng rng(12);
  for (const int32_t format : {NVTE_EP_FORMAT_NVFP4, NVTE_EP_FORMAT_MXFP8}) {
    for (const bool linear : {false, true}) {
      for (int mask = 1; mask < 256; ++mask) {
        OperandShape shape;
        shape.format = format;
        shape.linear_scales = linear;
        shape.hidden = 1056;
        shape.alignment = 32;
        shape.num_experts = 3;
        shape.capacity = 320;
        if (format == NVTE_EP_FORMAT_MXFP8 && mask >= 16) break;
        auto rows = make_rows(format, shape.capacity, shape.hidden, Data::kGaussian, true, &rng);
        auto counts = make_counts({96, 0, 160}, true);
        Operand operand(shape, true);
        receive_both(rows.get(), counts.get(), true, &operand, Options(), [mask](OperandView* v) {
          const auto drop = [mask](int bit, auto** part) {
            if (!(mask >> bit & 1)) *part = nullptr;
          };
          drop(0, &v->payload);
          drop(1, &v->scales);
          drop(2, &v->columnwise_payload);
          drop(3, &v->columnwise_scales);
          drop(4, &v->amax);
          drop(5, &v->columnwise_amax);
          drop(6, &v->expert_scale);
          drop(7, &v->columnwise_expert_scale);
        });
        ASSERT_FALSE(HasFailure()) << "format " << format << " linear " << linear << " parts " << mask;
      }
    }
  }
}

TEST_F(ReceiveParity, ManyExpertsAndLargeSlabs) {
  Rng rng(13);
  for (const int32_t experts : {1, 64, 257, 700}) {
    for (const bool columnwise : {false, true}) {
      OperandShape shape;
      shape.format = NVTE_EP_FORMAT_NVFP4;
      shape.hidden = 288;
      shape.alignment = 16;
      shape.num_experts = experts;
      shape.capacity = 9600;
      auto rows = make_rows(shape.format, shape.capacity, shape.hidden, Data::kWide, true, &rng);
      auto counts = make_counts(random_counts(experts, shape.capacity, 16, &rng), false);
      Options options;
      options.with_findings();
      Operand operand(shape, columnwise);
      receive_both(rows.get(), counts.get(), false, &operand, options);
      ASSERT_FALSE(HasFailure()) << experts << " experts";
    }
  }
}

TEST_F(ReceiveParity, NoRowsAtAll) {
  Rng rng(14);
  for (const int32_t format : {NVTE_EP_FORMAT_NVFP4, NVTE_EP_FORMAT_MXFP8}) {
    for (const int64_t rows_given : {0, 128}) {
      OperandShape shape;
      shape.format = format;
      shape.hidden = 128;
      shape.num_experts = 4;
      shape.capacity = rows_given;
      auto rows = make_rows(format, rows_given, 128, Data::kGaussian, false, &rng);
      for (const int64_t asked : {0, 7}) {
        auto counts = make_counts({0, asked, 0, 0}, true);
        Options options;
        options.with_findings();
        Operand operand(shape, true);
        receive_both(rows.get(), counts.get(), true, &operand, options);
      }
    }
  }
}

// Exponents far apart: the whole range of rescaling, and blocks whose scale becomes 0.
TEST_F(ReceiveParity, EveryRescaling) {
  Rng rng(15);
  const int64_t hidden = 2048;
  OperandShape shape;
  shape.format = NVTE_EP_FORMAT_NVFP4;
  shape.hidden = hidden;
  shape.alignment = 16;
  shape.num_experts = 2;
  shape.capacity = 512;
  for (const bool columnwise : {false, true}) {
    for (const bool fixed : {false, true}) {
      Rows rows(shape.format, shape.capacity, hidden, true);
      const std::vector<uint8_t> bytes = random_bytes(rows.payload->bytes(), &rng);
      std::memcpy(rows.payload->host(), bytes.data(), bytes.size());
      for (int64_t r = 0; r < shape.capacity; ++r) {
        uint8_t* row = rows.payload->host() + r * rows.payload_stride;
        for (int64_t j = 0; j < 128; ++j)
          row[hidden / 2 + j] = static_cast<uint8_t>(j + (r % 2) * 128);  // every scale byte
        const float scale = exp2_int(r < 256 ? 40 - static_cast<int>(r % 64) : static_cast<int>(r) - 370);
        std::memcpy(row + rows.layout.token_scale_offset, &scale, 4);
      }
      rows.payload->upload();
      auto counts = make_counts({256, 256}, true);
      Options options;
      options.with_findings();
      if (fixed) options.fixed_expert_scale = Mirror::of(std::vector<float>{exp2_int(3), exp2_int(0)});
      Operand operand(shape, columnwise);
      receive_both(&rows, counts.get(), true, &operand, options);
      ASSERT_FALSE(HasFailure()) << (columnwise ? "columnwise " : "") << (fixed ? "fixed" : "");
    }
  }
}

// Rows that lie in any order, some of them "late", with exponents that are found or known: the bytes of rows in a row.
TEST_F(ReceiveParity, RowsAnywhere) {
  Rng rng(19);
  for (const int32_t format : {NVTE_EP_FORMAT_NVFP4, NVTE_EP_FORMAT_MXFP8}) {
    for (const bool columnwise : {false, true}) {
      for (const bool late : {false, true}) {
        for (const bool known : {false, true}) {
          if ((late && !columnwise) || (known && format != NVTE_EP_FORMAT_NVFP4)) continue;
          SCOPED_TRACE(text("format ", format, columnwise ? " columnwise" : "", late ? " late" : "",
                            known ? " known exponents" : ""));
          OperandShape shape;
          shape.format = format;
          shape.hidden = 1056;
          shape.alignment = 32;
          shape.num_experts = 5;
          shape.capacity = 1024;
          auto rows = make_rows(format, shape.capacity, shape.hidden, Data::kGaussian, true, &rng);
          auto counts = make_counts(random_counts(shape.num_experts, shape.capacity, 32, &rng), true);
          // Row i at place (i * 37) % 1024.
          Mirror scattered(rows->payload->bytes());
          std::vector<const uint8_t*> found;
          for (int64_t i = 0; i < shape.capacity; ++i) {
            const int64_t place = i * 37 % shape.capacity * rows->payload_stride;
            std::memcpy(scattered.host() + place, rows->payload->host() + i * rows->payload_stride,
                        static_cast<size_t>(rows->payload_stride));
            found.push_back(scattered.device() + place);
          }
          scattered.upload();
          auto anywhere = Mirror::of(found);

          Operand operand(shape, columnwise);
          Options options;
          options.with_findings();
          OperandView view = operand.on(false);
          const IndexView index{counts->host(), true};
          ASSERT_TRUE(
              host_->direct_receive(format, rows->on(false), index, view, options.on(false), nullptr).ok());
          std::unique_ptr<Mirror> exponents;
          CodecOptions codec = options.on(true);
          if (known) {
            std::vector<uint8_t> bytes;
            for (int32_t e = 0; e < shape.num_experts; ++e) {
              for (const float scale :
                   {view.expert_scale[e], columnwise ? view.columnwise_expert_scale[e] : 0}) {
                int k = Nvfp4::kMinExponent;
                Nvfp4::classify(scale, &k);
                bytes.push_back(static_cast<uint8_t>(k - Nvfp4::kMinExponent));
              }
            }
            exponents = Mirror::of(bytes);
            codec.expert_exponents = exponents->device();
            // Published already.
            const OperandView there = operand.on(true);
            const auto publish = [&](float* to, const float* from) {
              if (to != nullptr)
                check_cuda(cudaMemcpy(to, from, shape.num_experts * 4, cudaMemcpyHostToDevice));
            };
            publish(there.amax, view.amax);
            publish(there.expert_scale, view.expert_scale);
            publish(there.columnwise_amax, view.columnwise_amax);
            publish(there.columnwise_expert_scale, view.columnwise_expert_scale);
          }
          RowsView where = rows->on(true);
          where.anywhere = reinterpret_cast<const uint8_t* const*>(anywhere->device());
          if (late) {
            where.late_begin = scattered.device() + scattered.bytes() / 2;
            where.late_end = scattered.device() + scattered.bytes() / 2 + 40 * rows->payload_stride;
          }
          const Status status = cuda_->direct_receive(format, where, IndexView{counts->device(), true},
                                                      operand.on(true), codec, nullptr);
          ASSERT_TRUE(status.ok()) << status.message();
          ASSERT_CUDA(cudaDeviceSynchronize());
          EXPECT_TRUE(operand.equal());
          EXPECT_TRUE(options.findings->equal("findings"));
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Calls that overlap on several streams do not meet: they have no memory in common.
TEST_F(ReceiveParity, StreamsOverlap) {
  Rng rng(16);
  constexpr int kStreams = 4;
  OperandShape shape;
  shape.format = NVTE_EP_FORMAT_NVFP4;
  shape.hidden = 1024;
  shape.num_experts = 4;
  shape.capacity = 1024;
  std::vector<std::unique_ptr<Rows>> rows;
  std::vector<std::unique_ptr<Operand>> operands;
  std::vector<cudaStream_t> streams(kStreams);
  auto counts = make_counts({128, 256, 0, 512}, true);
  for (int i = 0; i < kStreams; ++i) {
    rows.push_back(make_rows(shape.format, shape.capacity, shape.hidden,
                             i % 2 ? Data::kWide : Data::kGaussian, false, &rng));
    operands.push_back(std::make_unique<Operand>(shape, i % 2 == 0));
    ASSERT_CUDA(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    ASSERT_TRUE(host_
                    ->direct_receive(shape.format, rows[i]->on(false), IndexView{counts->on(false), true},
                                     operands[i]->on(false), CodecOptions(), nullptr)
                    .ok());
  }
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < kStreams; ++i) {
      ASSERT_TRUE(cuda_
                      ->direct_receive(shape.format, rows[i]->on(true), IndexView{counts->on(true), true},
                                       operands[i]->on(true), CodecOptions(), streams[i])
                      .ok());
    }
  }
  ASSERT_CUDA(cudaDeviceSynchronize());
  for (int i = 0; i < kStreams; ++i) {
    EXPECT_TRUE(operands[i]->equal());
    ASSERT_CUDA(cudaStreamDestroy(streams[i]));
  }
}

TEST_F(ReceiveParity, Swizzle) {
  Rng rng(17);
  for (const int64_t columns : {1, 2, 3, 4, 5, 16, 18, 63, 64, 65, 180, 448, 1000}) {
    for (const int64_t rows : {1, 31, 128, 129, 700}) {
      for (const bool grouped : {false, true}) {
        for (const int64_t extra : {0, 1, 16}) {
          SCOPED_TRACE(text("columns ", columns, " rows ", rows, grouped ? " grouped" : "", " stride ",
                            columns + extra));
          const int64_t stride = columns + extra;
          auto scales =
              Mirror::of(random_bytes(static_cast<size_t>(rows * stride), &rng), extra == 1 ? 3 : 0);
          std::vector<int64_t> counts{rows / 3, 0, rows / 2, rng() % 4 == 0 ? rows : 1};
          auto given = Mirror::of(counts);
          int64_t tile_rows = grouped ? (rows + 127 * 4) / 128 * 128 : round_up(rows, 128);
          Mirror tiles(static_cast<size_t>(tile_rows * round_up(columns, 4)));
          Mirror back(static_cast<size_t>(rows * stride), extra == 1 ? 3 : 0);
          for (const bool inverse : {false, true}) {
            // Fewer tiles than slabs ask for: what lies past them is left alone.
            if (inverse && grouped && rng() % 2) tile_rows = round_up(rows, 128);
            for (const bool cuda : {false, true}) {
              TensorView v;
              v.data = (inverse ? &back : scales.get())->on(cuda);
              v.dtype = DType::kUInt8;
              v.ndim = 2;
              v.shape[0] = rows;
              v.shape[1] = columns;
              v.stride = stride;
              const IndexView index{grouped ? given->on(cuda) : nullptr, true};
              ASSERT_TRUE((cuda ? cuda_ : host_)
                              ->swizzle(v, index, 4, tiles.on(cuda), tile_rows, inverse, nullptr)
                              .ok());
            }
            ASSERT_CUDA(cudaDeviceSynchronize());
            ASSERT_TRUE(inverse ? back.equal("scales") : tiles.equal("tiles"));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace nvte_ep::testing
