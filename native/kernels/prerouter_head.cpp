#include "kernels/prerouter_head.h"

#include <algorithm>
#include <cmath>

#include "kernels/activations.h"
#include "kernels/dispatch.h"
#include "kernels/half.h"
#include "kernels/matmul.h"
#include "kernels/thread_pool.h"
#include "kernels/topk.h"

namespace stoker {
namespace {

constexpr int64_t kTokens = 64;    // at once: bounds what is kept between the two products
constexpr int64_t kTileRows = 16;
constexpr int64_t kColumns = 128;  // of the table, summed at once

struct Columns {
  int64_t first, last;
};

Columns columns_of(const Matrix& m, int64_t tile0, int64_t tile1) {
  return {tile0 * kTileRows, std::min(tile1 * kTileRows, m.rows)};
}

float gelu(float x) { return 0.5f * x * (1.0f + std::erf(x * 0.70710678f)); }

void add_row(const PrerouterHead& head, int64_t row, Columns c, float* sum) {
  const int64_t at = row * head.dense.rows;
  if (head.table_is_bf16) {
    const uint16_t* values = static_cast<const uint16_t*>(head.table) + at;
    for (int64_t i = c.first; i < c.last; ++i) sum[i - c.first] += bf16_to_float(values[i]);
  } else {
    const float* values = static_cast<const float*>(head.table) + at;
    for (int64_t i = c.first; i < c.last; ++i) sum[i - c.first] += values[i];
  }
}

// Adds the experts' part to some columns of a token's `both`; always in the order of the experts.
void add_experts(const PrerouterHead& head, const int64_t* used, const int64_t* before, int64_t K, Columns c, float* both) {
  for (int64_t first = c.first; first < c.last; first += kColumns) {
    const Columns part{first, std::min(first + kColumns, c.last)};
    float sum[kColumns] = {};
    for (int64_t k = 0; k < K; ++k) {
      if (used[k] >= 0) add_row(head, used[k], part, sum);
    }
    for (int64_t k = 0; k < K; ++k) {
      if (before[k] >= 0) add_row(head, head.experts() + before[k], part, sum);
    }
    for (int64_t i = part.first; i < part.last; ++i) both[i] += sum[i - part.first];
  }
}

// A part of the first product: both[t, columns of the tiles], with gelu where they are the hidden layer's.
void first_part(const PrerouterHead& head, const HeadTokens& tokens, const EncodedRows& x, int64_t tile0, int64_t tile1, float* both) {
  const int64_t width = head.dense.rows;
  const Columns c = columns_of(head.dense, tile0, tile1);
  multiply_tiles(head.dense, x, 0, tokens.T, tile0, tile1, both, width);
  for (int64_t t = 0; t < tokens.T; ++t) {
    float* row = both + t * width;
    add_experts(head, tokens.used + t * tokens.K, tokens.before + t * tokens.K, tokens.K, c, row);
    for (int64_t i = c.first; i < std::min(c.last, head.inner()); ++i) row[i] = gelu(row[i]);
  }
}

void second_part(const PrerouterHead& head, int64_t T, const EncodedRows& x, int64_t tile0, int64_t tile1, const float* both, float* logits) {
  const int64_t E = head.experts(), width = head.dense.rows;
  const Columns c = columns_of(head.out, tile0, tile1);
  multiply_tiles(head.out, x, 0, T, tile0, tile1, logits, E);
  for (int64_t t = 0; t < T; ++t) {
    const float* linear = both + t * width + head.inner();
    for (int64_t i = c.first; i < c.last; ++i) logits[t * E + i] += linear[i];
  }
}

// Runs part(tile0, tile1) over all tiles of m, on more threads than the caller's where T tokens are worth waking them.
template <class Part>
void over_tiles(const Matrix& m, int64_t T, Part&& part) {
  TileQueue queue;
  pool().share([&](int, int n_threads) {
    for (int64_t tile0, tile1; take_run(queue, m.tiles(), n_threads, tile0, tile1);) part(tile0, tile1);
  }, multiply_work(m, T) < kAloneBytes);
}

// At most kTokens of them. Encoding them takes microseconds, so the caller does it while the others sleep.
void block_logits(const PrerouterHead& head, const HeadTokens& tokens, float* logits) {
  thread_local Activations hidden, inner;
  thread_local Scratch between;
  const int64_t T = tokens.T, D = head.dense.cols, width = head.dense.rows;
  float* both = reinterpret_cast<float*>(between.reserve(T * width * static_cast<int64_t>(sizeof(float))));
  hidden.prepare(encoding_of(head.dense), T, D);
  hidden.encode(tokens.hidden, D, 0, 1);
  const EncodedRows x = hidden.rows();  // a worker's own `hidden` is another one
  over_tiles(head.dense, T, [&](int64_t tile0, int64_t tile1) { first_part(head, tokens, x, tile0, tile1, both); });
  inner.prepare(encoding_of(head.out), T, head.inner());
  inner.encode(both, width, 0, 1);
  const EncodedRows h = inner.rows();
  over_tiles(head.out, T, [&](int64_t tile0, int64_t tile1) { second_part(head, T, h, tile0, tile1, both, logits); });
}

}  // namespace

void prerouter_logits(const PrerouterHead& head, const HeadTokens& tokens, float* logits) {
  kernels();  // an unusable STOKER_ISA throws here, not in a worker
  for (int64_t t = 0; t < tokens.T; t += kTokens) {
    const HeadTokens block{tokens.hidden + t * head.dense.cols, tokens.used + t * tokens.K, tokens.before + t * tokens.K,
                           std::min(kTokens, tokens.T - t), tokens.K};
    block_logits(head, block, logits + t * head.experts());
  }
}

void prerouter_route(const PrerouterHead& head, const HeadTokens& tokens, int64_t k, bool renormalise, float* weights,
                     int64_t* experts) {
  thread_local Scratch scratch;
  const int64_t E = head.experts();
  float* logits = reinterpret_cast<float*>(scratch.reserve(tokens.T * E * static_cast<int64_t>(sizeof(float))));
  prerouter_logits(head, tokens, logits);
  topk_softmax(logits, tokens.T, E, k, renormalise, weights, experts);
}

}  // namespace stoker
