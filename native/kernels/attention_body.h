// Attention over paged half-precision keys and values, written once for any vector type V (width V::width floats).
// For each query row: blocks of 64 keys in ascending order, scores summed over head_dim ascending, an online softmax per
// block, values added in ascending key order. Rows never mix, so tiles, threads and batch leave no mark on a result.
// Included by attention_<isa>.cpp only, inside an anonymous namespace; uses no library templates (they would be shared
// between instruction sets by the linker).
#pragma once

#include "kernels/attention_rows.h"

constexpr int kPage = kKvBlockTokens;  // keys that are softened together

// What a product works on: c[q][column] += sum over k in [k0, k1), ascending, of a[q][k] * b[k * ldb + column], b in half
// precision. `ahead` is what will be read next; it is fetched at the rate at which b is read.
struct Product {
  const float* const* a;
  int64_t k0, k1;
  const uint16_t* b;
  int64_t ldb;
  float* const* c;
  int64_t columns;
  bool fresh;  // c starts at zero
  const uint16_t* ahead;
};

template <class V, int NQ, int NV>
inline void panel(const Product& p, int64_t column) {
  constexpr int wide = NV * V::width;
  V acc[NQ][NV];
  for (int q = 0; q < NQ; ++q)
    for (int n = 0; n < NV; ++n) acc[q][n] = p.fresh ? V::set1(0.0f) : V::load(p.c[q] + column + n * V::width);
  const uint16_t* b = p.b + p.k0 * p.ldb + column;
  const uint16_t* ahead = p.ahead + (p.k1 - p.k0) * column;
  const float* a[NQ];
  for (int q = 0; q < NQ; ++q) a[q] = p.a[q];
  for (int64_t k = p.k0; k < p.k1; ++k, b += p.ldb, ahead += wide) {
    for (int n = 0; n < wide; n += 32) __builtin_prefetch(ahead + n);
    V x[NV];
    for (int n = 0; n < NV; ++n) x[n] = V::load_half(b + n * V::width);
    for (int q = 0; q < NQ; ++q) {
      const V factor = V::set1(a[q][k]);
      for (int n = 0; n < NV; ++n) acc[q][n] = V::fma(factor, x[n], acc[q][n]);
    }
  }
  for (int q = 0; q < NQ; ++q)
    for (int n = 0; n < NV; ++n) acc[q][n].store(p.c[q] + column + n * V::width);
}

// Wide panels, then narrow ones, then one column at a time.
template <class V, int NQ>
inline void multiply(const Product& p) {
  constexpr int wide = V::panel_vectors * V::width;
  int64_t n = 0;
  for (; n + wide <= p.columns; n += wide) panel<V, NQ, V::panel_vectors>(p, n);
  for (; n + V::width <= p.columns; n += V::width) panel<V, NQ, 1>(p, n);
  for (; n < p.columns; ++n) panel<Scalar, NQ, 1>(p, n);
}

template <class V>
inline void multiply(int rows, const Product& p) {
  switch (rows) {
    case 1: return multiply<V, 1>(p);
    case 2: return multiply<V, 2>(p);
    case 3: return multiply<V, 3>(p);
    case 4: return multiply<V, 4>(p);
    case 5: return multiply<V, 5>(p);
    case 6: return multiply<V, 6>(p);
    case 7: return multiply<V, 7>(p);
    default: return multiply<V, 8>(p);
  }
}

struct Row {
  const float* q;   // [head_dim]
  float* out;       // [head_dim], the running sum of values
  float* p;         // [64] scores, then probabilities, of the block at hand
  int64_t lo, hi;   // positions seen: [lo, hi)
  int64_t a, b;     // the part of them in the block at hand, relative to it; a >= b: none
  float top, sum;   // running maximum and sum of exponentials
};

// One block of the online softmax: p becomes exp(score - top), the earlier sums are rescaled to the new maximum.
// A NaN may vanish from the maximum but not from p, so it reaches the sum and every component of the row.
template <class V>
inline void soften(Row& row, int64_t head_dim) {
  for (int64_t j = 0; j < row.a; ++j) row.p[j] = -INFINITY;
  for (int64_t j = row.b; j < kPage; ++j) row.p[j] = -INFINITY;
  V tops = V::load(row.p);
  for (int j = V::width; j < kPage; j += V::width) tops = V::max(tops, V::load(row.p + j));
  const float block_top = tops.reduce_max();
  const float top = row.top > block_top ? row.top : block_top;
  V sum = V::set1(0.0f);
  for (int j = 0; j < kPage; j += V::width) {
    const V p = exp_nonpositive(V::add(V::load(row.p + j), V::set1(-top)));
    p.store(row.p + j);
    sum = V::add(sum, p);
  }
  const float fade = exp_nonpositive(Scalar{row.top - top}).v;
  row.sum = Scalar::fma(Scalar{row.sum}, Scalar{fade}, Scalar{sum.reduce_add()}).v;
  row.top = top;
  if (fade == 1.0f) return;  // x * 1 is x: the same bits, less work
  scale_row<V>(row.out, fade, row.out, head_dim);
}

