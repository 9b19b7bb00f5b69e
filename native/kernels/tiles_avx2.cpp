// Tile kernels for AVX2 with FMA: 16 rows lie in two vectors of 8 lanes. 4-bit codes use maddubs (8 sums of two
// products of at most 15 * 128 fit 16 bits); 8-bit codes would saturate there, so they are widened to 16 bits. Both
// halves and both planes at a time, since loads run out first; two tokens at a time would run out of registers.
// Affine results equal the portable ones bit for bit.
#include <immintrin.h>

#include "kernels/dispatch.h"
#include "kernels/elementwise_body.h"

namespace stoker {
namespace {

inline __m256 load_scales(const uint16_t* p, bool is_half) {
  const __m128i v = _mm_load_si128(reinterpret_cast<const __m128i*>(p));
  if (is_half) return _mm256_cvtph_ps(v);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}

inline __m256i broadcast_dword(const char* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return _mm256_set1_epi32(v);
}

inline __m256 broadcast_float(const char* p) {
  float v;
  std::memcpy(&v, p, 4);
  return _mm256_set1_ps(v);
}

inline __m256i load_words(const char* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }

// Where the weights of one block of 32 columns come from: word(quad, half) is 4 columns of 8 rows, a byte each.
template <int BITS>
struct PackedBlock {  // as they lie in memory
  const char* codes;

  inline __m256i word(int quad, int half) const {
    if constexpr (BITS == 8) return load_words(codes + 64 * quad + 32 * half);
    const __m256i pair = load_words(codes + 64 * (quad / 2) + 32 * half);
    return _mm256_and_si256(quad % 2 ? _mm256_srli_epi32(pair, 4) : pair, _mm256_set1_epi8(15));
  }
};

struct UnpackedBlock {  // unpacked once for many tokens
  const __m256i* words;

  inline __m256i word(int quad, int half) const { return words[2 * quad + half]; }
};

template <int BITS, int GROUP>
inline void unpack_group(const char* codes, __m256i* words) {
  for (int b = 0; b < GROUP / kBlock; ++b) {
    const PackedBlock<BITS> block{codes + b * kBlock * BITS * 2};
    for (int i = 0; i < 16; ++i) words[16 * b + i] = block.word(i / 2, i % 2);
  }
}

// Adds the products of 4 columns of 16 rows with one token's activations.
template <int BITS>
inline void add_products(const __m256i (&w)[2], __m256i x, __m256i (&sum)[2]) {
  if constexpr (BITS == 4) {
    for (int half = 0; half < 2; ++half) sum[half] = _mm256_add_epi16(sum[half], _mm256_maddubs_epi16(w[half], x));
  } else {
    const __m256i low_byte = _mm256_set1_epi16(255);
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), odd = _mm256_srai_epi16(x, 8);
    for (int half = 0; half < 2; ++half) {
      const __m256i low = _mm256_madd_epi16(_mm256_and_si256(w[half], low_byte), even);
      const __m256i high = _mm256_madd_epi16(_mm256_srli_epi16(w[half], 8), odd);
      sum[half] = _mm256_add_epi32(sum[half], _mm256_add_epi32(low, high));
    }
  }
}

// Exact sums of 32 columns of 16 rows: a weight is loaded once for both planes, an activation once for both halves.
template <int BITS, int PLANES, class Block>
inline void block_sums(const Block& block, const char* x, int plane_bytes, __m256i (&sum)[PLANES][2]) {
  for (int p = 0; p < PLANES; ++p) sum[p][0] = sum[p][1] = _mm256_setzero_si256();
#pragma GCC unroll 1  // unrolled whole, GCC runs out of registers
  for (int pair = 0; pair < 4; ++pair) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      const __m256i w[2] = {block.word(2 * pair + odd, 0), block.word(2 * pair + odd, 1)};
#pragma GCC unroll 2
      for (int p = 0; p < PLANES; ++p) {
        add_products<BITS>(w, broadcast_dword(x + p * plane_bytes + 8 * pair + 4 * odd), sum[p]);
      }
    }
  }
  if constexpr (BITS == 4) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (int p = 0; p < PLANES; ++p) {
      for (int half = 0; half < 2; ++half) sum[p][half] = _mm256_madd_epi16(sum[p][half], ones);
    }
  }
}

