#include "kernels/gather.h"

#include <cmath>

#include "kernels/half.h"
#include "kernels/thread_pool.h"

namespace stoker {
namespace {

constexpr int64_t kLanes = 16;

void affine_row(const Matrix& m, int64_t row, float* out) {
  const int64_t tile = row / kLanes, lane = row % kLanes, word_cols = 32 / m.bits, groups = m.cols / m.group;
  const uint32_t* words = static_cast<const uint32_t*>(m.codes) + tile * (m.cols / word_cols) * kLanes + lane;
  const uint16_t* scales = m.scales + tile * groups * kLanes + lane;
  const uint16_t* biases = m.biases + tile * groups * kLanes + lane;
  const uint32_t mask = (1u << m.bits) - 1u;
  for (int64_t g = 0; g < groups; ++g) {
    const float scale = decode_scale(scales[g * kLanes], m.scale_is_half);
    const float bias = decode_scale(biases[g * kLanes], m.scale_is_half);
    for (int64_t c = g * m.group; c < (g + 1) * m.group; c += word_cols) {
      const uint32_t v = words[c / word_cols * kLanes];
      for (int64_t i = 0; i < word_cols; ++i) {
        out[c + i] = std::fma(static_cast<float>((v >> (m.bits * i)) & mask), scale, bias);
      }
    }
  }
}

void plain_row(const Matrix& m, int64_t row, float* out) {
  const int64_t tile = row / kLanes, lane = row % kLanes;
  if (m.format == Format::f32) {
    const float* w = static_cast<const float*>(m.codes) + tile * m.cols * kLanes + lane;
    for (int64_t c = 0; c < m.cols; ++c) out[c] = w[c * kLanes];
    return;
  }
  const uint32_t* words = static_cast<const uint32_t*>(m.codes) + tile * ((m.cols + 1) / 2) * kLanes + lane;
  for (int64_t c = 0; c < m.cols; ++c) {
    out[c] = bf16_to_float(static_cast<uint16_t>(words[c / 2 * kLanes] >> (16 * (c % 2))));
  }
}

}  // namespace

void gather_rows(const Matrix& m, const int64_t* ids, int64_t n, float* out) {
  const auto rows = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      if (m.format == Format::affine) {
        affine_row(m, ids[i], out + i * m.cols);
      } else {
        plain_row(m, ids[i], out + i * m.cols);
      }
    }
  };
  if (n < 8) {
    rows(0, n);
    return;
  }
  pool().run([&](int thread, int n_threads) { rows(n * thread / n_threads, n * (thread + 1) / n_threads); });
}

}  // namespace stoker