// Adds p * values for up to V::panel_rows rows. Where their key ranges differ, the shared middle goes together and each row's own
// ends alone: every row still adds its keys in ascending order, and none reads a key that it may not see.
template <class V>
inline void add_values(Row* const* rows, int n, const uint16_t* values, int64_t head_dim, const uint16_t* ahead) {
  const float* p[V::panel_rows];
  float* out[V::panel_rows];
  int64_t lo = 0, hi = kPage;
  for (int i = 0; i < n; ++i) {
    p[i] = rows[i]->p, out[i] = rows[i]->out;
    lo = rows[i]->a > lo ? rows[i]->a : lo;
    hi = rows[i]->b < hi ? rows[i]->b : hi;
  }
  const auto alone = [&](int i, int64_t from, int64_t to) {
    if (from < to) multiply<V, 1>({p + i, from, to, values, head_dim, out + i, head_dim, false, values});
  };
  if (lo >= hi) {
    for (int i = 0; i < n; ++i) alone(i, rows[i]->a, rows[i]->b);
    return;
  }
  for (int i = 0; i < n; ++i) alone(i, rows[i]->a, lo);
  multiply<V>(n, {p, lo, hi, values, head_dim, out, head_dim, false, ahead});
  for (int i = 0; i < n; ++i) alone(i, hi, rows[i]->b);
}

// The first rows fetch what comes next (values, then the next block's keys) while they compute.
template <class V>
inline void attend_block(Row* const* active, int n, const uint16_t* keys, const uint16_t* values, const uint16_t* next_keys,
                         int64_t head_dim) {
  const int groups = (n + V::panel_rows - 1) / V::panel_rows, size = (n + groups - 1) / groups;
  for (int first = 0; first < n; first += size) {
    const int count = n - first < size ? n - first : size;
    const float* q[V::panel_rows];
    float* p[V::panel_rows];
    for (int i = 0; i < count; ++i) q[i] = active[first + i]->q, p[i] = active[first + i]->p;
    multiply<V>(count, {q, 0, head_dim, keys, kPage, p, kPage, true, first == 0 ? values : keys});
  }
  for (int i = 0; i < n; ++i) soften<V>(*active[i], head_dim);
  for (int first = 0; first < n; first += size) {
    add_values<V>(active + first, n - first < size ? n - first : size, values, head_dim, first == 0 ? next_keys : values);
  }
}

inline void open_rows(const AttendCall& call, const AttendTask& task, Row* rows, float* p) {
  const int64_t head_dim = call.kv.head_dim;
  Row* row = rows;
  for (int64_t token = task.token; token < task.token + task.n_tokens; ++token) {
    const int64_t pos = call.pos_of_token[token];
    const int64_t start = call.start_of_seq[call.seq_of_token[token]];
    const int64_t from = call.window > 0 && pos - call.window + 1 > start ? pos - call.window + 1 : start;
    for (int64_t head = task.head; head < task.head + task.n_heads; ++head, ++row, p += kPage) {
      float* out = call.out + (token * call.n_heads + head) * head_dim;
      for (int64_t d = 0; d < head_dim; ++d) out[d] = 0.0f;
      *row = Row{call.q + token * call.q_token_stride + head * call.q_head_stride, out, p, from, pos + 1, 0, 0, -INFINITY, 0.0f};
      if (call.sinks != nullptr) row->top = call.sinks[head], row->sum = 1.0f;
    }
  }
}

template <class V>
void attend(const AttendCall& call, const AttendTask& task) {
  alignas(64) float p[kTileRows * kPage];
  Row rows[kTileRows];
  Row* active[kTileRows];
  const int n = static_cast<int>(task.n_tokens * task.n_heads);
  open_rows(call, task, rows, p);
  const int32_t* table = call.block_table + call.seq_of_token[task.token] * call.blocks_per_seq;
  // Positions ascend within a task, so the first row starts earliest and the last row ends latest.
  for (int64_t block = rows[0].lo / kPage; block * kPage < rows[n - 1].hi; ++block) {
    int n_active = 0;
    for (int i = 0; i < n; ++i) {
      const int64_t a = rows[i].lo - block * kPage, b = rows[i].hi - block * kPage;
      rows[i].a = a > 0 ? a : 0;
      rows[i].b = b < kPage ? b : kPage;
      if (rows[i].a < rows[i].b) active[n_active++] = &rows[i];
    }
    const int64_t next = (block + 1) * kPage < rows[n - 1].hi ? block + 1 : block;
    attend_block<V>(active, n_active, call.kv.keys(table[block], task.kv_head), call.kv.values(table[block], task.kv_head),
                    call.kv.keys(table[next], task.kv_head), call.kv.head_dim);
  }
  for (int i = 0; i < n; ++i) scale_row<V>(rows[i].out, 1.0f / rows[i].sum, rows[i].out, call.kv.head_dim);
}
