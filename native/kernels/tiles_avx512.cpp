// Tile kernels for AVX-512 with VNNI and BF16. 16 rows lie in the 16 lanes, so no value ever moves between lanes:
// a dword of activations is broadcast from memory into dpbusd (unsigned weight codes times signed activations).
// Affine results equal the portable ones bit for bit.
// GCC 12 warns of the undefined values inside its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "kernels/dispatch.h"
#include "kernels/elementwise_body.h"

namespace stoker {
namespace {

constexpr int64_t kAhead = 4096;       // bytes of codes fetched ahead: hides the memory's latency
constexpr int64_t kScalesAhead = 512;  // scales and biases, in elements of 2 bytes

inline __m512 load_scales(const uint16_t* p, bool is_half) {
  const __m256i v = _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
  if (is_half) return _mm512_cvtph_ps(v);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

inline __m512i broadcast_dword(const char* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return _mm512_set1_epi32(v);
}

inline __m512 broadcast_float(const char* p) {
  float v;
  std::memcpy(&v, p, 4);
  return _mm512_set1_ps(v);
}

// One weight group as bytes of 4 columns each, in the order in which the activations are stored.
template <int BITS, int GROUP>
inline void unpack_group(const char* codes, __m512i* w) {
  const __m512i mask = _mm512_set1_epi8(15);
  for (int i = 0; i < GROUP * BITS / 32; ++i) {
    const __m512i v = _mm512_load_si512(codes + 64 * i);
    if constexpr (BITS == 4) {
      w[2 * i] = _mm512_and_si512(v, mask);
      w[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi32(v, 4), mask);
    } else {
      w[i] = v;
    }
  }
}

// N tokens times one unpacked group; `record` is the first token's.
template <int GROUP, int PLANES, int N>
inline void add_group(const __m512i* w, __m512 scale, __m512 bias, const char* record, float* acc) {
  constexpr int kBlocks = GROUP / kBlock;
  constexpr int kRecord = 4 + 4 * kBlocks + PLANES * GROUP;
  __m512 term[N];
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
    __m512i sums[N];
#pragma GCC unroll 8
    for (int t = 0; t < N; ++t) sums[t] = _mm512_setzero_si512();
#pragma GCC unroll 2
    for (int plane = 0; plane < PLANES; ++plane) {
#pragma GCC unroll 8
      for (int t = 0; t < N && plane > 0; ++t) sums[t] = _mm512_slli_epi32(sums[t], 8);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 8
        for (int t = 0; t < N; ++t) {
          const char* x = record + t * kRecord + 4 + 4 * kBlocks + plane * GROUP + b * kBlock + 4 * i;
          sums[t] = _mm512_dpbusd_epi32(sums[t], w[8 * b + i], broadcast_dword(x));
        }
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < N; ++t) {
      const __m512 x_scale = broadcast_float(record + t * kRecord + 4 + 4 * b), s = _mm512_cvtepi32_ps(sums[t]);
      term[t] = b == 0 ? _mm512_mul_ps(s, x_scale) : _mm512_fmadd_ps(s, x_scale, term[t]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < N; ++t) {
    __m512 a = _mm512_load_ps(acc + 16 * t);
    a = _mm512_fmadd_ps(term[t], scale, a);
    a = _mm512_fmadd_ps(bias, broadcast_float(record + t * kRecord), a);
    _mm512_store_ps(acc + 16 * t, a);
  }
}

template <int BITS, int GROUP, int PLANES>
void affine_tile(const Matrix& m, const char* x, int64_t unit_stride, int64_t n_tokens, int64_t tile, float* acc) {
  constexpr int kRecord = 4 + 4 * (GROUP / kBlock) + PLANES * GROUP;
  constexpr int64_t kGroupBytes = GROUP * BITS * 2;
  const int64_t groups = m.cols / GROUP;
  const char* codes = static_cast<const char*>(m.codes) + tile * groups * kGroupBytes;
  const uint16_t* scales = m.scales + tile * groups * 16;
  const uint16_t* biases = m.biases + tile * groups * 16;
  for (int64_t t = 0; t < n_tokens; ++t) _mm512_store_ps(acc + 16 * t, _mm512_setzero_ps());
  for (int64_t g = 0; g < groups; ++g, codes += kGroupBytes, x += unit_stride) {
    __m512i w[GROUP / 4];
    unpack_group<BITS, GROUP>(codes, w);
    for (int64_t i = 0; i < kGroupBytes; i += 64) _mm_prefetch(codes + kAhead + i, _MM_HINT_T0);
    _mm_prefetch(scales + 16 * g + kScalesAhead, _MM_HINT_T0);
    _mm_prefetch(biases + 16 * g + kScalesAhead, _MM_HINT_T0);
    const __m512 scale = load_scales(scales + 16 * g, m.scale_is_half);
    const __m512 bias = load_scales(biases + 16 * g, m.scale_is_half);
    int64_t t = 0;
    for (; t + 4 <= n_tokens; t += 4) add_group<GROUP, PLANES, 4>(w, scale, bias, x + t * kRecord, acc + 16 * t);
    switch (n_tokens - t) {
      case 3: add_group<GROUP, PLANES, 3>(w, scale, bias, x + t * kRecord, acc + 16 * t); break;
      case 2: add_group<GROUP, PLANES, 2>(w, scale, bias, x + t * kRecord, acc + 16 * t); break;
      case 1: add_group<GROUP, PLANES, 1>(w, scale, bias, x + t * kRecord, acc + 16 * t); break;
    }
  }
}

// Two chains (even and odd words), added at the end.
template <int N>
void bf16_tokens(const char* words, int64_t n_words, const char* x, int64_t unit_stride, float* acc) {
  __m512 even[N], odd[N];
  for (int t = 0; t < N; ++t) even[t] = odd[t] = _mm512_setzero_ps();
  for (int64_t w = 0; w < n_words; w += 16, x += unit_stride) {
    const int64_t n = n_words - w < 16 ? n_words - w : 16;
    for (int64_t i = 0; i + 2 <= n; i += 2, words += 128) {
      const __m512bh v0 = (__m512bh)_mm512_load_si512(words), v1 = (__m512bh)_mm512_load_si512(words + 64);
      for (int t = 0; t < N; ++t) {
        even[t] = _mm512_dpbf16_ps(even[t], v0, (__m512bh)broadcast_dword(x + 64 * t + 4 * i));
        odd[t] = _mm512_dpbf16_ps(odd[t], v1, (__m512bh)broadcast_dword(x + 64 * t + 4 * i + 4));
      }
    }
    if (n % 2 == 1) {
      const __m512bh v = (__m512bh)_mm512_load_si512(words);
      for (int t = 0; t < N; ++t) even[t] = _mm512_dpbf16_ps(even[t], v, (__m512bh)broadcast_dword(x + 64 * t + 4 * (n - 1)));
    }
  }
  for (int t = 0; t < N; ++t) _mm512_store_ps(acc + 16 * t, _mm512_add_ps(even[t], odd[t]));
}

void bf16_tile(const Matrix& m, const char* x, int64_t unit_stride, int64_t n_tokens, int64_t tile, float* acc) {
  const int64_t n_words = (m.cols + 1) / 2;
  const char* words = static_cast<const char*>(m.codes) + tile * n_words * 64;
  int64_t t = 0;
  for (; t + 8 <= n_tokens; t += 8) bf16_tokens<8>(words, n_words, x + 64 * t, unit_stride, acc + 16 * t);
  for (; t + 2 <= n_tokens; t += 2) bf16_tokens<2>(words, n_words, x + 64 * t, unit_stride, acc + 16 * t);
  if (t < n_tokens) bf16_tokens<1>(words, n_words, x + 64 * t, unit_stride, acc + 16 * t);
}

// bf16 weights widened to f32, times f32 activations.
template <int N>
void bf16_f32_tokens(const char* words, int64_t n_words, const char* x, int64_t unit_stride, float* acc) {
  const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  __m512 low[N], high[N];
  for (int t = 0; t < N; ++t) low[t] = high[t] = _mm512_setzero_ps();
  for (int64_t w = 0; w < n_words; w += 16, x += unit_stride) {
    const int64_t n = n_words - w < 16 ? n_words - w : 16;
    for (int64_t i = 0; i < n; ++i, words += 64) {
      _mm_prefetch(words + kAhead, _MM_HINT_T0);
      const __m512i v = _mm512_load_si512(words);
      const __m512 v_low = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
      const __m512 v_high = _mm512_castsi512_ps(_mm512_and_si512(v, high_half));
      for (int t = 0; t < N; ++t) {
        low[t] = _mm512_fmadd_ps(v_low, broadcast_float(x + 128 * t + 8 * i), low[t]);
        high[t] = _mm512_fmadd_ps(v_high, broadcast_float(x + 128 * t + 8 * i + 4), high[t]);
      }
    }
  }
  for (int t = 0; t < N; ++t) _mm512_store_ps(acc + 16 * t, _mm512_add_ps(low[t], high[t]));
}

void bf16_f32_tile(const Matrix& m, const char* x, int64_t unit_stride, int64_t n_tokens, int64_t tile, float* acc) {
  const int64_t n_words = (m.cols + 1) / 2;
  const char* words = static_cast<const char*>(m.codes) + tile * n_words * 64;
  int64_t t = 0;
  for (; t + 8 <= n_tokens; t += 8) bf16_f32_tokens<8>(words, n_words, x + 128 * t, unit_stride, acc + 16 * t);
  for (; t + 2 <= n_tokens; t += 2) bf16_f32_tokens<2>(words, n_words, x + 128 * t, unit_stride, acc + 16 * t);
  if (t < n_tokens) bf16_f32_tokens<1>(words, n_words, x + 128 * t, unit_stride, acc + 16 * t);
}

template <int N>
void f32_tokens(const char* w, int64_t cols, const char* x, int64_t unit_stride, float* acc) {
  __m512 even[N], odd[N];
  for (int t = 0; t < N; ++t) even[t] = odd[t] = _mm512_setzero_ps();
  for (int64_t c = 0; c < cols; c += kBlock, x += unit_stride) {
    const int64_t n = cols - c < kBlock ? cols - c : kBlock;
    for (int64_t i = 0; i + 2 <= n; i += 2, w += 128) {
      const __m512 w0 = _mm512_load_ps(w), w1 = _mm512_load_ps(w + 64);
      for (int t = 0; t < N; ++t) {
        even[t] = _mm512_fmadd_ps(w0, broadcast_float(x + 128 * t + 4 * i), even[t]);
        odd[t] = _mm512_fmadd_ps(w1, broadcast_float(x + 128 * t + 4 * i + 4), odd[t]);
      }
    }
    if (n % 2 == 1) {
      const __m512 w0 = _mm512_load_ps(w);
      for (int t = 0; t < N; ++t) even[t] = _mm512_fmadd_ps(w0, broadcast_float(x + 128 * t + 4 * (n - 1)), even[t]);
    }
  }
  for (int t = 0; t < N; ++t) _mm512_store_ps(acc + 16 * t, _mm512_add_ps(even[t], odd[t]));
}

void f32_tile(const Matrix& m, const char* x, int64_t unit_stride, int64_t n_tokens, int64_t tile, float* acc) {
  const char* w = static_cast<const char*>(m.codes) + tile * m.cols * 64;
  int64_t t = 0;
  for (; t + 8 <= n_tokens; t += 8) f32_tokens<8>(w, m.cols, x + 128 * t, unit_stride, acc + 16 * t);
  for (; t + 2 <= n_tokens; t += 2) f32_tokens<2>(w, m.cols, x + 128 * t, unit_stride, acc + 16 * t);
  if (t < n_tokens) f32_tokens<1>(w, m.cols, x + 128 * t, unit_stride, acc + 16 * t);
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
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 256 <= n; i += 256) {
    _mm_prefetch(p + i + 4096, _MM_HINT_T0);
    _mm_prefetch(p + i + 4160, _MM_HINT_T0);
    _mm_prefetch(p + i + 4224, _MM_HINT_T0);
    _mm_prefetch(p + i + 4288, _MM_HINT_T0);
    a = _mm512_xor_si512(a, _mm512_loadu_si512(p + i));
    b = _mm512_xor_si512(b, _mm512_loadu_si512(p + i + 64));
    c = _mm512_xor_si512(c, _mm512_loadu_si512(p + i + 128));
    d = _mm512_xor_si512(d, _mm512_loadu_si512(p + i + 192));
  }
  for (; i < n; i += 64) a = _mm512_xor_si512(a, _mm512_loadu_si512(p + i));
  alignas(64) uint64_t lanes[8];
  _mm512_store_si512(lanes, _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d)));
  uint64_t x = 0;
  for (uint64_t lane : lanes) x ^= lane;
  return x;
}

}  // namespace

const KernelTable* avx512_table() {
  static const KernelTable table{"avx512", tile_kernel, encode_row_body, gated_body, read_bytes};
  return &table;
}

}  // namespace stoker
