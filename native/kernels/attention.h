// An attention block as one call: project to q, k, v; norm and rotate the heads; append k and v to the paged cache; attend;
// project out. One parallel region. Owns the scratch of the calling thread; the caller owns weights, cache and tables.
// Must not know: sequences' lives, block allocation, Python.
#pragma once
#include <cstdint>
#include <span>

#include "kernels/low_rank.h"
#include "kernels/matrix.h"

namespace stoker {

enum class QkNorm : int { none = 0, head = 1, whole = 2 };  // over head_dim (Qwen3), or over all heads together (OLMoE)

struct AttentionLayer {
  Matrix q, k, v, o;
  int64_t n_heads = 0;
  int64_t n_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t rotary_dim = 0;  // even, at most head_dim; 0: no rotation
  int64_t layer = 0;       // which layer of the cache's blocks
  int64_t n_layers = 0;
  float scale = 1.0f;
  QkNorm norm = QkNorm::none;
  const float* q_norm = nullptr;  // [head_dim], or [n_heads * head_dim] when whole
  const float* k_norm = nullptr;  // [head_dim], or [n_kv_heads * head_dim] when whole
  float eps = 0.0f;
  bool unit_offset = false;       // norms multiply by 1 + weight
  bool output_gate = false;       // q projects to [n_heads, query | gate]; the heads' outputs are times sigmoid(gate)
  int64_t window = 0;             // positions seen, the own one included; 0: all
  const float* sinks = nullptr;   // [n_heads] a logit without a value that joins each softmax, or null

  int64_t q_width() const { return n_heads * head_dim; }
  int64_t kv_width() const { return n_kv_heads * head_dim; }
  int64_t q_head_stride() const { return output_gate ? 2 * head_dim : head_dim; }
};

// One step: T tokens of B sequences. (sequence, position) pairs are distinct; the cache holds each sequence's earlier positions.
struct AttentionStep {
  int64_t T = 0;
  const float* cos = nullptr;  // [T, rotary_dim]
  const float* sin = nullptr;
  void* kv_base = nullptr;
  int64_t B = 0;
  int64_t blocks_per_seq = 0;
  const int32_t* block_table = nullptr;   // [B, blocks_per_seq]; entries past a sequence's last block are not read
  const int32_t* seq_of_token = nullptr;  // [T]
  const int32_t* pos_of_token = nullptr;  // [T]
  const int32_t* start_of_seq = nullptr;  // [B]
};

enum class AttentionStatus : int {
  ok = 0,
  half_overflow = 1,   // a finite key or value is too large for half precision; out and the cache hold infinities
  bad_sequence = 2,    // a sequence outside [0, B); nothing was computed
  bad_position = 3,    // a position before its sequence's start or outside its block table; nothing was computed
  bad_block = 4,       // a negative block number within a sequence's positions; nothing was computed
};

// What tokens [first, last) of a step add to the block's projections; null: nothing. `last` may lie past the step.
struct AdaptedRows {
  int64_t first = 0, last = 0;
  const LowRank* q = nullptr;
  const LowRank* k = nullptr;
  const LowRank* v = nullptr;
  const LowRank* o = nullptr;
};

// x [T, D], out [T, rows of o]; dense f32. out may not be x. adapted: no token twice.
AttentionStatus attention_forward(const AttentionLayer& layer, const AttentionStep& step, const float* x, float* out,
                                  std::span<const AdaptedRows> adapted = {});

// Scratch of the calling thread for T tokens, the encoded activations of the projections and adapters not counted.
int64_t attention_scratch_bytes(const AttentionLayer& layer, int64_t T);

}  // namespace stoker