// Adds one group of columns to the 16 rows of one token; blocks(b) is the group's b-th block.
template <int BITS, int GROUP, int PLANES, class Blocks>
inline void add_group(const Blocks& blocks, const __m256* scale, const __m256* bias, const char* record, float* acc) {
  constexpr int kBlocks = GROUP / kBlock;
  __m256 term[2];
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
    __m256i sum[PLANES][2];
    block_sums<BITS, PLANES>(blocks(b), record + 4 + 4 * kBlocks + b * kBlock, GROUP, sum);
    const __m256 x_scale = broadcast_float(record + 4 + 4 * b);
    for (int half = 0; half < 2; ++half) {
      __m256i whole = sum[0][half];
      if constexpr (PLANES == 2) whole = _mm256_add_epi32(_mm256_slli_epi32(whole, 8), sum[1][half]);
      const __m256 s = _mm256_cvtepi32_ps(whole);
      term[half] = b == 0 ? _mm256_mul_ps(s, x_scale) : _mm256_fmadd_ps(s, x_scale, term[half]);
    }
  }
  const __m256 x_sum = broadcast_float(record);
  for (int half = 0; half < 2; ++half) {
    float* a = acc + 8 * half;
    const __m256 scaled = _mm256_fmadd_ps(term[half], scale[half], _mm256_load_ps(a));
    _mm256_store_ps(a, _mm256_fmadd_ps(bias[half], x_sum, scaled));
  }
}

template <int BITS, int GROUP, int PLANES>
void affine_tile(const Matrix& m, const char* x, int64_t unit_stride, int64_t n_tokens, int64_t tile, float* acc) {
  constexpr int kRecord = 4 + 4 * (GROUP / kBlock) + PLANES * GROUP;
  constexpr int kBlockBytes = kBlock * BITS * 2;
  constexpr int64_t kGroupBytes = GROUP * BITS * 2;
  const int64_t groups = m.cols / GROUP;
  const char* codes = static_cast<const char*>(m.codes) + tile * groups * kGroupBytes;
  const uint16_t* scales = m.scales + tile * groups * 16;
  const uint16_t* biases = m.biases + tile * groups * 16;
  for (int64_t i = 0; i < n_tokens * 16; i += 8) _mm256_store_ps(acc + i, _mm256_setzero_ps());
  for (int64_t g = 0; g < groups; ++g, codes += kGroupBytes, x += unit_stride) {
    const uint16_t *s = scales + 16 * g, *b = biases + 16 * g;
    const __m256 scale[2] = {load_scales(s, m.scale_is_half), load_scales(s + 8, m.scale_is_half)};
    const __m256 bias[2] = {load_scales(b, m.scale_is_half), load_scales(b + 8, m.scale_is_half)};
    if (n_tokens == 1) {
      const auto packed = [codes](int block) { return PackedBlock<BITS>{codes + block * kBlockBytes}; };
      add_group<BITS, GROUP, PLANES>(packed, scale, bias, x, acc);
      continue;
    }
    __m256i words[GROUP / 2];
    unpack_group<BITS, GROUP>(codes, words);
    const auto unpacked = [&words](int block) { return UnpackedBlock{words + 16 * block}; };
    for (int64_t t = 0; t < n_tokens; ++t) {
      add_group<BITS, GROUP, PLANES>(unpacked, scale, bias, x + t * kRecord, acc + 16 * t);
    }
  }
}

template <int N>
void bf16_tokens(const char* words, int64_t n_words, const char* x, int64_t unit_stride, float* acc) {
  const __m256i high_half = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  __m256 low[N], high[N];
  for (int t = 0; t < N; ++t) low[t] = high[t] = _mm256_setzero_ps();
  for (int64_t w = 0; w < n_words; w += 16, x += unit_stride) {
    const int64_t n = n_words - w < 16 ? n_words - w : 16;
    for (int64_t i = 0; i < n; ++i, words += 64) {
      const __m256i v = load_words(words);
      const __m256 v_low = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
      const __m256 v_high = _mm256_castsi256_ps(_mm256_and_si256(v, high_half));
      for (int t = 0; t < N; ++t) {
        const __m256i xi = broadcast_dword(x + 64 * t + 4 * i);
        low[t] = _mm256_fmadd_ps(v_low, _mm256_castsi256_ps(_mm256_slli_epi32(xi, 16)), low[t]);
        high[t] = _mm256_fmadd_ps(v_high, _mm256_castsi256_ps(_mm256_and_si256(xi, high_half)), high[t]);
      }
    }
  }
  for (int t = 0; t < N; ++t) _mm256_store_ps(acc + 16 * t, _mm256_add_ps(low[t], high[t]));
}

void bf16_tile(const Matrix& m, const char* x, int64_t unit_stride, int64_t n_tokens, int64_t tile, float* acc) {
  const int64_t n_words = (m.cols + 1) / 2;
  const char* words = static_cast<const char*>(m.codes) + tile * n_words * 64;
  for (int half = 0; half < 2; ++half) {
    const char* w = words + 32 * half;
    float* a = acc + 8 * half;
    int64_t t = 0;
    for (; t + 4 <= n_tokens; t += 4) bf16_tokens<4>(w, n_words, x + 64 * t, unit_stride, a + 16 * t);
    for (; t < n_tokens; ++t) bf16_tokens<1>(w, n_words, x + 64 * t, unit_stride, a + 16 * t);
  }
}

