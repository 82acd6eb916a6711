// Pack, quantise, assemble, unpack: the CUDA backend writes the host backend's bytes.
#include "codec_calls.h"

namespace nvte_ep::testing {
namespace {

constexpr int32_t kFormatIds[] = {NVTE_EP_FORMAT_BF16, NVTE_EP_FORMAT_MXFP8, NVTE_EP_FORMAT_NVFP4};
constexpr DType kDTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
// Narrow and wide, odd counts of blocks, scale sections at odd multiples of 8, rows wider than a thread block
// holds.
constexpr int64_t kHidden[] = {16,   32,   48,   64,   96,   160,  272,   512,   1024, 1040,
                               2048, 2720, 2880, 4096, 7168, 8192, 16384, 16400, 20512};

class CodecParity : public CudaTest {
 protected:
  void quantize_both(Rows* rows, Tokens* tokens, const Options& options) {
    for (const bool cuda : {false, true}) {
      const Status status =
          (cuda ? cuda_ : host_)
              ->quantize(rows->format, tokens->on(cuda), rows->on(cuda), options.on(cuda), nullptr);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    ASSERT_CUDA(cudaDeviceSynchronize());
    EXPECT_TRUE(rows->equal());
    if (options.findings) {
      EXPECT_TRUE(options.findings->equal("findings"));
    }
  }
  void dequantize_both(Rows* rows, Tokens* tokens, const Options& options,
                       const RowWeighting& host_weighting = {}, const RowWeighting& cuda_weighting = {}) {
    for (const bool cuda : {false, true}) {
      const Status status = (cuda ? cuda_ : host_)
                                ->dequantize(rows->format, rows->on(cuda), tokens->on(cuda), options.on(cuda),
                                             cuda ? cuda_weighting : host_weighting, nullptr);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    ASSERT_CUDA(cudaDeviceSynchronize());
    EXPECT_TRUE(tokens->equal());
    if (options.findings) {
      EXPECT_TRUE(options.findings->equal("findings"));
    }
  }
};

TEST_F(CodecParity, QuantizeAnyShapeAndData) {
  Rng rng(1);
  for (const int32_t format : kFormatIds) {
    for (const int64_t hidden : kHidden) {
      if (hidden % find_format(format)->hidden_multiple != 0) continue;
      for (const DType dtype : kDTypes) {
        for (const Data kind : kAllData) {
          const int64_t rows = hidden > 4096 ? 5 : 33;
          const bool packed = rng() % 2;
          const int64_t stride = hidden + static_cast<int64_t>(rng() % 3) * (rng() % 2 ? 8 : 1);
          SCOPED_TRACE(text("format ", format, " hidden ", hidden, " dtype ", dtype_name(dtype), " data ",
                            int(kind), packed ? " packed" : " apart", " stride ", stride));
          Tokens tokens(dtype, rows, hidden, stride,
                        rng() % 3 == 0 ? static_cast<size_t>(dtype_bytes(dtype)) : 0);
          tokens.set(make_values(kind, rows, hidden, &rng));
          Options options;
          options.plain.saturate = rng() % 2;
          options.plain.scale_up = rng() % 2;
          if (format == NVTE_EP_FORMAT_NVFP4 && rng() % 2) {
            options.with_rng(static_cast<int64_t>(rng()), static_cast<int64_t>(rng()));
            options.plain.row_id_base = rng() % 1000;
          }
          Rows out(format, rows, hidden, packed, true,
                   packed ? 16 * static_cast<int64_t>(rng() % 2) : static_cast<int64_t>(rng() % 2) * 3,
                   rng() % 2 ? 0 : rng() % 8);
          quantize_both(&out, &tokens, options);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Where there are many rows, a warp makes a row of its own.
TEST_F(CodecParity, QuantizeManyRows) {
  Rng rng(8);
  const int64_t rows = 700;
  for (const int64_t hidden : {int64_t{1040}, int64_t{2720}, int64_t{7168}, int64_t{8192}}) {
    for (const DType dtype : kDTypes) {
      for (const Data kind : {Data::kWide, Data::kNonFinite}) {
        for (const bool stochastic : {false, true}) {
          SCOPED_TRACE(text("hidden ", hidden, " dtype ", dtype_name(dtype), " data ", int(kind),
                            stochastic ? " stochastic" : ""));
          Tokens tokens(dtype, rows, hidden, hidden);
          tokens.set(make_values(kind, rows, hidden, &rng));
          Options options;
          options.plain.scale_up = rng() % 2;
          options.plain.row_id_base = rng();
          if (stochastic) options.with_rng(static_cast<int64_t>(rng()), static_cast<int64_t>(rng()));
          Rows out(NVTE_EP_FORMAT_NVFP4, rows, hidden, true);
          quantize_both(&out, &tokens, options);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_F(CodecParity, RowsFlipBetweenTwoPlaces) {
  Rng rng(9);
  const int64_t rows = 21, hidden = 1056;
  for (const int32_t format : kFormatIds) {
    for (const DType dtype : kDTypes) {
      for (const bool packed : {false, true}) {
        for (const uint32_t flip : {4u, 5u}) {
          Tokens tokens(dtype, rows, hidden, hidden);
          tokens.set(make_values(Data::kGaussian, rows, hidden, &rng));
          Rows apart(format, rows, hidden, false);
          quantize_both(&apart, &tokens, Options());
          // Twice the rows, of which half are written.
          Rows both(format, 2 * rows, hidden, true);
          const auto word = Mirror::of(std::vector<uint32_t>{flip});
          for (const bool cuda : {false, true}) {
            RowsView view = both.on(cuda);
            view.rows = rows;
            view.flip = reinterpret_cast<const uint32_t*>(word->on(cuda));
            view.flip_bytes = rows * view.payload_stride;
            Backend* backend = cuda ? cuda_ : host_;
            ASSERT_TRUE((packed ? backend->quantize(format, tokens.on(cuda), view, CodecOptions(), nullptr)
                                : backend->assemble(format, apart.on(cuda), view, CodecOptions(), nullptr))
                            .ok());
          }
          ASSERT_CUDA(cudaDeviceSynchronize());
          ASSERT_TRUE(both.equal()) << "format " << format << " flip " << flip;
        }
      }
    }
  }
}

TEST_F(CodecParity, QuantizeTensorScale) {
  Rng rng(2);
  for (const float scale : {1.0f, 0.00390625f, std::ldexp(1.0f, -116), std::ldexp(1.0f, 105), 3.0f, 0.0f,
                            -1.0f, NAN, std::ldexp(1.0f, 106)}) {
    for (const bool packed : {false, true}) {
      for (const bool token_scale : {false, true}) {
        for (const Data kind : {Data::kGaussian, Data::kNonFinite, Data::kHalfZero, Data::kWide}) {
          SCOPED_TRACE(
              text("scale ", scale, " packed ", packed, " token scale ", token_scale, " data ", int(kind)));
          Tokens tokens(kDTypes[rng() % 3], 19, 1040, 1040);
          tokens.set(make_values(kind, 19, 1040, &rng));
          Options options;
          options.tensor_scale = Mirror::of(std::vector<float>{scale});
          options.with_findings();
          options.plain.saturate = rng() % 2;
          if (rng() % 2) options.with_rng(5, 6);
          Rows out(NVTE_EP_FORMAT_NVFP4, 19, 1040, packed, token_scale);
          quantize_both(&out, &tokens, options);
          if (!packed) {
            Tokens back(kDTypes[rng() % 3], 19, 1040, 1040);
            dequantize_both(&out, &back, options);
            if (std::isfinite(scale) && scale > 0 && !token_scale) {
              Rows assembled(NVTE_EP_FORMAT_NVFP4, 19, 1040, true);
              for (const bool cuda : {false, true}) {
                ASSERT_TRUE((cuda ? cuda_ : host_)
                                ->assemble(NVTE_EP_FORMAT_NVFP4, out.on(cuda), assembled.on(cuda),
                                           options.on(cuda), nullptr)
                                .ok());
              }
              EXPECT_TRUE(assembled.equal());
            }
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_F(CodecParity, RowCountIsReadOnTheDevice) {
  Rng rng(3);
  for (const int32_t format : kFormatIds) {
    for (const int64_t count :
         {int64_t{0}, int64_t{1}, int64_t{17}, int64_t{40}, int64_t{41}, int64_t{-1}, int64_t{1} << 30}) {
      for (const bool is_int64 : {false, true}) {
        Tokens tokens(DType::kBFloat16, 40, 288, 288);
        tokens.set(make_values(Data::kGaussian, 40, 288, &rng));
        Options options;
        options.with_row_count(count, is_int64);
        options.with_findings();
        Rows out(format, 40, 288, true);
        quantize_both(&out, &tokens, options);
        Tokens back(DType::kFloat32, 40, 288, 300);
        dequantize_both(&out, &back, options);
        Rows apart(format, 40, 288, false);
        quantize_both(&apart, &tokens, options);
        Rows assembled(format, 40, 288, true);
        for (const bool cuda : {false, true}) {
          ASSERT_TRUE((cuda ? cuda_ : host_)
                          ->assemble(format, apart.on(cuda), assembled.on(cuda), options.on(cuda), nullptr)
                          .ok());
        }
        EXPECT_TRUE(assembled.equal());
        ASSERT_FALSE(HasFailure()) << "format " << format << " count " << count;
      }
    }
  }
}

TEST_F(CodecParity, DequantizeAnyBytes) {
  Rng rng(4);
  for (const int32_t format : kFormatIds) {
    for (const int64_t hidden : kHidden) {
      if (hidden % find_format(format)->hidden_multiple != 0) continue;
      for (const DType dtype : kDTypes) {
        for (const bool hostile : {false, true}) {
          const int64_t rows = hidden > 4096 ? 5 : 29;
          const bool packed = rng() % 2;
          SCOPED_TRACE(text("format ", format, " hidden ", hidden, " dtype ", dtype_name(dtype),
                            hostile ? " hostile" : "", packed ? " packed" : " apart"));
          Rows in(format, rows, hidden, packed, true, packed ? 0 : static_cast<int64_t>(rng() % 4),
                  packed ? 0 : rng() % 8);
          if (hostile) {
            for (Mirror* m : {in.payload.get(), in.scales.get(), in.token_scales.get()}) {
              if (m == nullptr) continue;
              const std::vector<uint8_t> bytes = random_bytes(m->bytes(), &rng);
              std::memcpy(m->host(), bytes.data(), bytes.size());
              m->upload();
            }
            if (format == NVTE_EP_FORMAT_NVFP4) {  // legal token scales too: most random ones are NaN
              const RowsView host = in.on(false);
              for (int64_t r = 0; r < rows; ++r) {
                const float legal[] = {
                    0.0f,          -0.0f, exp2_int(int(rng() % 222) - 116), exp2_int(105), exp2_int(-116),
                    exp2_int(106), NAN};
                if (r % 4 != 0)
                  std::memcpy(host.token_scales + r * host.token_scale_stride, &legal[rng() % 7], 4);
              }
              (in.packed ? in.payload : in.token_scales)->upload();
            }
          } else {
            Tokens tokens(DType::kFloat32, rows, hidden, hidden);
            tokens.set(make_values(Data::kWide, rows, hidden, &rng));
            quantize_both(&in, &tokens, Options());
          }
          Tokens out(dtype, rows, hidden, hidden + static_cast<int64_t>(rng() % 2) * 5,
                     rng() % 3 == 0 ? static_cast<size_t>(dtype_bytes(dtype)) : 0);
          dequantize_both(&in, &out, Options());
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_F(CodecParity, AssembleFromAnyAlignment) {
  Rng rng(5);
  for (const int32_t format : kFormatIds) {
    for (const int64_t hidden : {int64_t{32}, int64_t{96}, int64_t{1056}, int64_t{2880}, int64_t{7168}}) {
      for (int i = 0; i < 4; ++i) {
        Rows apart(format, 23, hidden, false, true, static_cast<int64_t>(rng() % 4), rng() % 16);
        for (Mirror* m : {apart.payload.get(), apart.scales.get(), apart.token_scales.get()}) {
          if (m == nullptr) continue;
          const std::vector<uint8_t> bytes = random_bytes(m->bytes(), &rng);
          if (!bytes.empty()) std::memcpy(m->host(), bytes.data(), bytes.size());
          m->upload();
        }
        Rows packed(format, 23, hidden, true, true, 16 * static_cast<int64_t>(rng() % 2));
        for (const bool cuda : {false, true}) {
          ASSERT_TRUE((cuda ? cuda_ : host_)
                          ->assemble(format, apart.on(cuda), packed.on(cuda), CodecOptions(), nullptr)
                          .ok());
        }
        ASSERT_TRUE(packed.equal()) << "format " << format << " hidden " << hidden;
      }
    }
  }
}

// Decoded gradients times weights, and their dot products.
TEST_F(CodecParity, WeightedRows) {
  Rng rng(6);
  for (const int32_t format : kFormatIds) {
    for (const DType dtype : kDTypes) {
      for (const int64_t hidden : {int64_t{32}, int64_t{1056}, int64_t{7168}}) {
        const int64_t rows = 37;
        Rows in(format, rows, hidden, true);
        Tokens source(DType::kBFloat16, rows, hidden, hidden);
        source.set(make_values(Data::kGaussian, rows, hidden, &rng));
        quantize_both(&in, &source, Options());
        Tokens expert_out(kDTypes[rng() % 3], rows, hidden, hidden + 3);
        expert_out.set(make_values(Data::kGaussian, rows, hidden, &rng));
        std::vector<float> weights(rows);
        std::vector<int64_t> slot_source(rows);
        for (int64_t r = 0; r < rows; ++r) {
          weights[r] = r == 3 ? NAN : (r == 4 ? INFINITY : static_cast<float>(rng() % 1000) / 700.0f);
          slot_source[r] = r % 5 == 2 ? -1 : r;
        }
        const auto w = Mirror::of(weights), s = Mirror::of(slot_source);
        Mirror dots(rows * 4);
        RowWeighting weighting[2];
        for (const bool cuda : {false, true}) {
          weighting[cuda].weights = reinterpret_cast<const float*>(w->on(cuda));
          weighting[cuda].slot_source = reinterpret_cast<const int64_t*>(s->on(cuda));
          weighting[cuda].expert_out = expert_out.on(cuda);
          weighting[cuda].dots = reinterpret_cast<float*>(dots.on(cuda));
        }
        Tokens out(dtype, rows, hidden, hidden);
        dequantize_both(&in, &out, Options(), weighting[0], weighting[1]);
        ASSERT_FALSE(HasFailure());
        ASSERT_TRUE(dots.equal("dots"));
      }
    }
  }
}

// ---- every value ------------------------------------------------------------------------------------------

// Blocks of one given element and 15 (31) consecutive bit patterns; given elements make every significand of
// a block scale at several distances from the row's largest.
void fill_every_value(DType dtype, int32_t block, int64_t hidden, const std::vector<float>& anchors,
                      std::vector<uint8_t>* bytes, int64_t* rows) {
  std::vector<uint16_t> out;
  const auto half = [&](float v) { return dtype == DType::kBFloat16 ? float_to_bf16(v) : float_to_fp16(v); };
  for (const float anchor : anchors) {
    uint32_t next = 0;
    while (next < 65536) {
      for (int64_t b = 0; b < hidden / block; ++b) {
        out.push_back(half(b == 0 ? 1.0f : anchor));
        for (int32_t i = 1; i < block; ++i)
          out.push_back(b == 0 ? half(0.0f) : static_cast<uint16_t>(next++));
      }
    }
  }
  *rows = static_cast<int64_t>(out.size()) / hidden;
  bytes->resize(out.size() * 2);
  std::memcpy(bytes->data(), out.data(), bytes->size());
}

TEST_F(CodecParity, EveryHalfPrecisionValue) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int32_t format : kFormatIds) {
      std::vector<float> anchors;
      for (int e = -22; e <= 12; e += format == NVTE_EP_FORMAT_NVFP4 ? 1 : 17) {
        for (int m = 8; m < 16; ++m) anchors.push_back(std::ldexp(static_cast<float>(m), e - 3));
      }
      const int64_t hidden = 544;
      std::vector<uint8_t> bytes;
      int64_t rows;
      fill_every_value(dtype, format == NVTE_EP_FORMAT_MXFP8 ? 32 : 16, hidden, anchors, &bytes, &rows);
      Tokens tokens(dtype, rows, hidden, hidden);
      std::memcpy(tokens.data->host(), bytes.data(), bytes.size());
      tokens.data->upload();
      for (const bool saturate : {false, true}) {
        SCOPED_TRACE(text("format ", format, " ", dtype_name(dtype), saturate ? " saturate" : ""));
        Options options;
        options.plain.saturate = saturate;
        Rows out(format, rows, hidden, true);
        quantize_both(&out, &tokens, options);
        if (format == NVTE_EP_FORMAT_NVFP4) {
          for (const float scale :
               {1.0f, std::ldexp(1.0f, -10), std::ldexp(1.0f, -116), std::ldexp(1.0f, 105)}) {
            options.tensor_scale = Mirror::of(std::vector<float>{scale});
            quantize_both(&out, &tokens, options);
          }
          options.tensor_scale.reset();
          options.plain.scale_up = true;
          quantize_both(&out, &tokens, options);
          options.with_rng(11, 13);
          quantize_both(&out, &tokens, options);
        }
        ASSERT_FALSE(HasFailure());
      }
      for (const DType out_dtype : kDTypes) {
        Rows in(format, rows, hidden, true);
        quantize_both(&in, &tokens, Options());
        Tokens back(out_dtype, rows, hidden, hidden);
        dequantize_both(&in, &back, Options());
        ASSERT_FALSE(HasFailure());
      }
    }
  }
}

// FP32 numbers around every place where a code or a scale changes.
TEST_F(CodecParity, Fp32Thresholds) {
  constexpr int64_t kRowElements = 512;
  std::vector<float> x;
  const float steps[] = {0.25f, 0.5f, 0.75f, 1.0f, 1.25f, 1.5f, 1.75f,
                         2.0f,  2.5f, 3.0f,  3.5f, 4.0f,  5.0f, 6.0f};
  for (int scale = 1; scale < 127;
       ++scale) {  // the block's scale, and an element at each threshold, 3 last places around it
    const float b = e4m3_to_float(static_cast<uint8_t>(scale));
    for (const float step : steps) {
      for (int d = -3; d <= 3; ++d) {
        float v = step * b;
        for (int i = 0; i < std::abs(d); ++i) v = std::nextafter(v, d < 0 ? 0.0f : INFINITY);
        if (x.size() % 16 == 0) x.push_back(x.size() % kRowElements == 0 ? 2688.0f : 6.0f * b);
        x.push_back(x.size() % 2 ? v : -v);
      }
    }
    while (x.size() % 16 != 0) x.push_back(0.0f);
  }
  for (int code = 0; code < 127; ++code) {  // block maxima around the places where the block scale changes
    const float between = 6.0f * 0.5f *
                          (e4m3_to_float(static_cast<uint8_t>(code)) +
                           e4m3_to_float(static_cast<uint8_t>(code == 126 ? 126 : code + 1)));
    for (int d = -3; d <= 3; ++d) {
      float v = between;
      for (int i = 0; i < std::abs(d); ++i) v = std::nextafter(v, d < 0 ? 0.0f : INFINITY);
      for (int i = 0; i < 16; ++i)
        x.push_back(x.size() % kRowElements == 0 ? 2688.0f
                                                 : (i == 3 ? v : v * 0.37f * static_cast<float>(i) / 16.0f));
    }
  }
  while (x.size() % kRowElements != 0) x.push_back(0.0f);
  for (int k = -116; k <= 105; ++k) {  // row maxima around the places where the token scale changes
    for (int d = -2; d <= 2; ++d) {
      float v = std::ldexp(2688.0f, k);
      for (int i = 0; i < std::abs(d); ++i) v = std::nextafter(v, d < 0 ? 0.0f : INFINITY);
      for (int64_t i = 0; i < kRowElements; ++i)
        x.push_back(i == 77 ? v : v * static_cast<float>(i) / 700.0f);
    }
  }
  for (int e = -127; e <= 127; ++e) {  // MXFP8 block maxima around powers of two
    for (int d = -2; d <= 2; ++d) {
      float v = std::ldexp(448.0f, std::min(e, 118));
      for (int i = 0; i < std::abs(d); ++i) v = std::nextafter(v, d < 0 ? 0.0f : INFINITY);
      for (int i = 0; i < 32; ++i) x.push_back(i == 9 ? v : v * static_cast<float>(i) / 33.0f);
    }
  }
  while (x.size() % kRowElements != 0) x.push_back(0.0f);
  const int64_t rows = static_cast<int64_t>(x.size()) / kRowElements;
  Tokens tokens(DType::kFloat32, rows, kRowElements, kRowElements);
  tokens.set(x);
  for (const int32_t format : kFormatIds) {
    Options options;
    Rows out(format, rows, kRowElements, true);
    quantize_both(&out, &tokens, options);
    ASSERT_FALSE(HasFailure()) << "format " << format;
    if (format != NVTE_EP_FORMAT_NVFP4) continue;
    options.plain.scale_up = true;
    quantize_both(&out, &tokens, options);
    options.with_rng(-3, 1);
    quantize_both(&out, &tokens, options);
    ASSERT_FALSE(HasFailure());
  }
}

// Every kernel once, with tails and misalignment, in shapes that compute-sanitizer gets through.
TEST_F(CodecParity, SmallShapes) {
  Rng rng(7);
  for (const int32_t format : kFormatIds) {
    for (const DType dtype : kDTypes) {
      for (const int64_t hidden : {int64_t{32}, int64_t{1056}, int64_t{16416}}) {
        for (const bool stochastic : {false, true}) {
          for (const bool packed : {false, true}) {
            Tokens tokens(dtype, 3, hidden, hidden + 1, packed ? 0 : static_cast<size_t>(dtype_bytes(dtype)));
            tokens.set(make_values(Data::kNonFinite, 3, hidden, &rng));
            Options options;
            if (stochastic && format == NVTE_EP_FORMAT_NVFP4) options.with_rng(1, 2);
            Rows rows(format, 3, hidden, packed, true, packed ? 16 : 1, packed ? 0 : 5);
            quantize_both(&rows, &tokens, options);
            Tokens back(dtype, 3, hidden, hidden + 8);
            dequantize_both(&rows, &back, Options());
            if (packed) continue;
            Rows assembled(format, 3, hidden, true);
            for (const bool cuda : {false, true}) {
              ASSERT_TRUE((cuda ? cuda_ : host_)
                              ->assemble(format, rows.on(cuda), assembled.on(cuda), CodecOptions(), nullptr)
                              .ok());
            }
            EXPECT_TRUE(assembled.equal());
          }
        }
      }
    }
  }
}

// A row a warp, under compute-sanitizer too.
TEST_F(CodecParity, SmallShapesManyRows) {
  Rng rng(10);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const bool stochastic : {false, true}) {
      const int64_t rows = 1100, hidden = 1056;
      Tokens tokens(dtype, rows, hidden, hidden + 8);
      tokens.set(make_values(Data::kNonFinite, rows, hidden, &rng));
      Options options;
      if (stochastic) options.with_rng(1, 2);
      Rows out(NVTE_EP_FORMAT_NVFP4, rows, hidden, true);
      quantize_both(&out, &tokens, options);
    }
  }
}

TEST_F(CodecParity, ZeroRows) {
  for (const int32_t format : kFormatIds) {
    Rows none(format, 0, 64, true);
    Tokens tokens(DType::kBFloat16, 0, 64, 64);
    quantize_both(&none, &tokens, Options());
    dequantize_both(&none, &tokens, Options());
  }
}

}  // namespace
}  // namespace nvte_ep::testing
