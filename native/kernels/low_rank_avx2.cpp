// Low-rank pairs with AVX2 and FMA.
#include <immintrin.h>

#include "kernels/low_rank_ops.h"

namespace stoker {
namespace {

struct Vector {
  static constexpr int width = 8;
  static constexpr int tokens = 1;  // of a panel: four sums for each must fit the registers
  __m256 v;
  static Vector set1(float x) { return {_mm256_set1_ps(x)}; }
  static Vector load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static __m256i words(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static Vector load_low(const uint32_t* p) { return {_mm256_castsi256_ps(_mm256_slli_epi32(words(p), 16))}; }
  static Vector load_high(const uint32_t* p) {
    return {_mm256_castsi256_ps(_mm256_and_si256(words(p), _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  static Vector add(Vector a, Vector b) { return {_mm256_add_ps(a.v, b.v)}; }
  static Vector fma(Vector a, Vector b, Vector c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
};

#include "kernels/low_rank_body.h"

}  // namespace

const LowRankOps kLowRankAvx2 = {down<Vector>, up<Vector>};

}  // namespace stoker
