// The first part of a decoder layer as one call: norm, attention, residual, norm and, where it is a plain softmax router,
// the route. Adds nothing to the arithmetic of its parts: the same bits as calling them one by one. The caller owns
// weights, cache and results. Must not know: experts, sequences' lives, Python.
#pragma once
#include <cstdint>
#include <span>

#include "kernels/attention.h"
#include "kernels/matrix.h"

namespace stoker {

struct Norm {
  const float* weight = nullptr;  // [D]
  float eps = 0.0f;
  bool unit_offset = false;  // multiplies by 1 + weight
};

struct LayerFront {
  AttentionLayer attention;
  Norm before, after;
  Matrix router;      // [E, D]
  int64_t top_k = 0;  // 0: no router here
  bool renormalise = false;
};

struct FrontResults {
  float* hidden = nullptr;     // [T, D] x + attention(before(x))
  float* normed = nullptr;     // [T, D] after(hidden): what the experts get
  float* logits = nullptr;     // [T, E], and the route [T, top_k], where there is a router
  float* weights = nullptr;
  int64_t* experts = nullptr;
};

// x [T, D], no result is x. What is written on a status other than ok means nothing.
AttentionStatus layer_front(const LayerFront& layer, const AttentionStep& step, const float* x, const FrontResults& out,
                            std::span<const AdaptedRows> adapted = {});

// out[i] = a[i] + b[i]; out may be either.
void add_rows(const float* a, const float* b, int64_t n, float* out);

}  // namespace stoker
