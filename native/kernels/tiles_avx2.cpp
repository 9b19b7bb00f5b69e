// Tile kernels for AVX2 with FMA: 16 rows lie in two vectors of 8 lanes. 4-bit codes use maddubs (8 sums of two
// products of at most 15 * 128 fit 16 bits); 8-bit codes would saturate there, so they are widened to 16 bits.
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

// 8 rows of one group as bytes of 4 columns each, in the order in which the activations are stored.
template <int BITS, int GROUP>
inline void unpack_group(const char* codes, __m256i* w) {
  const __m256i mask = _mm256_set1_epi8(15);
  for (int i = 0; i < GROUP * BITS / 32; ++i) {
    const __m256i v = load_words(codes + 64 * i);
    if constexpr (BITS == 4) {
      w[2 * i] = _mm256_and_si256(v, mask);
      w[2 * i + 1] = _mm256_and_si256(_mm256_srli_epi32(v, 4), mask);
    } else {
      w[i] = v;
    }
  }
}

// Exact sums of 32 columns of 8 rows.
template <int BITS>
inline __m256i block_sum(const __m256i* w, const char* x) {
  __m256i sum = _mm256_setzero_si256();
  if constexpr (BITS == 4) {
    for (int i = 0; i < 8; ++i) sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w[i], broadcast_dword(x + 4 * i)));
    return _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
  } else {
    const __m256i low_byte = _mm256_set1_epi16(255);
    for (int i = 0; i < 8; ++i) {
      const __m256i xi = broadcast_dword(x + 4 * i);
      const __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(xi, 8), 8), x_odd = _mm256_srai_epi16(xi, 8);
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_and_si256(w[i], low_byte), x_even));
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_srli_epi16(w[i], 8), x_odd));
    }
    return sum;
  }
}

template <int BITS, int GROUP, int PLANES>
inline void add_group(const __m256i* w, __m256 scale, __m256 bias, const char* record, float* acc) {
  constexpr int kBlocks = GROUP / kBlock;
  __m256 term = _mm256_setzero_ps();
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
    const char* codes = record + 4 + 4 * kBlocks + b * kBlock;
    __m256i sum = block_sum<BITS>(w + 8 * b, codes);
    if (PLANES == 2) sum = _mm256_add_epi32(_mm256_slli_epi32(sum, 8), block_sum<BITS>(w + 8 * b, codes + GROUP));
    const __m256 s = _mm256_cvtepi32_ps(sum);
    const __m256 x_scale = broadcast_float(record + 4 + 4 * b);
    term = b == 0 ? _mm256_mul_ps(s, x_scale) : _mm256_fmadd_ps(s, x_scale, term);
  }
  const __m256 a = _mm256_fmadd_ps(term, scale, _mm256_load_ps(acc));
  _mm256_store_ps(acc, _mm256_fmadd_ps(bias, broadcast_float(record), a));
}

template <int BITS, int GROUP, int PLANES>
void affine_tile(const Matrix& m, const char* x, int64_t unit_stride, int64_t n_tokens, int64_t tile, float* acc) {
  constexpr int kRecord = 4 + 4 * (GROUP / kBlock) + PLANES * GROUP;
  constexpr int64_t kGroupBytes = GROUP * BITS * 2;
  const int64_t groups = m.cols / GROUP;
  const char* codes = static_cast<const char*>(m.codes) + tile * groups * kGroupBytes;
  const uint16_t* scales = m.scales + tile * groups * 16;
  const uint16_t* biases = m.biases + tile * groups * 16;
  for (int64_t i = 0; i < n_tokens * 16; i += 8) _mm256_store_ps(acc + i, _mm256_setzero_ps());
  for (int64_t g = 0; g < groups; ++g, codes += kGroupBytes, x += unit_stride) {
    for (int half = 0; half < 2; ++half) {
      __m256i w[GROUP / 4];
      unpack_group<BITS, GROUP>(codes + 32 * half, w);
      const __m256 scale = load_scales(scales + 16 * g + 8 * half, m.scale_is_half);
      const __m256 bias = load_scales(biases + 16 * g + 8 * half, m.scale_is_half);
      for (int64_t t = 0; t < n_tokens; ++t) {
        add_group<BITS, GROUP, PLANES>(w, scale, bias, x + t * kRecord, acc + 16 * t + 8 * half);
      }
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
