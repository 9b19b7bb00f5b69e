#include "kernels/attention.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

#include "kernels/activations.h"
#include "kernels/attention_ops.h"
#include "kernels/dispatch.h"
#include "kernels/matmul.h"
#include "kernels/norm.h"
#include "kernels/thread_pool.h"

namespace stoker {
namespace {

struct Tile {
  int64_t token, n_tokens;  // neighbours in one sequence
};

// What a thread that calls attention keeps from call to call. Grows to the largest step.
struct Workspace {
  std::array<Activations, 3> inputs;  // x as q, k, v want it; equal encodings share one
  Activations heads;                  // the heads' outputs as o wants them
  Scratch qkv;                        // f32 [T, rows of q + k + v]
  Scratch mixed;                      // f32 [T, n_heads * head_dim]
  Scratch factors;                    // f32 [T, 2] norm factors of whole rows
  std::vector<Tile> tiles;
  std::array<LowRankSum, 4> adapters; // what they add to q, k, v and o
};

AttentionStatus check(const AttentionStep& s) {
  for (int64_t t = 0; t < s.T; ++t) {
    const int64_t seq = s.seq_of_token[t], pos = s.pos_of_token[t];
    if (seq < 0 || seq >= s.B) return AttentionStatus::bad_sequence;
    const int64_t start = s.start_of_seq[seq];
    if (start < 0 || pos < start || pos / kKvBlockTokens >= s.blocks_per_seq) return AttentionStatus::bad_position;
    // A token that follows its neighbour in the same block has the blocks that the neighbour was checked for.
    if (t > 0 && s.seq_of_token[t - 1] == seq && s.pos_of_token[t - 1] / kKvBlockTokens == pos / kKvBlockTokens) continue;
    const int32_t* table = s.block_table + seq * s.blocks_per_seq;
    for (int64_t block = start / kKvBlockTokens; block <= pos / kKvBlockTokens; ++block) {
      if (table[block] < 0) return AttentionStatus::bad_block;
    }
  }
  return AttentionStatus::ok;
}

void cut_tiles(const AttentionStep& s, int64_t max_tokens, std::vector<Tile>& tiles) {
  tiles.clear();
  for (int64_t t = 0; t < s.T; ++t) {
    const bool follows = t > 0 && s.seq_of_token[t] == s.seq_of_token[t - 1] && s.pos_of_token[t] == s.pos_of_token[t - 1] + 1;
    if (follows && tiles.back().n_tokens < max_tokens) {
      ++tiles.back().n_tokens;
    } else {
      tiles.push_back({t, 1});
    }
  }
}

// One call: the phases of a region in order. Every thread of the region runs run(); queues hand out what is uneven.
class Block {
 public:
  Block(const AttentionLayer& layer, const AttentionStep& step, const float* x, float* out, std::span<const AdaptedRows> adapted, Workspace& w)
      : layer_(layer), step_(step), x_(x), out_(out), w_(w), ops_(attention_ops()), stride_(layer.q.rows + layer.k.rows + layer.v.rows) {
    qkv_ = reinterpret_cast<float*>(w.qkv.reserve(step.T * stride_ * 4));
    mixed_ = reinterpret_cast<float*>(w.mixed.reserve(step.T * layer.q_width() * 4));
    factors_ = reinterpret_cast<float*>(w.factors.reserve(step.T * 2 * 4));
    prepare_inputs();
    w.heads.prepare(encoding_of(layer.o), step.T, layer.o.cols);
    alone_ = work() < kAloneBytes;
    plan_attention();
    plan_adapters(adapted);
  }

  void run(int thread, int n) {
    project(thread, n);
    if (layer_.norm == QkNorm::whole) measure_rows(thread, n);
    const int64_t units = step_.T * (layer_.n_heads + layer_.n_kv_heads);
    finish_heads(units * thread / n, units * (thread + 1) / n);
    pool().barrier();
    attend();
    pool().barrier();
    w_.heads.encode(mixed_, layer_.q_width(), thread, n);
    w_.adapters[3].down(n);
    pool().barrier();
    multiply(3, layer_.o, w_.heads.rows(), out_, layer_.o.rows);
  }

