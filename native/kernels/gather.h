// Rows of a weight matrix as f32: the embedding lookup. Exact: scale * code + bias in one fused step, or the stored value.
#pragma once
#include <cstdint>

#include "kernels/matrix.h"

namespace stoker {

// out: [n, cols] f32. Every id must be in [0, rows). row_bias does not apply.
void gather_rows(const Matrix& m, const int64_t* ids, int64_t n, float* out);

}  // namespace stoker
