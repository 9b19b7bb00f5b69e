// The products of a low-rank pair for any vector type V. Included by low_rank_<isa>.cpp only, inside an anonymous namespace.
// Tokens of a panel share the weights; each (row, token) has sums of its own, in an order that no panel changes: column c
// goes to sum c % 4, and the sums are added in pairs.
#pragma once

constexpr int kTile = 16;
constexpr int kSums = 4;
constexpr int kAhead = 4096;  // bytes fetched ahead: hides the memory's latency

template <class V>
struct Lanes {
  static constexpr int count = kTile / V::width;
  V v[count];
};

// The weights of column c of a tile; odd: whether c is.
template <class V, bool kBf16>
inline Lanes<V> column(const char* tile, int64_t c, bool odd) {
  Lanes<V> lanes;
  for (int i = 0; i < Lanes<V>::count; ++i) {
    if constexpr (kBf16) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(tile) + c / 2 * kTile + i * V::width;
      lanes.v[i] = odd ? V::load_high(words) : V::load_low(words);
    } else {
      lanes.v[i] = V::load(reinterpret_cast<const float*>(tile) + c * kTile + i * V::width);
    }
  }
  return lanes;
}

template <class V, bool kBf16, int kTokens>
inline void add_column(const char* tile, int64_t c, int sum, const float* x, int64_t x_stride, Lanes<V> (&sums)[kTokens][kSums]) {
  const Lanes<V> weights = column<V, kBf16>(tile, c, sum % 2 == 1);
  for (int t = 0; t < kTokens; ++t) {
    const V value = V::set1(x[t * x_stride + c]);
    for (int i = 0; i < Lanes<V>::count; ++i) sums[t][sum].v[i] = V::fma(weights.v[i], value, sums[t][sum].v[i]);
  }
}

// result[t] = sum over c in [0, cols) of tile[c] * x[t, c]
template <class V, bool kBf16, int kTokens>
inline void sum_tile(const char* tile, int64_t cols, const float* x, int64_t x_stride, Lanes<V> (&result)[kTokens]) {
  Lanes<V> sums[kTokens][kSums];
  for (auto& of_token : sums) {
    for (Lanes<V>& lanes : of_token) {
      for (V& v : lanes.v) v = V::set1(0.0f);
    }
  }
  constexpr int kBytes = kSums * kTile * (kBf16 ? 2 : 4);
  int64_t c = 0;
  for (; c + kSums <= cols; c += kSums) {
    for (int line = 0; line < kBytes; line += 64) __builtin_prefetch(tile + c / kSums * kBytes + line + kAhead);
    for (int sum = 0; sum < kSums; ++sum) add_column<V, kBf16, kTokens>(tile, c + sum, sum, x, x_stride, sums);
  }
  for (int sum = 0; c < cols; ++c, ++sum) add_column<V, kBf16, kTokens>(tile, c, sum, x, x_stride, sums);
  for (int t = 0; t < kTokens; ++t) {
    for (int i = 0; i < Lanes<V>::count; ++i) {
      result[t].v[i] = V::add(V::add(sums[t][0].v[i], sums[t][1].v[i]), V::add(sums[t][2].v[i], sums[t][3].v[i]));
    }
  }
}

template <class V>
inline void add_to(float* y, const Lanes<V>& lanes, int64_t rows) {
  if (rows >= kTile) {
    for (int i = 0; i < Lanes<V>::count; ++i) V::add(V::load(y + i * V::width), lanes.v[i]).store(y + i * V::width);
    return;
  }
  float last[kTile];
  for (int i = 0; i < Lanes<V>::count; ++i) lanes.v[i].store(last + i * V::width);
  for (int64_t i = 0; i < rows; ++i) y[i] += last[i];
}

template <class V, bool kBf16, int kTokens>
inline void down_panel(const DownTask& task, int64_t token) {
  Lanes<V> sums[kTokens];
  sum_tile<V, kBf16, kTokens>(static_cast<const char*>(task.a), task.cols, task.x + token * task.x_stride, task.x_stride, sums);
  for (int t = 0; t < kTokens; ++t) {
    float* low = task.low + (token + t) * task.low_stride;
    if (task.add) {
      add_to(low, sums[t], kTile);
    } else {
      for (int i = 0; i < Lanes<V>::count; ++i) sums[t].v[i].store(low + i * V::width);
    }
  }
}

template <class V, bool kBf16>
inline void down_tile(const DownTask& task) {
  int64_t t = 0;
  for (; t + V::tokens <= task.tokens; t += V::tokens) down_panel<V, kBf16, V::tokens>(task, t);
  for (; t < task.tokens; ++t) down_panel<V, kBf16, 1>(task, t);
}

template <class V>
void down(const DownTask& task) {
  task.is_bf16 ? down_tile<V, true>(task) : down_tile<V, false>(task);
}

template <class V, bool kBf16, int kTokens>
inline void up_panel(const UpTask& task, const char* tile, int64_t row, int64_t token) {
  Lanes<V> sums[kTokens];
  sum_tile<V, kBf16, kTokens>(tile, task.rank, task.low + token * task.low_stride, task.low_stride, sums);
  for (int t = 0; t < kTokens; ++t) add_to(task.y + (token + t) * task.y_stride + row, sums[t], task.rows - row);
}

template <class V, bool kBf16>
inline void up_tiles(const UpTask& task) {
  const int64_t tile_bytes = kBf16 ? (task.rank + 1) / 2 * 4 * kTile : task.rank * 4 * kTile;
  const char* tile = static_cast<const char*>(task.b);
  for (int64_t row = 0; row < task.rows; row += kTile, tile += tile_bytes) {
    int64_t t = 0;
    for (; t + V::tokens <= task.tokens; t += V::tokens) up_panel<V, kBf16, V::tokens>(task, tile, row, t);
    for (; t < task.tokens; ++t) up_panel<V, kBf16, 1>(task, tile, row, t);
  }
}

template <class V>
void up(const UpTask& task) {
  task.is_bf16 ? up_tiles<V, true>(task) : up_tiles<V, false>(task);
}