  bool alone() const { return alone_; }
  bool overflowed() const { return overflow_.load(std::memory_order_relaxed); }

 private:
  void prepare_inputs() {
    const Matrix* m[3] = {&layer_.q, &layer_.k, &layer_.v};
    for (int i = 0; i < 3; ++i) {
      input_of_[i] = i;
      for (int j = 0; j < i; ++j) {
        if (encoding_of(*m[i]) == encoding_of(*m[j])) input_of_[i] = std::min(input_of_[i], input_of_[j]);
      }
      if (input_of_[i] == i) w_.inputs[i].prepare(encoding_of(*m[i]), step_.T, m[i]->cols);
    }
  }

  // Bytes of weights, and of the keys and values that each token meets.
  int64_t work() const {
    int64_t positions = 0;
    for (int64_t t = 0; t < step_.T; ++t) positions += step_.pos_of_token[t] + 1 - step_.start_of_seq[step_.seq_of_token[t]];
    int64_t total = 4 * layer_.kv_width() * positions;
    for (const Matrix* m : {&layer_.q, &layer_.k, &layer_.v, &layer_.o}) total += multiply_work(*m, step_.T);
    return total;
  }

  void plan_attention() {
    const int threads = alone_ ? 1 : pool().size();
    const int64_t group = layer_.n_heads / layer_.n_kv_heads;
    heads_per_task_ = std::min<int64_t>(group, kTileRows);
    cut_tiles(step_, std::max<int64_t>(1, kTileRows / group), w_.tiles);
    const int64_t tiles = static_cast<int64_t>(w_.tiles.size());
    // Few kv heads and one token: the heads of a group go to several threads. Rows are independent, so no bit changes.
    while (tasks() < threads && heads_per_task_ > 1) heads_per_task_ = (heads_per_task_ + 1) / 2;
    n_tasks_ = tiles * layer_.n_kv_heads * chunks();
  }

  void plan_adapters(std::span<const AdaptedRows> adapted) {
    for (LowRankSum& sum : w_.adapters) sum.clear();
    for (const AdaptedRows& rows : adapted) {
      const int64_t first = rows.first, tokens = std::min(rows.last, step_.T) - first;
      if (tokens <= 0) continue;
      const auto add = [&](int which, const LowRank* pair, const float* x, int64_t x_stride, float* y, int64_t y_stride) {
        if (pair != nullptr) w_.adapters[which].add({pair, tokens, x + first * x_stride, x_stride, y + first * y_stride, y_stride});
      };
      add(0, rows.q, x_, layer_.q.cols, qkv_, stride_);
      add(1, rows.k, x_, layer_.q.cols, qkv_ + layer_.q.rows, stride_);
      add(2, rows.v, x_, layer_.q.cols, qkv_ + layer_.q.rows + layer_.k.rows, stride_);
      add(3, rows.o, mixed_, layer_.q_width(), out_, layer_.o.rows);
    }
    for (LowRankSum& sum : w_.adapters) sum.prepare();
  }

  int64_t chunks() const { return (layer_.n_heads / layer_.n_kv_heads + heads_per_task_ - 1) / heads_per_task_; }
  int64_t tasks() const { return static_cast<int64_t>(w_.tiles.size()) * layer_.n_kv_heads * chunks(); }

  KvCache cache() const {
    return {static_cast<uint16_t*>(step_.kv_base), layer_.n_layers, layer_.layer, layer_.n_kv_heads, layer_.head_dim};
  }

