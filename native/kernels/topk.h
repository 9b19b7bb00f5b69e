// A router's choice: softmax over all experts, then the k most likely. Knows nothing of what an expert is.
#pragma once
#include <cstdint>

namespace stoker {

// logits [T, E] f32 -> weights [T, k] f32 and experts [T, k], by descending probability; ties: the lower index first; NaN
// counts as the largest, so a NaN logit gives NaN weights. renormalise divides the weights by their sum. 1 <= k <= E.
void topk_softmax(const float* logits, int64_t T, int64_t E, int64_t k, bool renormalise, float* weights, int64_t* experts);

}  // namespace stoker
