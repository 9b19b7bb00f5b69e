// out[t, r] = sum over c of x[t, c] * w[r, c], for quantised w. Knows tiles and threads; the arithmetic is in the tile kernels.
// A row of out depends on its row of x and on w alone, bit for bit, whatever T and the number of threads.
//
// Inside a larger region:  acts.prepare(encoding_of(m), T, m.cols) before it; then, on every thread,
//   acts.encode(x, stride, thread, n);  pool.barrier();  multiply_in_region(m, acts.rows(), out, stride, queue);
#pragma once
#include <atomic>
#include <cstdint>

#include "kernels/activations.h"
#include "kernels/matrix.h"

namespace stoker {

// Hands out runs of tiles to the threads of one multiplication. One per multiplication and region; 0 at the start.
struct TileQueue {
  alignas(64) std::atomic<int64_t> next{0};
};

// Takes the next run of tiles; false when none is left. Runs are long at first, because a thread that starts a new stream
// of weights waits for the memory, and shorten to one tile, so that all threads end together.
bool take_run(TileQueue& queue, int64_t tiles, int n_threads, int64_t& first, int64_t& last);

// Weight bytes of m, weighed by the arithmetic of T rows: to be compared with kAloneBytes.
int64_t multiply_work(const Matrix& m, int64_t T);

// x: [T, cols] f32; out: [T, rows] f32; both dense.
void matmul(const Matrix& m, const float* x, int64_t T, float* out);

// Every thread of the region calls it with the same arguments. out rows are `out_stride` floats apart.
void multiply_in_region(const Matrix& m, const EncodedRows& x, float* out, int64_t out_stride, TileQueue& queue);

// Tiles [tile0, tile1) for tokens [token0, token1), on the calling thread alone.
void multiply_tiles(const Matrix& m, const EncodedRows& x, int64_t token0, int64_t token1, int64_t tile0, int64_t tile1,
                    float* out, int64_t out_stride);

}  // namespace stoker
