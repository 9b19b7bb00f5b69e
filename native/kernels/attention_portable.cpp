// Attention in plain C++ with the compiler's vectors of 4 floats, which become SSE2 or NEON. Multiply and add round
// separately: without hardware, a fused multiply-add is a slow library call.
#include <cmath>

#include "kernels/attention_ops.h"

namespace stoker {
namespace {

constexpr bool kFused = false;
#include "kernels/attention_scalar.h"

using Floats = float __attribute__((vector_size(16)));
using Ints = int32_t __attribute__((vector_size(16)));
using Words = uint32_t __attribute__((vector_size(16)));
using Halves = uint16_t __attribute__((vector_size(8)));

inline Floats select(Ints mask, Floats yes, Floats no) { return (Floats)((mask & (Ints)yes) | (~mask & (Ints)no)); }
inline Floats all(float x) { return Floats{x, x, x, x}; }

struct Vector {
  static constexpr int width = 4;
  static constexpr int panel_rows = 6;  // rows and vectors whose sums fit the registers together
  static constexpr int panel_vectors = 2;
  Floats v;
  static Vector set1(float x) { return {all(x)}; }
  static Vector load(const float* p) {
    Floats v;
    __builtin_memcpy(&v, p, sizeof v);
    return {v};
  }
  static Vector load_half(const uint16_t* p) {  // half_to_float, four at a time
    Halves h;
    __builtin_memcpy(&h, p, sizeof h);
    const Words w = __builtin_convertvector(h, Words), rest = (w & 0x7fffu) << 13;
    const Words finite = (Words)((Floats)rest * all(0x1p112f));
    const Words special = (Words)(rest >= 0x0f800000u) & 0x7f800000u;
    return {(Floats)(finite | special | ((w & 0x8000u) << 16))};
  }
  void store(float* p) const { __builtin_memcpy(p, &v, sizeof v); }
  bool store_half(uint16_t* p) const {
    bool overflow = false;
    for (int i = 0; i < width; ++i) overflow |= Scalar{v[i]}.store_half(p + i);
    return overflow;
  }
  static Vector add(Vector a, Vector b) { return {a.v + b.v}; }
  static Vector sub(Vector a, Vector b) { return {a.v - b.v}; }
  static Vector mul(Vector a, Vector b) { return {a.v * b.v}; }
  static Vector div(Vector a, Vector b) { return {a.v / b.v}; }
  static Vector fma(Vector a, Vector b, Vector c) { return {a.v * b.v + c.v}; }
  static Vector max(Vector a, Vector b) { return {select(a.v > b.v, a.v, b.v)}; }
  static Vector round(Vector a) { return {(a.v + all(0x1.8p23f)) - all(0x1.8p23f)}; }
  static Vector minus_abs(Vector a) { return {(Floats)((Words)a.v | 0x80000000u)}; }
  static Vector choose_nonnegative(Vector test, Vector yes, Vector no) { return {select(test.v >= all(0.0f), yes.v, no.v)}; }
  static Vector zero_below(Vector x, float limit, Vector y) { return {select(x.v < all(limit), all(0.0f), y.v)}; }
  static Vector times_power_of_two(Vector y, Vector n) {
    const Floats whole = select(n.v >= all(-126.0f), n.v, all(0.0f));  // NaN converts to no integer; y is NaN then
    return {y.v * (Floats)((__builtin_convertvector(whole, Ints) + 127) << 23)};
  }
  float reduce_add() const { return (v[0] + v[2]) + (v[1] + v[3]); }
  float reduce_max() const {
    const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
  }
};

#include "kernels/attention_body.h"

}  // namespace

const AttentionOps kAttentionPortable = {attend<Vector>, mean_square<Vector>, scale<Vector>, rotate<Vector>, to_half<Vector>, gate<Vector>};

}  // namespace stoker
