// Where keys and values lie: pages of 64 tokens, all layers of a token together, IEEE half. Owns nothing, allocates nothing.
// A block holds [n_layers, k|v, n_kv_heads, 64 x head_dim]. Values are [64, head_dim] (token by token); keys are transposed,
// [head_dim, 64], so that one vector load holds one component of neighbouring keys and no score needs a horizontal sum.
#pragma once
#include <cstdint>

namespace stoker {

constexpr int kKvBlockTokens = 64;

struct KvCache {
  uint16_t* base = nullptr;  // block 0, layer 0
  int64_t n_layers = 0;
  int64_t layer = 0;
  int64_t n_kv_heads = 0;
  int64_t head_dim = 0;

  int64_t page() const { return kKvBlockTokens * head_dim; }  // halves of one head in one block
  uint16_t* at(int64_t block, int64_t kv, int64_t head) const {
    return base + (((block * n_layers + layer) * 2 + kv) * n_kv_heads + head) * page();
  }
  uint16_t* keys(int64_t block, int64_t head) const { return at(block, 0, head); }
  uint16_t* values(int64_t block, int64_t head) const { return at(block, 1, head); }
};

}  // namespace stoker
