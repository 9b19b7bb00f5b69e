// The products of a low-rank pair for any vector type V. Included by low_rank_<isa>.cpp only, inside an anonymous namespace.
// Panels of rows and tokens share loads; each (row, token) has sums of its own, in an order that no panel changes.
#pragma once

template <class V, bool kBf16>
inline V load_weights(const void* a, int64_t i) {
  if constexpr (kBf16) {
    return V::load_bf16(static_cast<const uint16_t*>(a) + i);
  } else {
    return V::load(static_cast<const float*>(a) + i);
  }
}

template <bool kBf16>
inline float weight_at(const void* a, int64_t i) {
  if constexpr (kBf16) {
    return __builtin_bit_cast(float, static_cast<uint32_t>(static_cast<const uint16_t*>(a)[i]) << 16);
  } else {
    return static_cast<const float*>(a)[i];
  }
}

// Even and odd vectors of columns have a sum each; then the columns that fill no two vectors, one by one.
template <class V, bool kBf16, int kRows, int kTokens>
inline void down_panel(const DownTask& task, int64_t row, int64_t token) {
  const float* x = task.x + token * task.x_stride;
  V sums[kRows][kTokens][2];
  for (auto& of_row : sums) {
    for (auto& of_token : of_row) of_token[0] = of_token[1] = V::set1(0.0f);
  }
  int64_t c = 0;
  for (; c + 2 * V::width <= task.inputs; c += 2 * V::width) {
    for (int half = 0; half < 2; ++half) {
      const int64_t at = c + half * V::width;
      V columns[kTokens];
      for (int t = 0; t < kTokens; ++t) columns[t] = V::load(x + t * task.x_stride + at);
      for (int r = 0; r < kRows; ++r) {
        const V weights = load_weights<V, kBf16>(task.a, (row + r) * task.inputs + at);
        for (int t = 0; t < kTokens; ++t) sums[r][t][half] = V::fma(weights, columns[t], sums[r][t][half]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kTokens; ++t) {
      float sum = V::add(sums[r][t][0], sums[r][t][1]).reduce_add();
      for (int64_t i = c; i < task.inputs; ++i) {
        sum = V::fma(weight_at<kBf16>(task.a, (row + r) * task.inputs + i), x[t * task.x_stride + i], sum);
      }
      task.low[(token + t) * task.low_stride + row + r] = sum;
    }
  }
}

template <class V, bool kBf16, int kRows>
inline void down_rows(const DownTask& task, int64_t row) {
  int64_t t = 0;
  for (; t + V::down_tokens <= task.tokens; t += V::down_tokens) down_panel<V, kBf16, kRows, V::down_tokens>(task, row, t);
  for (; t < task.tokens; ++t) down_panel<V, kBf16, kRows, 1>(task, row, t);
}

template <class V>
void down(const DownTask& task) {
  int64_t row = 0;
  for (; row + 4 <= task.rows; row += 4) {
    if (task.is_bf16) {
      down_rows<V, true, 4>(task, row);
    } else {
      down_rows<V, false, 4>(task, row);
    }
  }
  for (; row < task.rows; ++row) {
    if (task.is_bf16) {
      down_rows<V, true, 1>(task, row);
    } else {
      down_rows<V, false, 1>(task, row);
    }
  }
}

constexpr int kTile = 16;

template <class V, int kTokens>
inline void multiply_add(V weights, const float* low, int64_t low_stride, int lane, V (&sums)[kTokens][kTile / V::width]) {
  for (int t = 0; t < kTokens; ++t) sums[t][lane] = V::fma(weights, V::set1(low[t * low_stride]), sums[t][lane]);
}

// 16 rows of B: the ranks in order.
template <class V, bool kBf16, int kTokens>
inline void sum_tile(const UpTask& task, const char* tile, const float* low, V (&sums)[kTokens][kTile / V::width]) {
  constexpr int kLanes = kTile / V::width;
  for (auto& of_token : sums) {
    for (V& sum : of_token) sum = V::set1(0.0f);
  }
  if constexpr (kBf16) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(tile);
    int64_t r = 0;
    for (; r + 2 <= task.rank; r += 2, words += kTile) {
      for (int i = 0; i < kLanes; ++i) multiply_add<V, kTokens>(V::load_low(words + i * V::width), low + r, task.low_stride, i, sums);
      for (int i = 0; i < kLanes; ++i) multiply_add<V, kTokens>(V::load_high(words + i * V::width), low + r + 1, task.low_stride, i, sums);
    }
    if (r == task.rank) return;
    for (int i = 0; i < kLanes; ++i) multiply_add<V, kTokens>(V::load_low(words + i * V::width), low + r, task.low_stride, i, sums);
  } else {
    const float* weights = reinterpret_cast<const float*>(tile);
    for (int64_t r = 0; r < task.rank; ++r, weights += kTile) {
      for (int i = 0; i < kLanes; ++i) multiply_add<V, kTokens>(V::load(weights + i * V::width), low + r, task.low_stride, i, sums);
    }
  }
}

template <class V, bool kBf16, int kTokens>
inline void up_panel(const UpTask& task, const char* tile, int64_t row, int64_t token) {
  constexpr int kLanes = kTile / V::width;
  V sums[kTokens][kLanes];
  sum_tile<V, kBf16, kTokens>(task, tile, task.low + token * task.low_stride, sums);
  for (int t = 0; t < kTokens; ++t) {
    float* y = task.y + (token + t) * task.y_stride + row;
    if (row + kTile <= task.rows) {
      for (int i = 0; i < kLanes; ++i) V::add(V::load(y + i * V::width), sums[t][i]).store(y + i * V::width);
    } else {
      float last[kTile];
      for (int i = 0; i < kLanes; ++i) sums[t][i].store(last + i * V::width);
      for (int64_t i = 0; i < task.rows - row; ++i) y[i] += last[i];
    }
  }
}

template <class V, bool kBf16>
inline void up_tiles(const UpTask& task) {
  const int64_t tile_bytes = kBf16 ? (task.rank + 1) / 2 * 4 * kTile : task.rank * 4 * kTile;
  const char* tile = static_cast<const char*>(task.b);
  for (int64_t row = 0; row < task.rows; row += kTile, tile += tile_bytes) {
    int64_t t = 0;
    for (; t + V::up_tokens <= task.tokens; t += V::up_tokens) up_panel<V, kBf16, V::up_tokens>(task, tile, row, t);
    for (; t < task.tokens; ++t) up_panel<V, kBf16, 1>(task, tile, row, t);
  }
}

template <class V>
void up(const UpTask& task) {
  if (task.is_bf16) {
    up_tiles<V, true>(task);
  } else {
    up_tiles<V, false>(task);
  }
}