  void project(int thread, int n) {
    for (int i = 0; i < 3; ++i) {
      if (input_of_[i] == i) w_.inputs[i].encode(x_, layer_.q.cols, thread, n);
    }
    for (int i = 0; i < 3; ++i) w_.adapters[i].down(n);
    pool().barrier();
    multiply(0, layer_.q, w_.inputs[input_of_[0]].rows(), qkv_, stride_);
    multiply(1, layer_.k, w_.inputs[input_of_[1]].rows(), qkv_ + layer_.q.rows, stride_);
    multiply(2, layer_.v, w_.inputs[input_of_[2]].rows(), qkv_ + layer_.q.rows + layer_.k.rows, stride_);
    pool().barrier();
  }

  // multiply_in_region, and what adapters add: a thread adds to the tiles that it has just written.
  void multiply(int which, const Matrix& m, const EncodedRows& x, float* y, int64_t y_stride) {
    for (int64_t first, last; take_run(queues_[which], m.tiles(), pool().size(), first, last);) {
      multiply_tiles(m, x, 0, step_.T, first, last, y, y_stride);
      w_.adapters[which].up(first, last);
    }
  }

  float* query(int64_t t, int64_t head) const { return qkv_ + t * stride_ + head * layer_.q_head_stride(); }
  float* key(int64_t t, int64_t head) const { return qkv_ + t * stride_ + layer_.q.rows + head * layer_.head_dim; }
  float* value(int64_t t, int64_t head) const { return key(t, head) + layer_.k.rows; }

  void measure_rows(int thread, int n) {
    for (int64_t unit = 2 * step_.T * thread / n; unit < 2 * step_.T * (thread + 1) / n; ++unit) {
      const int64_t t = unit / 2;
      factors_[unit] = unit % 2 == 0 ? rms_factor(query(t, 0), layer_.q_width(), layer_.eps)
                                     : rms_factor(key(t, 0), layer_.kv_width(), layer_.eps);
    }
    pool().barrier();
  }

  // Units are (token, head), the query heads of a token before its key-value heads.
  void finish_heads(int64_t from, int64_t to) {
    const int64_t per_token = layer_.n_heads + layer_.n_kv_heads;
    bool overflow = false;
    for (int64_t unit = from; unit < to; ++unit) {
      const int64_t t = unit / per_token, head = unit % per_token;
      if (head < layer_.n_heads) {
        norm_and_rotate(query(t, head), t, head, layer_.q_norm, 0);
        ops_.scale(query(t, head), layer_.scale, nullptr, false, query(t, head), layer_.head_dim);
      } else {
        norm_and_rotate(key(t, head - layer_.n_heads), t, head - layer_.n_heads, layer_.k_norm, 1);
        overflow |= append(t, head - layer_.n_heads);
      }
    }
    if (overflow) overflow_.store(true, std::memory_order_relaxed);
  }

  void norm_and_rotate(float* x, int64_t t, int64_t head, const float* weight, int which) {
    const int64_t head_dim = layer_.head_dim;
    if (layer_.norm == QkNorm::head) {
      ops_.scale(x, rms_factor(x, head_dim, layer_.eps), weight, layer_.unit_offset, x, head_dim);
    } else if (layer_.norm == QkNorm::whole) {
      ops_.scale(x, factors_[2 * t + which], weight + head * head_dim, layer_.unit_offset, x, head_dim);
    }
    ops_.rotate(x, step_.cos + t * layer_.rotary_dim, step_.sin + t * layer_.rotary_dim, layer_.rotary_dim);
  }

  bool append(int64_t t, int64_t head) {
    const int64_t pos = step_.pos_of_token[t], slot = pos % kKvBlockTokens, head_dim = layer_.head_dim;
    const int64_t block = step_.block_table[step_.seq_of_token[t] * step_.blocks_per_seq + pos / kKvBlockTokens];
    uint16_t* row = cache().values(block, head) + slot * head_dim;
    uint16_t* column = cache().keys(block, head) + slot;
    uint16_t* staged = reinterpret_cast<uint16_t*>(key(t, head));  // halves of a row fit in the floats that they come from
    bool overflow = ops_.to_half(value(t, head), row, head_dim);
    overflow |= ops_.to_half(key(t, head), staged, head_dim);
    for (int64_t d = 0; d < head_dim; ++d) column[d * kKvBlockTokens] = staged[d];
    return overflow;
  }

