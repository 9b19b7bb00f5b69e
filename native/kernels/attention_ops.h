// The arithmetic of attention that has one version for each instruction set, as a table of functions, and what it works on.
// Knows no projection, no thread and no Python. Every version processes keys in the same fixed order, so that a token's
// result never depends on which other tokens share the call.
#pragma once
#include <cstdint>

#include "kernels/kv.h"

namespace stoker {

constexpr int kTileRows = 48;  // (token, head) rows that share one pass over a block of keys

// Causal attention of one call: every token of the call is already in the cache. q is scaled and rotated.
struct AttendCall {
  const float* q = nullptr;   // row of (token, head) at q + token * q_token_stride + head * q_head_stride
  int64_t q_token_stride = 0;
  int64_t q_head_stride = 0;
  float* out = nullptr;       // [T, n_heads, head_dim]
  int64_t n_heads = 0;
  KvCache kv;
  const int32_t* block_table = nullptr;  // [B, blocks_per_seq]
  int64_t blocks_per_seq = 0;
  const int32_t* seq_of_token = nullptr;  // [T]
  const int32_t* pos_of_token = nullptr;  // [T]
  const int32_t* start_of_seq = nullptr;  // [B] first position that may be seen
  int64_t window = 0;                     // positions seen, the own one included; 0: all
  const float* sinks = nullptr;           // [n_heads] a logit without a value that joins each softmax, or null
};

// tokens [token, token + n_tokens) are neighbours in one sequence; heads [head, head + n_heads) share kv_head;
// n_tokens * n_heads <= kTileRows.
struct AttendTask {
  int64_t token, n_tokens, head, n_heads, kv_head;
};

struct AttentionOps {
  void (*attend)(const AttendCall& call, const AttendTask& task);
  float (*mean_square)(const float* x, int64_t n);
  void (*scale)(const float* x, float factor, const float* weight, bool unit_offset, float* out, int64_t n);  // weight or null
  void (*rotate)(float* x, const float* cos, const float* sin, int64_t rotary_dim);  // rotate_half convention, in place
  bool (*to_half)(const float* x, uint16_t* out, int64_t n);  // true when a finite value became infinite
  void (*gate)(float* x, const float* gate, int64_t n);       // x *= sigmoid(gate)
};

extern const AttentionOps kAttentionPortable;
extern const AttentionOps kAttentionAvx2;
extern const AttentionOps kAttentionAvx512;

const AttentionOps& attention_ops();  // of the instruction set in use

}  // namespace stoker
