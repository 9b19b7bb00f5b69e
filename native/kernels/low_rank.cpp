#include "kernels/low_rank.h"

#include <algorithm>

#include "kernels/dispatch.h"
#include "kernels/low_rank_ops.h"
#include "kernels/thread_pool.h"

namespace stoker {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kUnitRows = 4;    // rows of A in a unit of work: one panel, so that few ranks are shared by the threads too
constexpr int64_t kUnitTokens = 16; // rows of x that stay in L2 while all of A passes

int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

int64_t tile_bytes(const Matrix& b) {
  return (b.format == Format::bf16 ? (b.cols + 1) / 2 : b.cols) * 4 * kTileRows;
}

int64_t bytes(const LowRank& pair) {
  return pair.rank() * pair.inputs * (pair.a_is_bf16 ? 2 : 4) + pair.b.tiles() * tile_bytes(pair.b);
}

}  // namespace

const LowRankOps& low_rank_ops() {
#if defined(__x86_64__) || defined(_M_X64)
  const char* isa = kernels().isa;  // "avx512", "avx2" or "portable"
  if (isa[0] == 'a') return isa[3] == '5' ? kLowRankAvx512 : kLowRankAvx2;
#endif
  return kLowRankPortable;
}

void LowRankSum::clear() {
  terms_.clear();
  floats_ = units_ = 0;
}

void LowRankSum::add(const LowRankTerm& term) {
  units_ += pieces(term.pair->rank(), kUnitRows) * pieces(term.tokens, kUnitTokens);
  terms_.push_back({term, floats_, units_});
  floats_ += term.tokens * term.pair->rank();
}

void LowRankSum::prepare() {
  if (floats_ > 0) low_.reserve(floats_ * static_cast<int64_t>(sizeof(float)));
  next_.store(0, std::memory_order_relaxed);
}

void LowRankSum::down() {
  size_t i = 0;
  for (int64_t unit; (unit = next_.fetch_add(1, std::memory_order_relaxed)) < units_;) {
    while (unit >= terms_[i].last_unit) ++i;
    down_unit(terms_[i], unit - (i == 0 ? 0 : terms_[i - 1].last_unit));
  }
}

// The pieces of A for the same tokens are neighbours.
void LowRankSum::down_unit(const Planned& planned, int64_t unit) const {
  const LowRankTerm& term = planned.term;
  const LowRank& pair = *term.pair;
  const int64_t per_tokens = pieces(pair.rank(), kUnitRows);
  const int64_t row = unit % per_tokens * kUnitRows, token = unit / per_tokens * kUnitTokens;
  DownTask task;
  task.a = static_cast<const char*>(pair.a) + row * pair.inputs * (pair.a_is_bf16 ? 2 : 4), task.is_bf16 = pair.a_is_bf16;
  task.rows = std::min(kUnitRows, pair.rank() - row), task.inputs = pair.inputs;
  task.x = term.x + token * term.x_stride, task.x_stride = term.x_stride;
  task.tokens = std::min(kUnitTokens, term.tokens - token);
  task.low = low(planned) + token * pair.rank() + row, task.low_stride = pair.rank();
  low_rank_ops().down(task);
}

void LowRankSum::up(int thread, int n) {
  for (const Planned& planned : terms_) {
    const LowRankTerm& term = planned.term;
    const Matrix& b = term.pair->b;
    const int64_t first = b.tiles() * thread / n, last = b.tiles() * (thread + 1) / n;
    if (first == last) continue;
    UpTask task;
    task.b = static_cast<const char*>(b.codes) + first * tile_bytes(b), task.is_bf16 = b.format == Format::bf16;
    task.rows = std::min(last * kTileRows, b.rows) - first * kTileRows, task.rank = b.cols;
    task.low_stride = b.cols, task.y_stride = term.y_stride;
    for (int64_t token = 0; token < term.tokens; token += kUnitTokens) {
      task.low = low(planned) + token * b.cols, task.tokens = std::min(kUnitTokens, term.tokens - token);
      task.y = term.y + token * term.y_stride + first * kTileRows;
      low_rank_ops().up(task);
    }
  }
}

void low_rank_add(const LowRank& pair, const float* x, int64_t T, float* y) {
  if (T == 0) return;
  thread_local LowRankSum of_caller;
  LowRankSum& sum = of_caller;  // the caller's, not each worker's
  kernels();                    // an unusable STOKER_ISA throws here, not in a worker
  sum.clear();
  sum.add({&pair, T, x, pair.inputs, y, pair.outputs()});
  sum.prepare();
  const bool alone = bytes(pair) * pieces(T, 4) < kAloneBytes;
  pool().run([&](int thread, int n) {
    sum.down();
    pool().barrier();
    sum.up(thread, n);
  }, alone);
}

}  // namespace stoker