  void attend() {
    AttendCall call;
    call.q = qkv_, call.q_token_stride = stride_, call.q_head_stride = layer_.q_head_stride();
    call.out = mixed_, call.n_heads = layer_.n_heads, call.kv = cache();
    call.block_table = step_.block_table, call.blocks_per_seq = step_.blocks_per_seq;
    call.seq_of_token = step_.seq_of_token, call.pos_of_token = step_.pos_of_token, call.start_of_seq = step_.start_of_seq;
    call.window = layer_.window, call.sinks = layer_.sinks;
    for (int64_t i; (i = next_task_.fetch_add(1, std::memory_order_relaxed)) < n_tasks_;) attend_task(call, n_tasks_ - 1 - i);
  }

  // Tasks run from last to first: later positions see more keys, and long tasks go first. A kv head's tiles are neighbours.
  void attend_task(const AttendCall& call, int64_t index) {
    const int64_t group = layer_.n_heads / layer_.n_kv_heads, tiles = static_cast<int64_t>(w_.tiles.size());
    const int64_t tile = index % tiles, chunk = index / tiles % chunks(), kv_head = index / tiles / chunks();
    const int64_t first = chunk * heads_per_task_;
    const AttendTask task{w_.tiles[tile].token, w_.tiles[tile].n_tokens, kv_head * group + first,
                          std::min(heads_per_task_, group - first), kv_head};
    ops_.attend(call, task);
    if (!layer_.output_gate) return;
    for (int64_t t = task.token; t < task.token + task.n_tokens; ++t) {
      for (int64_t head = task.head; head < task.head + task.n_heads; ++head) {
        ops_.gate(mixed_ + t * layer_.q_width() + head * layer_.head_dim, query(t, head) + layer_.head_dim, layer_.head_dim);
      }
    }
  }

  const AttentionLayer& layer_;
  const AttentionStep& step_;
  const float* x_;
  float* out_;
  Workspace& w_;
  const AttentionOps& ops_;
  int64_t stride_;  // floats between tokens in qkv_
  float* qkv_ = nullptr;
  float* mixed_ = nullptr;
  float* factors_ = nullptr;
  int input_of_[3] = {0, 1, 2};
  bool alone_ = false;
  int64_t heads_per_task_ = 1;
  int64_t n_tasks_ = 0;
  TileQueue queues_[4];
  alignas(64) std::atomic<int64_t> next_task_{0};
  std::atomic<bool> overflow_{false};
};

}  // namespace

const AttentionOps& attention_ops() {
#if defined(__x86_64__) || defined(_M_X64)
  const char* isa = kernels().isa;  // "avx512", "avx2" or "portable"
  if (isa[0] == 'a') return isa[3] == '5' ? kAttentionAvx512 : kAttentionAvx2;
#endif
  return kAttentionPortable;
}

AttentionStatus attention_forward(const AttentionLayer& layer, const AttentionStep& step, const float* x, float* out,
                                  std::span<const AdaptedRows> adapted) {
  const AttentionStatus status = check(step);
  if (status != AttentionStatus::ok || step.T == 0) return status;
  thread_local Workspace workspace;
  Block block(layer, step, x, out, adapted, workspace);
  pool().run([&](int thread, int n) { block.run(thread, n); }, block.alone());
  return block.overflowed() ? AttentionStatus::half_overflow : AttentionStatus::ok;
}

int64_t attention_scratch_bytes(const AttentionLayer& layer, int64_t T) {
  return 4 * T * (layer.q.rows + layer.k.rows + layer.v.rows + layer.q_width() + 2);
}

}  // namespace stoker
