#include "kernels/topk.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/thread_pool.h"

namespace stoker {
namespace {

constexpr int64_t kParallelLogits = 1 << 13;

// The k largest of a row by insertion into the sorted list of those found so far: k is small, and most values fail the
// first comparison. A later equal value never displaces an earlier one.
void largest(const float* values, int64_t n, int64_t k, float* best, int64_t* index) {
  const auto before = [](float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); };
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (found == k && !before(values[i], best[k - 1])) continue;
    int64_t at = found < k ? found++ : k - 1;
    for (; at > 0 && before(values[i], best[at - 1]); --at) best[at] = best[at - 1], index[at] = index[at - 1];
    best[at] = values[i], index[at] = i;
  }
}

void route(const float* logits, int64_t E, int64_t k, bool renormalise, float* p, float* weights, int64_t* experts) {
  float top = logits[0];
  for (int64_t e = 1; e < E; ++e) top = std::max(top, logits[e]);
  float sum = 0.0f;
  for (int64_t e = 0; e < E; ++e) sum += p[e] = std::exp(logits[e] - top);
  for (int64_t e = 0; e < E; ++e) p[e] /= sum;  // a NaN anywhere is in the sum, hence in every probability
  largest(p, E, k, weights, experts);
  if (!renormalise) return;
  float chosen = 0.0f;
  for (int64_t i = 0; i < k; ++i) chosen += weights[i];
  for (int64_t i = 0; i < k; ++i) weights[i] /= chosen;
}

}  // namespace

void topk_softmax(const float* logits, int64_t T, int64_t E, int64_t k, bool renormalise, float* weights, int64_t* experts) {
  const auto rows = [&](int64_t from, int64_t to) {
    thread_local std::vector<float> p;
    p.resize(static_cast<size_t>(E));
    for (int64_t t = from; t < to; ++t) route(logits + t * E, E, k, renormalise, p.data(), weights + t * k, experts + t * k);
  };
  if (T * E < kParallelLogits) return rows(0, T);
  pool().run([&](int thread, int n) { rows(T * thread / n, T * (thread + 1) / n); });
}

}  // namespace stoker
