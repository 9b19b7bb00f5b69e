// One prerouter head: from what a layer saw of T tokens to the next layer's logits or route for their successors.
//   both = dense * hidden + rows of `table` for the token's experts and its predecessor's;  logits = out * gelu(both[:H]) + both[H:]
// A token's result is the same function of that token, bit for bit, whatever else is in the call and however many threads
// there are. The caller owns weights and results. Must not know: layers, sequences, which rule chose the experts.
#pragma once
#include <cstdint>

#include "kernels/matrix.h"

namespace stoker {

struct PrerouterHead {
  Matrix dense;  // [H + E, D]: the hidden layer and, below it, the linear part, for the hidden state
  Matrix out;    // [E, H]
  const void* table = nullptr;  // [2E, H + E]: what each expert of the token adds to `both`, then each of its predecessor
  bool table_is_bf16 = false;   // else f32

  int64_t experts() const { return out.rows; }
  int64_t inner() const { return out.cols; }
};

struct HeadTokens {
  const float* hidden = nullptr;    // [T, D]
  const int64_t* used = nullptr;    // [T, K] in [-1, E); -1 names none
  const int64_t* before = nullptr;  // [T, K] the same of each token's predecessor
  int64_t T = 0, K = 0;
};

// logits: [T, E] f32.
void prerouter_logits(const PrerouterHead& head, const HeadTokens& tokens, float* logits);

// The logits' softmax and its k best, as topk_softmax gives them: weights [T, k] f32, experts [T, k].
void prerouter_route(const PrerouterHead& head, const HeadTokens& tokens, int64_t k, bool renormalise, float* weights,
                     int64_t* experts);

}  // namespace stoker
