// Low-rank pairs with AVX-512.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"        // gcc 12's own AVX-512 header sets them off
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "kernels/low_rank_ops.h"

namespace stoker {
namespace {

struct Vector {
  static constexpr int width = 16;
  static constexpr int tokens = 4;  // of a panel: four sums for each must fit the registers
  __m512 v;
  static Vector set1(float x) { return {_mm512_set1_ps(x)}; }
  static Vector load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vector load_low(const uint32_t* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
  static Vector load_high(const uint32_t* p) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  static Vector add(Vector a, Vector b) { return {_mm512_add_ps(a.v, b.v)}; }
  static Vector fma(Vector a, Vector b, Vector c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
};

#include "kernels/low_rank_body.h"

}  // namespace

const LowRankOps kLowRankAvx512 = {down<Vector>, up<Vector>};

}  // namespace stoker

#pragma GCC diagnostic pop
