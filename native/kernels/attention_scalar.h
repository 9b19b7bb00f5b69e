// One float as a vector of width 1: the tails of rows, and the model of what a vector type must offer. Included by
// attention_<isa>.cpp only, inside an anonymous namespace. kFused says whether the instruction set has a fused multiply-add.
#pragma once

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, rest = static_cast<uint32_t>(h & 0x7fffu) << 13;
  // Exponents differ by 112; multiplying also normalises subnormal halves. Infinity and NaN keep an exponent of all ones.
  const float scaled = __builtin_bit_cast(float, rest) * 0x1p112f;
  const uint32_t bits = rest >= 0x0f800000u ? (rest | 0x7f800000u) : __builtin_bit_cast(uint32_t, scaled);
  return __builtin_bit_cast(float, bits | sign);
}

// Rounds to nearest, ties to even, as the hardware does.
inline uint16_t float_to_half(float f) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, f), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((rest >> 13) & 0x3ffu));
  if (rest >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above
  if (rest < 0x38800000u) {  // a subnormal half: let the addition of 0.5 round at the right bit
    const float shifted = __builtin_bit_cast(float, rest) + 0.5f;
    return static_cast<uint16_t>(sign | (__builtin_bit_cast(uint32_t, shifted) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13));
}

inline bool overflows_half(float f) {
  const uint32_t rest = __builtin_bit_cast(uint32_t, f) & 0x7fffffffu;
  return rest >= 0x477ff000u && rest < 0x7f800000u;
}

struct Scalar {
  static constexpr int width = 1;
  float v;
  static Scalar set1(float x) { return {x}; }
  static Scalar load(const float* p) { return {*p}; }
  static Scalar load_half(const uint16_t* p) { return {half_to_float(*p)}; }
  void store(float* p) const { *p = v; }
  bool store_half(uint16_t* p) const {
    *p = float_to_half(v);
    return overflows_half(v);
  }
  static Scalar add(Scalar a, Scalar b) { return {a.v + b.v}; }
  static Scalar sub(Scalar a, Scalar b) { return {a.v - b.v}; }
  static Scalar mul(Scalar a, Scalar b) { return {a.v * b.v}; }
  static Scalar div(Scalar a, Scalar b) { return {a.v / b.v}; }
  static Scalar fma(Scalar a, Scalar b, Scalar c) { return {kFused ? __builtin_fmaf(a.v, b.v, c.v) : a.v * b.v + c.v}; }
  static Scalar max(Scalar a, Scalar b) { return {a.v > b.v ? a.v : b.v}; }  // b where either is NaN
  static Scalar round(Scalar a) { return {(a.v + 0x1.8p23f) - 0x1.8p23f}; }  // |a| < 2^22
  static Scalar minus_abs(Scalar a) { return {a.v > 0.0f ? -a.v : a.v}; }
  static Scalar choose_nonnegative(Scalar test, Scalar yes, Scalar no) { return test.v >= 0.0f ? yes : no; }
  static Scalar zero_below(Scalar x, float limit, Scalar y) { return {x.v < limit ? 0.0f : y.v}; }
  static Scalar times_power_of_two(Scalar y, Scalar n) {  // n whole, -126 to 0
    const int32_t e = n.v >= -126.0f ? static_cast<int32_t>(n.v) : 0;
    return {y.v * __builtin_bit_cast(float, (e + 127) << 23)};
  }
};
