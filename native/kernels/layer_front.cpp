#include "kernels/layer_front.h"

#include "kernels/matmul.h"
#include "kernels/norm.h"
#include "kernels/thread_pool.h"
#include "kernels/topk.h"

namespace stoker {
namespace {

constexpr int64_t kParallelFloats = 1 << 17;  // below this one thread is done before another has woken up

void apply(const Norm& norm, const float* x, int64_t T, int64_t D, float* out) {
  rms_norm(x, norm.weight, T, D, norm.eps, norm.unit_offset, out);
}

}  // namespace

void add_rows(const float* a, const float* b, int64_t n, float* out) {
  const auto range = [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) out[i] = a[i] + b[i];
  };
  if (n < kParallelFloats) return range(0, n);
  pool().run([&](int thread, int threads) { range(n * thread / threads, n * (thread + 1) / threads); });
}

AttentionStatus layer_front(const LayerFront& layer, const AttentionStep& step, const float* x, const FrontResults& out,
                            std::span<const AdaptedRows> adapted) {
  const int64_t T = step.T, D = layer.attention.q.cols;
  apply(layer.before, x, T, D, out.normed);
  const AttentionStatus status = attention_forward(layer.attention, step, out.normed, out.hidden, adapted);
  if (status != AttentionStatus::ok) return status;
  add_rows(x, out.hidden, T * D, out.hidden);
  apply(layer.after, out.hidden, T, D, out.normed);
  if (layer.top_k > 0) {
    matmul(layer.router, out.normed, T, out.logits);
    topk_softmax(out.logits, T, layer.router.rows, layer.top_k, layer.renormalise, out.weights, out.experts);
  }
  return status;
}

}  // namespace stoker
