#include "kernels/norm.h"

#include <cmath>

#include "kernels/attention_ops.h"
#include "kernels/thread_pool.h"

namespace stoker {
namespace {

constexpr int64_t kParallelFloats = 1 << 17;  // below this one thread is done before another has woken up

}  // namespace

float rms_factor(const float* x, int64_t n, float eps) { return 1.0f / std::sqrt(attention_ops().mean_square(x, n) + eps); }

void rms_norm(const float* x, const float* weight, int64_t T, int64_t D, float eps, bool unit_offset, float* out) {
  const auto rows = [&](int64_t from, int64_t to) {
    for (int64_t t = from; t < to; ++t) {
      attention_ops().scale(x + t * D, rms_factor(x + t * D, D, eps), weight, unit_offset, out + t * D, D);
    }
  };
  if (T * D < kParallelFloats) return rows(0, T);
  pool().run([&](int thread, int n) { rows(T * thread / n, T * (thread + 1) / n); });
}

}  // namespace stoker
