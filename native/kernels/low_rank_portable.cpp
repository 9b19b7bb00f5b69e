// Low-rank pairs in plain C++ with the compiler's vectors of 4 floats. Multiply and add round separately, as in
// attention_portable.cpp.
#include "kernels/low_rank_ops.h"

namespace stoker {
namespace {

using Floats = float __attribute__((vector_size(16)));
using Words = uint32_t __attribute__((vector_size(16)));

struct Vector {
  static constexpr int width = 4;
  static constexpr int tokens = 1;  // of a panel: four sums for each must fit the registers
  Floats v;
  template <class T, class From>
  static T read(const From* p) {
    T value;
    __builtin_memcpy(&value, p, sizeof value);
    return value;
  }
  static Vector set1(float x) { return {Floats{x, x, x, x}}; }
  static Vector load(const float* p) { return {read<Floats>(p)}; }
  static Vector load_low(const uint32_t* p) { return {(Floats)(read<Words>(p) << 16)}; }
  static Vector load_high(const uint32_t* p) { return {(Floats)(read<Words>(p) & 0xffff0000u)}; }
  void store(float* p) const { __builtin_memcpy(p, &v, sizeof v); }
  static Vector add(Vector a, Vector b) { return {a.v + b.v}; }
  static Vector fma(Vector a, Vector b, Vector c) { return {a.v * b.v + c.v}; }
};

#include "kernels/low_rank_body.h"

}  // namespace

const LowRankOps kLowRankPortable = {down<Vector>, up<Vector>};

}  // namespace stoker
