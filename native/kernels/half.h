// 16-bit floats to f32 in plain C++: bf16 and IEEE half, the two forms of weight scales.
#pragma once
#include <cstdint>
#include <cstring>

namespace stoker {
namespace {  // one copy per file, so that no copy compiled for a wider instruction set is shared

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, fraction = h & 1023u;
  uint32_t bits = sign | ((exponent + 112u) << 23) | (fraction << 13);
  if (exponent == 31u) bits = sign | 0x7f800000u | (fraction << 13);
  float value;
  std::memcpy(&value, &bits, 4);
  if (exponent == 0u) {
    value = static_cast<float>(fraction) * 0x1p-24f;  // zero and denormals are exact in f32
    if (sign) value = -value;
  }
  return value;
}

inline float bf16_to_float(uint16_t b) {
  const uint32_t bits = static_cast<uint32_t>(b) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float decode_scale(uint16_t s, bool is_half) { return is_half ? half_to_float(s) : bf16_to_float(s); }

}  // namespace
}  // namespace stoker
