// Attention with AVX2, FMA and F16C: 8 floats in a vector, 12 sums in registers.
#include <immintrin.h>

#include <cmath>

#include "kernels/attention_ops.h"

namespace stoker {
namespace {

constexpr bool kFused = true;
#include "kernels/attention_scalar.h"

struct Vector {
  static constexpr int width = 8;
  static constexpr int panel_rows = 6;  // rows and vectors whose sums fit the registers together
  static constexpr int panel_vectors = 2;
  __m256 v;
  static Vector set1(float x) { return {_mm256_set1_ps(x)}; }
  static Vector load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vector load_half(const uint16_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  bool store_half(uint16_t* p) const {
    const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return _mm256_movemask_ps(_mm256_and_ps(_mm256_cmp_ps(size, _mm256_set1_ps(65520.0f), _CMP_GE_OQ),
                                            _mm256_cmp_ps(size, _mm256_set1_ps(INFINITY), _CMP_LT_OQ))) != 0;
  }
  static Vector add(Vector a, Vector b) { return {_mm256_add_ps(a.v, b.v)}; }
  static Vector sub(Vector a, Vector b) { return {_mm256_sub_ps(a.v, b.v)}; }
  static Vector mul(Vector a, Vector b) { return {_mm256_mul_ps(a.v, b.v)}; }
  static Vector div(Vector a, Vector b) { return {_mm256_div_ps(a.v, b.v)}; }
  static Vector fma(Vector a, Vector b, Vector c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  static Vector max(Vector a, Vector b) { return {_mm256_max_ps(a.v, b.v)}; }
  static Vector round(Vector a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  static Vector minus_abs(Vector a) { return {_mm256_or_ps(a.v, _mm256_set1_ps(-0.0f))}; }
  static Vector choose_nonnegative(Vector test, Vector yes, Vector no) {
    return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(test.v, _mm256_setzero_ps(), _CMP_GE_OQ))};
  }
  static Vector zero_below(Vector x, float limit, Vector y) {
    return {_mm256_and_ps(_mm256_cmp_ps(x.v, _mm256_set1_ps(limit), _CMP_NLT_UQ), y.v)};
  }
  static Vector times_power_of_two(Vector y, Vector n) {  // NaN in n becomes some number, but then y is NaN too
    const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
    return {_mm256_mul_ps(y.v, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)))};
  }
  float reduce_add() const {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
  }
  float reduce_max() const {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
  }
};

#include "kernels/attention_body.h"

}  // namespace

const AttentionOps kAttentionAvx2 = {attend<Vector>, mean_square<Vector>, scale<Vector>, rotate<Vector>, to_half<Vector>, gate<Vector>};

}  // namespace stoker
