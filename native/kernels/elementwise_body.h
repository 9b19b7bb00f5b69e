// Encoding of activation rows and the gated activations, written as plain loops that the compiler vectorises.
// Included once per instruction set, inside an anonymous namespace, so that each copy is compiled for its own set;
// no operation may be contracted, hence every copy gives the same bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/dispatch.h"

namespace stoker {
namespace {

inline uint32_t float_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

inline float bits_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

// Bytes b0..b7 (b0 lowest) become b0 b2 b4 b6 b1 b3 b5 b7.
inline uint64_t even_then_odd(uint64_t v) {
  uint64_t t = ((v >> 8) ^ v) & 0x0000ff000000ff00ull;
  v ^= t ^ (t << 8);
  t = ((v >> 16) ^ v) & 0x00000000ffff0000ull;
  return v ^ t ^ (t << 16);
}

inline void store_codes(const int8_t* bytes, bool nibbles, char* codes) {
  if (!nibbles) {
    std::memcpy(codes, bytes, kBlock);
    return;
  }
  for (int i = 0; i < kBlock; i += 8) {
    uint64_t v;
    std::memcpy(&v, bytes + i, 8);
    v = even_then_odd(v);
    std::memcpy(codes + i, &v, 8);
  }
}

// Rounds 32 columns to integers of at most `top` (127, or 127 * 256) with scale = amax / top; returns the scale.
inline float round_block(const float* x, float top, int32_t* q) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
  uint32_t amax_bits = 0;
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t magnitude = float_bits(x[i]) & 0x7fffffffu;
    amax_bits = magnitude > amax_bits ? magnitude : amax_bits;
  }
  if (amax_bits == 0 || amax_bits >= 0x7f800000u) {
    std::memset(q, 0, kBlock * sizeof(int32_t));
    return amax_bits == 0 ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  const float amax = bits_float(amax_bits);
  const float lift = amax < 0x1p-100f ? 0x1p100f : 1.0f;  // keeps top / amax finite for denormals
  const float inverse = top / (amax * lift);
  for (int i = 0; i < kBlock; ++i) q[i] = static_cast<int32_t>(float_bits(x[i] * lift * inverse + kRound) - 0x4b400000u);
  return amax / top;
}

inline void encode_affine_unit(const float* x, const Encoding& e, char* record) {
  float* sum = reinterpret_cast<float*>(record);
  float* scales = sum + 1;
  const bool nibbles = e.code == Code::nibbles;
  const int blocks = e.unit_cols / kBlock;
  char* codes = record + 4 + 4 * blocks;
  for (int b = 0; b < blocks; ++b) {
    int32_t q[kBlock];
    int8_t bytes[kBlock];
    scales[b] = round_block(x + b * kBlock, e.planes == 1 ? 127.0f : 127.0f * 256.0f, q);
    int32_t code_sum = 0;
    for (int i = 0; i < kBlock; ++i) code_sum += q[i];
    if (e.planes == 2) {
      for (int i = 0; i < kBlock; ++i) bytes[i] = static_cast<int8_t>(q[i]);
      store_codes(bytes, nibbles, codes + e.unit_cols + b * kBlock);
      for (int i = 0; i < kBlock; ++i) q[i] = (q[i] - bytes[i]) >> 8;
    }
    for (int i = 0; i < kBlock; ++i) bytes[i] = static_cast<int8_t>(q[i]);
    store_codes(bytes, nibbles, codes + b * kBlock);
    const float term = static_cast<float>(code_sum) * scales[b];
    *sum = b == 0 ? term : *sum + term;
  }
}

inline uint16_t to_bf16(float x) {
  const uint32_t u = float_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

inline void encode_bf16_unit(const float* x, int n, char* record) {
  uint16_t* out = reinterpret_cast<uint16_t*>(record);
  for (int i = 0; i < n; ++i) out[i] = to_bf16(x[i]);
  for (int i = n; i < kBlock; ++i) out[i] = 0;
}

inline void encode_f32_unit(const float* x, int n, char* record) {
  std::memset(record, 0, 4 * kBlock);
  std::memcpy(record, x, 4 * static_cast<size_t>(n));
}

void encode_row_body(Encoding e, const float* x, int64_t cols, char* data, int64_t tokens, int64_t token) {
  const int64_t record_bytes = e.record_bytes(), unit_stride = tokens * record_bytes;
  char* record = data + token * record_bytes;
  for (int64_t c = 0; c < cols; c += e.unit_cols, record += unit_stride) {
    const int n = static_cast<int>(cols - c < e.unit_cols ? cols - c : e.unit_cols);
    switch (e.code) {
      case Code::nibbles:
      case Code::bytes: encode_affine_unit(x + c, e, record); break;
      case Code::bf16: encode_bf16_unit(x + c, n, record); break;
      case Code::f32: encode_f32_unit(x + c, n, record); break;
    }
  }
}

// exp to about 1 ulp of float: 2^k * e^r with |r| <= ln2 / 2 (Cody-Waite reduction, Taylor polynomial of degree 7).
inline float exp_f32(float x) {
  constexpr float kRound = 12582912.0f;
  float y = x < -87.0f ? -87.0f : x;
  y = y > 88.0f ? 88.0f : y;
  const float shifted = y * 1.44269504f + kRound;
  const float k = shifted - kRound;
  const float r = (y - k * 0.693359375f) - k * -2.12194440e-4f;
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const float two_k = bits_float((float_bits(shifted) - 0x4b400000u + 127u) << 23);
  const float e = p * two_k;
  const float high = x > 88.0f ? std::numeric_limits<float>::infinity() : e;
  return x < -87.0f ? 0.0f : high;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exp_f32(-x)); }

void gated_body(const GateParams& p, const float* gate, const float* up, float* h, int64_t n) {
  switch (p.activation) {
    case Activation::silu:
      for (int64_t i = 0; i < n; ++i) h[i] = gate[i] * sigmoid(gate[i]) * up[i];
      break;
    case Activation::gelu:
      for (int64_t i = 0; i < n; ++i) h[i] = 0.5f * gate[i] * (1.0f + std::erf(gate[i] * 0.70710678f)) * up[i];
      break;
    case Activation::gelu_tanh:  // 0.5 * (1 + tanh(z)) = sigmoid(2z)
      for (int64_t i = 0; i < n; ++i) {
        const float z = 0.79788456f * (gate[i] + 0.044715f * gate[i] * gate[i] * gate[i]);
        h[i] = gate[i] * sigmoid(2.0f * z) * up[i];
      }
      break;
    case Activation::relu:  // written so that NaN stays NaN
      for (int64_t i = 0; i < n; ++i) h[i] = (gate[i] < 0.0f ? 0.0f : gate[i]) * up[i];
      break;
    case Activation::swiglu_oai:
      for (int64_t i = 0; i < n; ++i) {
        const float g = gate[i] > p.limit ? p.limit : gate[i];
        float u = up[i] > p.limit ? p.limit : up[i];
        u = u < -p.limit ? -p.limit : u;
        h[i] = g * sigmoid(p.alpha * g) * (u + 1.0f);
      }
      break;
  }
}

}  // namespace
}  // namespace stoker
