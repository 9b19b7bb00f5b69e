// Tile kernels in plain C++, for any CPU with little-endian bytes: the order of the float operations is the contract,
// and for affine weights the other instruction sets give the same bits.
#include <bit>
#include <cmath>

#include "kernels/dispatch.h"
#include "kernels/elementwise_body.h"
#include "kernels/half.h"

namespace stoker {
namespace {

static_assert(std::endian::native == std::endian::little, "words are little-endian");

constexpr int kLanes = 16;

// Adds the exact integer products of one block of 32 columns of 16 rows.
template <int BITS>
void add_block(const uint32_t* words, const int8_t* x, int32_t* sums) {
  constexpr int kWordCols = 32 / BITS;
  for (int w = 0; w < kBlock / kWordCols; ++w) {
    for (int i = 0; i < kWordCols; ++i) {
      // Column i of a 4-bit word is stored as even columns, then odd ones.
      const int32_t xi = x[w * kWordCols + (BITS == 4 ? (i & 1) * 4 + i / 2 : i)];
      const uint32_t mask = (1u << BITS) - 1u;
      for (int r = 0; r < kLanes; ++r) sums[r] += static_cast<int32_t>((words[w * kLanes + r] >> (BITS * i)) & mask) * xi;
    }
  }
}

template <int BITS>
void affine_tile(const Matrix& m, const char* x, int64_t unit_stride, int64_t n_tokens, int64_t tile, float* acc) {
  const int64_t groups = m.cols / m.group, record_bytes = encoding_of(m).record_bytes(), planes = encoding_of(m).planes;
  const int blocks = m.group / kBlock, block_words = BITS * kBlock / 32;
  const uint32_t* words = static_cast<const uint32_t*>(m.codes) + tile * (m.cols * BITS / 32) * kLanes;
  const uint16_t* scales = m.scales + tile * groups * kLanes;
  const uint16_t* biases = m.biases + tile * groups * kLanes;
  for (int64_t i = 0; i < n_tokens * kLanes; ++i) acc[i] = 0.0f;
  for (int64_t g = 0; g < groups; ++g, words += blocks * block_words * kLanes) {
    float scale[kLanes], bias[kLanes];
    for (int r = 0; r < kLanes; ++r) {
      scale[r] = decode_scale(scales[g * kLanes + r], m.scale_is_half);
      bias[r] = decode_scale(biases[g * kLanes + r], m.scale_is_half);
    }
    for (int64_t t = 0; t < n_tokens; ++t) {
      const char* record = x + g * unit_stride + t * record_bytes;
      const float* header = reinterpret_cast<const float*>(record);
      const int8_t* codes = reinterpret_cast<const int8_t*>(record + 4 + 4 * blocks);
      float term[kLanes] = {};
      for (int b = 0; b < blocks; ++b) {
        int32_t sums[kLanes] = {};
        add_block<BITS>(words + b * block_words * kLanes, codes + b * kBlock, sums);
        if (planes == 2) {
          for (int r = 0; r < kLanes; ++r) sums[r] *= 256;
          add_block<BITS>(words + b * block_words * kLanes, codes + m.group + b * kBlock, sums);
        }
        for (int r = 0; r < kLanes; ++r) {
          const float s = static_cast<float>(sums[r]);
          term[r] = b == 0 ? s * header[1] : std::fma(s, header[1 + b], term[r]);
        }
      }
      float* a = acc + t * kLanes;
      for (int r = 0; r < kLanes; ++r) a[r] = std::fma(bias[r], header[0], std::fma(term[r], scale[r], a[r]));
    }
  }
}

void bf16_tile(const Matrix& m, const char* x, int64_t unit_stride, int64_t n_tokens, int64_t tile, float* acc) {
  const int64_t n_words = (m.cols + 1) / 2;
  const uint32_t* words = static_cast<const uint32_t*>(m.codes) + tile * n_words * kLanes;
  for (int64_t t = 0; t < n_tokens; ++t) {
    float low[kLanes] = {}, high[kLanes] = {};
    for (int64_t w = 0; w < n_words; ++w) {
      uint32_t pair;
      std::memcpy(&pair, x + (w / 16) * unit_stride + t * 64 + (w % 16) * 4, 4);
      const float x0 = bits_float(pair << 16), x1 = bits_float(pair & 0xffff0000u);
      for (int r = 0; r < kLanes; ++r) {
        const uint32_t v = words[w * kLanes + r];
        low[r] = std::fma(bits_float(v << 16), x0, low[r]);
        high[r] = std::fma(bits_float(v & 0xffff0000u), x1, high[r]);
      }
    }
    for (int r = 0; r < kLanes; ++r) acc[t * kLanes + r] = low[r] + high[r];
  }
}

// bf16 weights times f32 activations: every product is exact before it is added.
void bf16_f32_tile(const Matrix& m, const char* x, int64_t unit_stride, int64_t n_tokens, int64_t tile, float* acc) {
  const int64_t n_words = (m.cols + 1) / 2;
  const uint32_t* words = static_cast<const uint32_t*>(m.codes) + tile * n_words * kLanes;
  for (int64_t t = 0; t < n_tokens; ++t) {
    float low[kLanes] = {}, high[kLanes] = {};
    for (int64_t w = 0; w < n_words; ++w) {
      float pair[2];
      std::memcpy(pair, x + (w / 16) * unit_stride + t * 128 + (w % 16) * 8, 8);
      for (int r = 0; r < kLanes; ++r) {
        const uint32_t v = words[w * kLanes + r];
        low[r] = std::fma(bits_float(v << 16), pair[0], low[r]);
        high[r] = std::fma(bits_float(v & 0xffff0000u), pair[1], high[r]);
      }
    }
    for (int r = 0; r < kLanes; ++r) acc[t * kLanes + r] = low[r] + high[r];
  }
}

void f32_tile(const Matrix& m, const char* x, int64_t unit_stride, int64_t n_tokens, int64_t tile, float* acc) {
  const float* w = static_cast<const float*>(m.codes) + tile * m.cols * kLanes;
  for (int64_t t = 0; t < n_tokens; ++t) {
    float even[kLanes] = {}, odd[kLanes] = {};
    for (int64_t c = 0; c < m.cols; ++c) {
      float xc;
      std::memcpy(&xc, x + (c / kBlock) * unit_stride + t * 128 + (c % kBlock) * 4, 4);
      float* a = c % 2 == 0 ? even : odd;
      for (int r = 0; r < kLanes; ++r) a[r] = std::fma(w[c * kLanes + r], xc, a[r]);
    }
    for (int r = 0; r < kLanes; ++r) acc[t * kLanes + r] = even[r] + odd[r];
  }
}

TileKernel tile_kernel(const Matrix& m) {
  if (m.format == Format::bf16) return m.activation_bits == 16 ? bf16_f32_tile : bf16_tile;
  if (m.format == Format::f32) return f32_tile;
  return m.bits == 4 ? affine_tile<4> : affine_tile<8>;
}

uint64_t read_bytes(const char* p, int64_t n) {
  uint64_t lanes[8] = {};
  for (int64_t i = 0; i < n; i += 64) {
    uint64_t v[8];
    std::memcpy(v, p + i, 64);
    for (int j = 0; j < 8; ++j) lanes[j] ^= v[j];
  }
  uint64_t x = 0;
  for (uint64_t lane : lanes) x ^= lane;
  return x;
}

}  // namespace

const KernelTable* portable_table() {
  static const KernelTable table{"portable", tile_kernel, encode_row_body, gated_body, read_bytes};
  return &table;
}

}  // namespace stoker
