// Low-rank pairs with AVX2 and FMA.
#include <immintrin.h>

#include "kernels/low_rank_ops.h"

namespace stoker {
namespace {

struct Vector {
  static constexpr int width = 8;
  static constexpr int down_tokens = 1;  // tokens whose sums fit the registers together, beside 4 rows or one tile
  static constexpr int up_tokens = 4;
  __m256 v;
  static Vector set1(float x) { return {_mm256_set1_ps(x)}; }
  static Vector load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static __m256i words(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static Vector load_bf16(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
  }
  static Vector load_low(const uint32_t* p) { return {_mm256_castsi256_ps(_mm256_slli_epi32(words(p), 16))}; }
  static Vector load_high(const uint32_t* p) {
    return {_mm256_castsi256_ps(_mm256_and_si256(words(p), _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  static Vector add(Vector a, Vector b) { return {_mm256_add_ps(a.v, b.v)}; }
  static Vector fma(Vector a, Vector b, Vector c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  static float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  float reduce_add() const {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
  }
};

#include "kernels/low_rank_body.h"

}  // namespace

const LowRankOps kLowRankAvx2 = {down<Vector>, up<Vector>};

}  // namespace stoker
