// y[t, :] += B (A x[t, :]): what a low-rank adapter adds beside a matrix that it leaves alone. Sums are f32.
// A row of y depends on its rows of x and y and on the pair alone, bit for bit, whatever else is in the call and however
// many threads there are: threads share rows of A and rows of B, never a sum. Instruction sets differ in the last bits.
// The caller owns pairs and rows. Must not know: adapters' names, attention, Python.
//
// Inside a larger region:  sum.clear();  sum.add(...) for each term;  sum.prepare() before it; then, on every thread,
//   sum.down();  pool.barrier();  sum.up(thread, n) when y is complete;  pool.barrier() before y is read.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels/activations.h"
#include "kernels/matrix.h"

namespace stoker {

struct LowRank {
  const void* a = nullptr;  // [rank, inputs], rows one after the other, bf16 or f32
  bool a_is_bf16 = false;
  int64_t inputs = 0;
  Matrix b;                 // [outputs, rank], bf16 or f32, tile16

  int64_t rank() const { return b.cols; }
  int64_t outputs() const { return b.rows; }
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

// Terms that are added in the same two phases. No two of them may share a row of y.
class LowRankSum {
 public:
  void clear();
  void add(const LowRankTerm& term);
  void prepare();
  bool empty() const { return terms_.empty(); }
  void down();                  // A x of all terms, into scratch
  void up(int thread, int n);   // B times that, added to y

 private:
  struct Planned {
    LowRankTerm term;
    int64_t low;        // where its [tokens, rank] begin in the scratch
    int64_t last_unit;  // of its work in down(), exclusive
  };
  void down_unit(const Planned& planned, int64_t unit) const;
  float* low(const Planned& planned) const { return reinterpret_cast<float*>(low_.data()) + planned.low; }

  std::vector<Planned> terms_;
  Scratch low_;
  int64_t floats_ = 0;
  int64_t units_ = 0;
  alignas(64) std::atomic<int64_t> next_{0};
};

// x [T, inputs], y [T, outputs], dense.
void low_rank_add(const LowRank& pair, const float* x, int64_t T, float* y);

}  // namespace stoker