// bf16 weights widened to f32, times f32 activations.
template <int N>
void bf16_f32_tokens(const char* words, int64_t n_words, const char* x, int64_t unit_stride, float* acc) {
  const __m256i high_half = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  __m256 low[N], high[N];
  for (int t = 0; t < N; ++t) low[t] = high[t] = _mm256_setzero_ps();
  for (int64_t w = 0; w < n_words; w += 16, x += unit_stride) {
    const int64_t n = n_words - w < 16 ? n_words - w : 16;
    for (int64_t i = 0; i < n; ++i, words += 64) {
      const __m256i v = load_words(words);
      const __m256 v_low = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
      const __m256 v_high = _mm256_castsi256_ps(_mm256_and_si256(v, high_half));
      for (int t = 0; t < N; ++t) {
        low[t] = _mm256_fmadd_ps(v_low, broadcast_float(x + 128 * t + 8 * i), low[t]);
        high[t] = _mm256_fmadd_ps(v_high, broadcast_float(x + 128 * t + 8 * i + 4), high[t]);
      }
    }
  }
  for (int t = 0; t < N; ++t) _mm256_store_ps(acc + 16 * t, _mm256_add_ps(low[t], high[t]));
}

void bf16_f32_tile(const Matrix& m, const char* x, int64_t unit_stride, int64_t n_tokens, int64_t tile, float* acc) {
  const int64_t n_words = (m.cols + 1) / 2;
  const char* words = static_cast<const char*>(m.codes) + tile * n_words * 64;
  for (int half = 0; half < 2; ++half) {
    const char* w = words + 32 * half;
    float* a = acc + 8 * half;
    int64_t t = 0;
    for (; t + 4 <= n_tokens; t += 4) bf16_f32_tokens<4>(w, n_words, x + 128 * t, unit_stride, a + 16 * t);
    for (; t < n_tokens; ++t) bf16_f32_tokens<1>(w, n_words, x + 128 * t, unit_stride, a + 16 * t);
  }
}

template <int N>
void f32_tokens(const char* w, int64_t cols, const char* x, int64_t unit_stride, float* acc) {
  __m256 sums[2][N];
  for (int t = 0; t < N; ++t) sums[0][t] = sums[1][t] = _mm256_setzero_ps();
  for (int64_t c = 0; c < cols; ++c, w += 64) {
    const char* xc = x + c / kBlock * unit_stride + 4 * (c % kBlock);
    const __m256 v = _mm256_load_ps(reinterpret_cast<const float*>(w));
    __m256* s = sums[c % 2];
    for (int t = 0; t < N; ++t) s[t] = _mm256_fmadd_ps(v, broadcast_float(xc + 128 * t), s[t]);
  }
  for (int t = 0; t < N; ++t) _mm256_store_ps(acc + 16 * t, _mm256_add_ps(sums[0][t], sums[1][t]));
}

void f32_tile(const Matrix& m, const char* x, int64_t unit_stride, int64_t n_tokens, int64_t tile, float* acc) {
  for (int half = 0; half < 2; ++half) {
    const char* w = static_cast<const char*>(m.codes) + tile * m.cols * 64 + 32 * half;
    float* a = acc + 8 * half;
    int64_t t = 0;
    for (; t + 4 <= n_tokens; t += 4) f32_tokens<4>(w, m.cols, x + 128 * t, unit_stride, a + 16 * t);
    for (; t < n_tokens; ++t) f32_tokens<1>(w, m.cols, x + 128 * t, unit_stride, a + 16 * t);
  }
}

template <int BITS, int GROUP>
TileKernel affine_kernel(const Matrix& m) {
  return m.activation_bits == 16 ? affine_tile<BITS, GROUP, 2> : affine_tile<BITS, GROUP, 1>;
}

template <int BITS>
TileKernel affine_kernel(const Matrix& m) {
  if (m.group == 32) return affine_kernel<BITS, 32>(m);
  return m.group == 64 ? affine_kernel<BITS, 64>(m) : affine_kernel<BITS, 128>(m);
}

TileKernel tile_kernel(const Matrix& m) {
  if (m.format == Format::bf16) return m.activation_bits == 16 ? bf16_f32_tile : bf16_tile;
  if (m.format == Format::f32) return f32_tile;
  return m.bits == 4 ? affine_kernel<4>(m) : affine_kernel<8>(m);
}

uint64_t read_bytes(const char* p, int64_t n) {
  __m256i a = _mm256_setzero_si256(), b = a;
  for (int64_t i = 0; i < n; i += 64) {
    a = _mm256_xor_si256(a, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i)));
    b = _mm256_xor_si256(b, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i + 32)));
  }
  alignas(32) uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_xor_si256(a, b));
  return lanes[0] ^ lanes[1] ^ lanes[2] ^ lanes[3];
}

}  // namespace

const KernelTable* avx2_table() {
  static const KernelTable table{"avx2", tile_kernel, encode_row_body, gated_body, read_bytes};
  return &table;
}

}  // namespace stoker
