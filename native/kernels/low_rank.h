// y[t, :] += B (A x[t, :]): what a low-rank adapter adds beside a matrix that it leaves alone. Sums are f32.
// A row of y depends on its rows of x and y and on the pair alone, bit for bit, whatever else is in the call and however
// many threads there are: A x is summed over chunks of columns whose bounds depend on nothing, and the chunks are added in
// their order. Instruction sets differ in the last bits.
// The caller owns pairs and rows. Must not know: adapters' names, attention, Python.
//
// Inside a larger region:  sum.clear();  sum.add(...) for each term;  sum.prepare() before it; then, on every thread,
//   sum.down(n);  pool.barrier();  sum.up(tile0, tile1) for the tiles of y's rows that this thread has completed.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels/activations.h"
#include "kernels/matmul.h"
#include "kernels/matrix.h"

namespace stoker {

struct LowRank {
  Matrix a;  // [rank, inputs], bf16 or f32
  Matrix b;  // [outputs, rank], bf16 or f32
};

// Rows of x and y are `stride` floats apart.
struct LowRankTerm {
  const LowRank* pair = nullptr;
  int64_t tokens = 0;
  const float* x = nullptr;
  int64_t x_stride = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
};

// The terms of one y: pairs of equal outputs for different tokens.
class LowRankSum {
 public:
  void clear();
  void add(const LowRankTerm& term);
  void prepare();
  void down(int n_threads);                       // A x of all terms, into scratch; every thread does its share
  void up(int64_t tile0, int64_t tile1) const;    // rows [16 tile0, 16 tile1) of B times that, added to y

 private:
  struct Planned {
    LowRankTerm term;
    int64_t parts;      // A x is left as the sums of so many runs of chunks
    int64_t low;        // where its [parts, tokens, rank in whole tiles] begin in the scratch
    int64_t last_unit;  // of its work in down(), exclusive
  };
  void down_unit(const Planned& planned, int64_t unit) const;
  float* low(const Planned& planned) const { return reinterpret_cast<float*>(low_.data()) + planned.low; }
  const float* summed(const Planned& planned) const;

  std::vector<Planned> terms_;
  Scratch low_;
  int64_t floats_ = 0;
  int64_t units_ = 0;
  TileQueue queue_;
};

// x [T, inputs], y [T, outputs], dense.
void low_rank_add(const LowRank& pair, const float* x, int64_t T, float* y);

}  // namespace stoker
