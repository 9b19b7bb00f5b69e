// The functions that exist once per instruction set, and the choice among them.
// The choice is made from the CPU's features, or by the environment variable STOKER_ISA, or by force_isa().
#pragma once
#include <cstdint>

#include "kernels/activations.h"
#include "kernels/matrix.h"

namespace stoker {

// One tile (16 rows) times n_tokens encoded rows. x: the record of unit 0 of the first token; units are `unit_stride` bytes
// apart, tokens encoding_of(m).record_bytes(). acc: [n_tokens, 16] f32, overwritten; rows past m.rows are computed too (zeros).
using TileKernel = void (*)(const Matrix& m, const char* x, int64_t unit_stride, int64_t n_tokens, int64_t tile, float* acc);

enum class Activation : int { silu = 0, gelu = 1, gelu_tanh = 2, relu = 3, swiglu_oai = 4 };

struct GateParams {
  Activation activation = Activation::silu;
  float alpha = 1.702f;  // swiglu_oai
  float limit = 7.0f;    // swiglu_oai
};

struct KernelTable {
  const char* isa;
  TileKernel (*tile_kernel)(const Matrix& m);
  void (*encode_row)(Encoding e, const float* x, int64_t cols, char* data, int64_t tokens, int64_t token);
  // h[i] = act(gate[i]) * up[i]; h may be gate.
  void (*gated)(const GateParams& p, const float* gate, const float* up, float* h, int64_t n);
  // Reads every byte of [p, p + n), n a multiple of 64; returns their xor. Measures the memory.
  uint64_t (*read_bytes)(const char* p, int64_t n);
};

// The table in use. Throws std::runtime_error at the first use if STOKER_ISA is unknown or not available here.
const KernelTable& kernels();
// name: "avx512", "avx2" or "portable". False if unknown or not available on this machine; then nothing changes.
bool force_isa(const char* name);

const KernelTable* portable_table();
const KernelTable* avx2_table();    // x86-64 builds only
const KernelTable* avx512_table();  // x86-64 builds only

}  // namespace stoker
