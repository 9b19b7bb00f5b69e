// Attention with AVX-512: 16 floats in a vector, 24 sums in registers.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"        // gcc 12's own AVX-512 header sets them off
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cmath>

#include "kernels/attention_ops.h"

namespace stoker {
namespace {

constexpr bool kFused = true;
#include "kernels/attention_scalar.h"

struct Vector {
  static constexpr int width = 16;
  static constexpr int panel_rows = 8;  // rows and vectors whose sums fit the registers together
  static constexpr int panel_vectors = 2;
  __m512 v;
  static Vector set1(float x) { return {_mm512_set1_ps(x)}; }
  static Vector load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vector load_half(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  bool store_half(uint16_t* p) const {
    const __m512 size = _mm512_abs_ps(v);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(size, _mm512_set1_ps(65520.0f), _CMP_GE_OQ), size,
                                   _mm512_set1_ps(INFINITY), _CMP_LT_OQ) != 0;
  }
  static Vector add(Vector a, Vector b) { return {_mm512_add_ps(a.v, b.v)}; }
  static Vector sub(Vector a, Vector b) { return {_mm512_sub_ps(a.v, b.v)}; }
  static Vector mul(Vector a, Vector b) { return {_mm512_mul_ps(a.v, b.v)}; }
  static Vector div(Vector a, Vector b) { return {_mm512_div_ps(a.v, b.v)}; }
  static Vector fma(Vector a, Vector b, Vector c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static Vector max(Vector a, Vector b) { return {_mm512_max_ps(a.v, b.v)}; }
  static Vector round(Vector a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  static Vector minus_abs(Vector a) { return {_mm512_or_ps(a.v, _mm512_set1_ps(-0.0f))}; }
  static Vector choose_nonnegative(Vector test, Vector yes, Vector no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(test.v, _mm512_setzero_ps(), _CMP_GE_OQ), no.v, yes.v)};
  }
  static Vector zero_below(Vector x, float limit, Vector y) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ), y.v)};
  }
  static Vector times_power_of_two(Vector y, Vector n) { return {_mm512_scalef_ps(y.v, n.v)}; }
  float reduce_add() const { return _mm512_reduce_add_ps(v); }
  float reduce_max() const { return _mm512_reduce_max_ps(v); }
};

#include "kernels/attention_body.h"

}  // namespace

const AttentionOps kAttentionAvx512 = {attend<Vector>, mean_square<Vector>, scale<Vector>, rotate<Vector>, to_half<Vector>, gate<Vector>};

}  // namespace stoker

#pragma GCC diagnostic pop
