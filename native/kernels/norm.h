// Root-mean-square norm of rows. Knows no model; the row arithmetic is in the attention kernels.
#pragma once
#include <cstdint>

namespace stoker {

// out[t, d] = x[t, d] / sqrt(mean_d(x[t, d]^2) + eps) * (weight[d] + (unit_offset ? 1 : 0)); dense f32 rows; out may be x.
void rms_norm(const float* x, const float* weight, int64_t T, int64_t D, float eps, bool unit_offset, float* out);

// 1 / sqrt(mean square + eps) of one row: the factor that the norm applies.
float rms_factor(const float* x, int64_t n, float eps);

}  // namespace stoker
