// Activation rows in the form that a matrix multiplies: int8 blocks for affine, bf16 or f32 for bf16, f32 for f32.
// Owns the encoded buffer. Encoding a row depends on that row alone, so a row's product does too.
//
// A row is cut into units (one weight group for affine, 32 columns otherwise). Records are unit-major, [units][tokens]:
// all tokens of one unit are one forward stream.
//   affine record: f32 sum of the decoded unit, f32 scale per 32 columns, then one plane of int8 per column, or two
//                  4-bit weights: every 8 columns are stored as 4 even then 4 odd ones (the nibble order); 8-bit: in order
//                  one plane: x = scale * q, scale = amax / 127; two: x = scale * (256 * q0 + q1), scale = amax / (127 * 256)
//   bf16 record:   u16 per column, zero past the last one;  f32 record: f32 per column
// A 32-column block that holds a NaN or an infinity has scale NaN: the row's outputs become NaN. A zero block has scale 0.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/matrix.h"

namespace stoker {

constexpr int kBlock = 32;  // columns that share one activation scale

enum class Code : int { nibbles, bytes, bf16, f32 };

struct Encoding {
  Code code = Code::f32;
  int unit_cols = kBlock;
  int planes = 1;  // affine: 2 for 16-bit activations

  bool operator==(const Encoding&) const = default;
  int64_t units(int64_t cols) const { return (cols + unit_cols - 1) / unit_cols; }
  int64_t record_bytes() const;
};

// Matrices of equal encoding and columns can share encoded activations.
Encoding encoding_of(const Matrix& m);

// A view of encoded rows; token t of unit u is at data + (u * tokens + t) * record_bytes.
struct EncodedRows {
  const char* data = nullptr;
  int64_t tokens = 0;
  int64_t record_bytes = 0;

  const char* at(int64_t unit, int64_t token) const { return data + (unit * tokens + token) * record_bytes; }
  int64_t unit_stride() const { return tokens * record_bytes; }
};

// Encodes `cols` columns of one row, from column unit * unit_cols on, into the records of `token` in `data`.
void encode_row(Encoding e, const float* x, int64_t cols, char* data, int64_t tokens, int64_t token);

// Grows, never shrinks; 64-byte aligned; contents are not kept. scratch_bytes() is what all of them hold, for the ledger.
int64_t scratch_bytes();

class Scratch {
 public:
  Scratch() = default;
  ~Scratch() { release(); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  char* reserve(int64_t nbytes);
  char* data() const { return data_; }
  int64_t nbytes() const { return capacity_; }

 private:
  void release();
  char* data_ = nullptr;
  int64_t capacity_ = 0;
};

// prepare() by one thread outside the parallel part, then encode() by every thread of a region, then a barrier.
class Activations {
 public:
  void prepare(Encoding encoding, int64_t tokens, int64_t cols);
  // x: [tokens, cols] f32, rows `row_stride` floats apart. Every thread does its share.
  void encode(const float* x, int64_t row_stride, int thread, int n_threads);
  EncodedRows rows() const { return {scratch_.data(), tokens_, encoding_.record_bytes()}; }
  Encoding encoding() const { return encoding_; }
  int64_t tokens() const { return tokens_; }
  int64_t nbytes() const { return scratch_.nbytes(); }

 private:
  Scratch scratch_;
  Encoding encoding_;
  int64_t tokens_ = 0;
  int64_t cols_ = 0;
};

}  // namespace stoker
