// A weight matrix as bytes: what the quantised kernels read. Owns nothing; the caller keeps the bytes alive.
// The layout ("tile16") is defined in stoker/quant/formats.py and implemented by stoker/quant/reference.py.
//
// Rows are grouped in tiles of 16; rows past `rows` in the last tile are zero (codes, scales and biases).
//   affine 4 bit: codes  u32 [tiles, cols/8, 16]   word c of row r holds columns 8c..8c+7, low bits first
//   affine 8 bit: codes  u32 [tiles, cols/4, 16]   word c of row r holds columns 4c..4c+3, low bits first
//                 scales u16 [tiles, cols/group, 16], biases the same; bf16 or IEEE half
//                 w = scale * code + bias
//   bf16:         codes  u32 [tiles, ceil(cols/2), 16]  word c of row r holds columns 2c (low half), 2c+1 (zero past cols)
//   f32:          codes  f32 [tiles, cols, 16]
// So one 64-byte load holds the same few columns of 16 rows, and a tile is read in one forward stream.
#pragma once
#include <cstdint>

namespace stoker {

enum class Format : int { affine = 0, bf16 = 1, f32 = 2 };

struct Matrix {
  Format format = Format::affine;
  int bits = 4;               // affine: 4 or 8
  int group = 64;             // affine: 32, 64 or 128; divides cols
  bool scale_is_half = false; // affine: IEEE half instead of bf16
  // How finely the activations that meet this matrix are rounded. affine: to int8, or to 16 bits; bf16: 8 means bf16, 16 means
  // not at all; f32: never.
  int activation_bits = 8;
  int64_t rows = 0;           // outputs
  int64_t cols = 0;           // inputs
  const void* codes = nullptr;             // 64-byte aligned
  const uint16_t* scales = nullptr;        // 32-byte aligned
  const uint16_t* biases = nullptr;        // 32-byte aligned
  const float* row_bias = nullptr;         // [rows] added to the output, or null

  int64_t tiles() const { return (rows + 15) / 16; }
};

}  // namespace stoker
