// The two products of a low-rank pair, once for each instruction set. Knows no thread.
#pragma once
#include <cstdint>

namespace stoker {

// Columns [0, cols) of one tile of A: low[t, i] = or += sum over c of a[i, c] * x[t, c], for its 16 rows i.
struct DownTask {
  const void* a;
  bool is_bf16, add;
  int64_t cols;
  const float* x;
  int64_t x_stride, tokens;
  float* low;
  int64_t low_stride;
};

// y[t, o] += sum over r of b[o, r] * low[t, r]
struct UpTask {
  const void* b;  // from the first row's tile on; the first row begins a tile
  bool is_bf16;
  int64_t rows, rank;
  const float* low;
  int64_t low_stride, tokens;
  float* y;
  int64_t y_stride;
};

struct LowRankOps {
  void (*down)(const DownTask& task);
  void (*up)(const UpTask& task);
};

extern const LowRankOps kLowRankPortable;
extern const LowRankOps kLowRankAvx2;
extern const LowRankOps kLowRankAvx512;

const LowRankOps& low_rank_ops();  // of the instruction set in use

}  // namespace stoker
