#include "kernels/matmul.h"

#include <algorithm>
#include <cstring>

#include "kernels/dispatch.h"
#include "kernels/thread_pool.h"

namespace stoker {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTokenBlock = 64;        // accumulators of a block stay in L1, its encoded rows in L2
constexpr int64_t kFewColumns = 16384;      // about 4 microseconds of encoding

int64_t tile_bytes(const Matrix& m) {
  switch (m.format) {
    case Format::affine: return m.cols * m.bits / 8 * kTileRows + m.cols / m.group * 4 * kTileRows;
    case Format::bf16: return (m.cols + 1) / 2 * 4 * kTileRows;
    case Format::f32: return m.cols * 4 * kTileRows;
  }
  return 1;
}

void store(const Matrix& m, const float* acc, int64_t n_tokens, int64_t tile, float* out, int64_t out_stride) {
  const int64_t row0 = tile * kTileRows, rows = std::min(kTileRows, m.rows - row0);
  for (int64_t t = 0; t < n_tokens; ++t) {
    float* to = out + t * out_stride + row0;
    const float* from = acc + t * kTileRows;
    if (m.row_bias) {
      for (int64_t r = 0; r < rows; ++r) to[r] = from[r] + m.row_bias[row0 + r];
    } else {
      std::memcpy(to, from, static_cast<size_t>(rows) * sizeof(float));
    }
  }
}

}  // namespace

// Runs are long at first, because a thread that starts a new stream of weights waits for the memory, and shorten to one
// unit, so that all threads end together.
bool take_run(TileQueue& queue, int64_t units, int n_threads, int64_t& first, int64_t& last) {
  first = queue.next.load(std::memory_order_relaxed);
  do {
    if (first >= units) return false;
    last = first + std::max<int64_t>(1, (units - first) / (2 * n_threads));
  } while (!queue.next.compare_exchange_weak(first, last, std::memory_order_relaxed));
  return true;
}

int64_t multiply_work(const Matrix& m, int64_t T) {
  return m.tiles() * tile_bytes(m) * (T + 3) / 4;  // four more rows cost as much arithmetic as one costs reading
}

void multiply_tiles(const Matrix& m, const EncodedRows& x, int64_t token0, int64_t token1, int64_t tile0, int64_t tile1,
                    float* out, int64_t out_stride) {
  alignas(64) float acc[kTokenBlock * kTileRows];
  const TileKernel kernel = kernels().tile_kernel(m);
  for (int64_t t = token0; t < token1; t += kTokenBlock) {
    const int64_t n = std::min(kTokenBlock, token1 - t);
    for (int64_t tile = tile0; tile < tile1; ++tile) {
      kernel(m, x.at(0, t), x.unit_stride(), n, tile, acc);
      store(m, acc, n, tile, out + t * out_stride, out_stride);
    }
  }
}

void multiply_in_region(const Matrix& m, const EncodedRows& x, float* out, int64_t out_stride, TileQueue& queue) {
  const int n_threads = pool().size();
  for (int64_t first, last; take_run(queue, m.tiles(), n_threads, first, last);) {
    multiply_tiles(m, x, 0, x.tokens, first, last, out, out_stride);
  }
}

void matmul(const Matrix& m, const float* x, int64_t T, float* out) {
  if (T == 0 || m.rows == 0) return;
  thread_local Activations activations;
  Activations& acts = activations;  // the caller's, not each worker's
  acts.prepare(encoding_of(m), T, m.cols);
  kernels();  // an unusable STOKER_ISA throws here, not in a worker
  const bool alone = multiply_work(m, T) < kAloneBytes;
  TileQueue queue;
  const auto multiply = [&] { multiply_in_region(m, acts.rows(), out, m.rows, queue); };
  // A few rows are encoded before the workers have woken up; then nobody waits for them.
  if (T * m.cols <= kFewColumns) {
    acts.encode(x, m.cols, 0, 1);
    pool().share([&](int, int) { multiply(); }, alone);
    return;
  }
  pool().run([&](int thread, int n_threads) {
    acts.encode(x, m.cols, thread, n_threads);
    pool().barrier();
    multiply();
  }, alone);
}

}  // namespace stoker
