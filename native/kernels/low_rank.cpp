#include "kernels/low_rank.h"

#include <algorithm>

#include "kernels/dispatch.h"
#include "kernels/low_rank_ops.h"
#include "kernels/thread_pool.h"

namespace stoker {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kChunk = 256;      // columns of A that are summed by themselves
constexpr int64_t kUnitTokens = 16;  // rows of x that stay in L2 while all of A passes

int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }
int64_t column_bytes(const Matrix& m) { return kTileRows * (m.format == Format::bf16 ? 2 : 4); }
int64_t tile_bytes(const Matrix& m) { return (m.format == Format::bf16 ? m.cols + m.cols % 2 : m.cols) * column_bytes(m); }
int64_t bytes(const LowRank& pair) { return pair.a.tiles() * tile_bytes(pair.a) + pair.b.tiles() * tile_bytes(pair.b); }
int64_t low_stride(const LowRank& pair) { return pair.a.tiles() * kTileRows; }

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

// Few tokens: the threads share chunks, and up() adds their sums. Many: they share tokens, and each adds as it goes.
void LowRankSum::add(const LowRankTerm& term) {
  const int64_t parts = term.tokens <= kUnitTokens ? pieces(term.pair->a.cols, kChunk) : 1;
  units_ += pieces(term.tokens, kUnitTokens) * term.pair->a.tiles() * parts;
  terms_.push_back({term, parts, floats_, units_});
  floats_ += parts * term.tokens * low_stride(*term.pair);
}

void LowRankSum::prepare() {
  if (floats_ > 0) low_.reserve(floats_ * static_cast<int64_t>(sizeof(float)));
  queue_.next.store(0, std::memory_order_relaxed);
}

void LowRankSum::down(int n_threads) {
  size_t i = 0;
  for (int64_t unit, last; take_run(queue_, units_, n_threads, unit, last);) {
    for (; unit < last; ++unit) {
      while (unit >= terms_[i].last_unit) ++i;
      down_unit(terms_[i], unit - (i == 0 ? 0 : terms_[i - 1].last_unit));
    }
  }
}

// Units are [blocks of tokens, tiles of A, parts].
void LowRankSum::down_unit(const Planned& planned, int64_t unit) const {
  const LowRankTerm& term = planned.term;
  const Matrix& a = term.pair->a;
  const int64_t part = unit % planned.parts, tile = unit / planned.parts % a.tiles();
  const int64_t token = unit / planned.parts / a.tiles() * kUnitTokens, chunks = pieces(a.cols, kChunk);
  DownTask task;
  task.is_bf16 = a.format == Format::bf16;
  task.x_stride = term.x_stride, task.tokens = std::min(kUnitTokens, term.tokens - token);
  task.low_stride = low_stride(*term.pair);
  task.low = low(planned) + (part * term.tokens + token) * task.low_stride + tile * kTileRows;
  const int64_t first = part * chunks / planned.parts, last = (part + 1) * chunks / planned.parts;
  for (int64_t chunk = first; chunk < last; ++chunk) {
    const int64_t column = chunk * kChunk;
    task.a = static_cast<const char*>(a.codes) + tile * tile_bytes(a) + column * column_bytes(a);
    task.cols = std::min(kChunk, a.cols - column), task.add = chunk != first;
    task.x = term.x + token * term.x_stride + column;
    low_rank_ops().down(task);
  }
}

// A x [tokens, rank in whole tiles]. Every thread adds the few parts for itself rather than wait for another.
const float* LowRankSum::summed(const Planned& planned) const {
  if (planned.parts == 1) return low(planned);
  thread_local std::vector<float> sums;
  const int64_t n = planned.term.tokens * low_stride(*planned.term.pair);
  sums.assign(low(planned), low(planned) + n);
  for (int64_t part = 1; part < planned.parts; ++part) {
    const float* more = low(planned) + part * n;
    for (int64_t i = 0; i < n; ++i) sums[static_cast<size_t>(i)] += more[i];
  }
  return sums.data();
}

void LowRankSum::up(int64_t tile0, int64_t tile1) const {
  if (tile0 >= tile1) return;
  for (const Planned& planned : terms_) {
    const LowRankTerm& term = planned.term;
    const Matrix& b = term.pair->b;
    const float* low = summed(planned);
    UpTask task;
    task.b = static_cast<const char*>(b.codes) + tile0 * tile_bytes(b), task.is_bf16 = b.format == Format::bf16;
    task.rows = std::min(tile1 * kTileRows, b.rows) - tile0 * kTileRows, task.rank = b.cols;
    task.low_stride = low_stride(*term.pair), task.y_stride = term.y_stride;
    for (int64_t token = 0; token < term.tokens; token += kUnitTokens) {
      task.low = low + token * task.low_stride, task.tokens = std::min(kUnitTokens, term.tokens - token);
      task.y = term.y + token * term.y_stride + tile0 * kTileRows;
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
  sum.add({&pair, T, x, pair.a.cols, y, pair.b.rows});
  sum.prepare();
  const bool alone = bytes(pair) * pieces(T, 4) < kAloneBytes;
  pool().run([&](int thread, int n) {
    sum.down(n);
    pool().barrier();
    sum.up(pair.b.tiles() * thread / n, pair.b.tiles() * (thread + 1) / n);
  }, alone);
}

}  // namespace stoker
