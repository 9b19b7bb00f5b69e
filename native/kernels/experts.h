// The gated MLP of many experts at once: down(act(gate(x)) * up(x)), weights in slots at given addresses.
// Owns no weights and no outputs; all Experts share one workspace. Knows neither pools nor routes.
// Row invariance holds: a row's result depends on that row and its expert's bytes alone.
#pragma once
#include <cstdint>

#include "kernels/dispatch.h"
#include "kernels/matrix.h"

namespace stoker {

// A matrix at byte offsets from the start of a record. The pointers in `shape` are unused.
struct PlacedMatrix {
  Matrix shape;
  int64_t codes = 0, scales = 0, biases = 0;
  int64_t row_bias = -1;  // f32 [rows]; -1: none

  Matrix at(const char* record) const;
};

// Rows of the call, grouped by expert: rows [row_start[e], row_start[e + 1]) go to the expert at addresses[e].
struct ExpertRows {
  int64_t n_experts = 0;
  const int64_t* addresses = nullptr;     // [n_experts] record starts, 64-byte aligned
  const int32_t* row_start = nullptr;     // [n_experts + 1]
  const int32_t* token_of_row = nullptr;  // [P] row of x
  const int32_t* out_row = nullptr;       // [P] row of out
};

class Experts {
 public:
  // gate and up: [F, D]; down: [D, F]. Throws std::invalid_argument if the shapes do not fit together.
  // An affine down takes 16-bit activations whatever its shape says.
  Experts(const PlacedMatrix& gate, const PlacedMatrix& up, const PlacedMatrix& down, const GateParams& params);
  int64_t width() const { return down_.shape.rows; }
  // x: [*, D], out: [*, D], dense and distinct. out[out_row[p]] = expert(x[token_of_row[p]]).
  void forward(const ExpertRows& rows, const float* x, float* out) const;

 private:
  PlacedMatrix gate_, up_, down_;
  GateParams params_;
};

// out[t] = sum over k of weights[t, k] * pairs[t * K + k], k ascending. pairs: [T * K, D].
void combine(const float* pairs, const float* weights, int64_t T, int64_t K, int64_t D, float* out);

}  // namespace stoker
