#include "kernels/activations.h"

#include <atomic>
#include <new>

#include "kernels/dispatch.h"

namespace stoker {

int64_t Encoding::record_bytes() const {
  switch (code) {
    case Code::nibbles:
    case Code::bytes: return 4 + 4 * (unit_cols / kBlock) + planes * unit_cols;
    case Code::bf16: return 2 * kBlock;
    case Code::f32: return 4 * kBlock;
  }
  return 0;
}

Encoding encoding_of(const Matrix& m) {
  switch (m.format) {
    case Format::affine: return {m.bits == 4 ? Code::nibbles : Code::bytes, m.group, m.activation_bits / 8};
    case Format::bf16: return {m.activation_bits == 16 ? Code::f32 : Code::bf16, kBlock, 1};
    case Format::f32: return {Code::f32, kBlock, 1};
  }
  return {};
}

void encode_row(Encoding e, const float* x, int64_t cols, char* data, int64_t tokens, int64_t token) {
  kernels().encode_row(e, x, cols, data, tokens, token);
}

namespace {
std::atomic<int64_t> all_scratch_bytes{0};
}

int64_t scratch_bytes() { return all_scratch_bytes.load(std::memory_order_relaxed); }

char* Scratch::reserve(int64_t nbytes) {
  if (nbytes > capacity_) {
    release();
    data_ = static_cast<char*>(::operator new(static_cast<size_t>(nbytes), std::align_val_t{64}));
    capacity_ = nbytes;
    all_scratch_bytes.fetch_add(nbytes, std::memory_order_relaxed);
  }
  return data_;
}

void Scratch::release() {
  if (!data_) return;
  ::operator delete(data_, std::align_val_t{64});
  all_scratch_bytes.fetch_sub(capacity_, std::memory_order_relaxed);
  data_ = nullptr;
  capacity_ = 0;
}

void Activations::prepare(Encoding encoding, int64_t tokens, int64_t cols) {
  encoding_ = encoding;
  tokens_ = tokens;
  cols_ = cols;
  scratch_.reserve(encoding.units(cols) * tokens * encoding.record_bytes());
}

void Activations::encode(const float* x, int64_t row_stride, int thread, int n_threads) {
  // Pieces of a row, so that one wide token is shared by the threads too. Pieces end at unit boundaries.
  const int64_t units = encoding_.units(cols_);
  const int64_t total = tokens_ * units;
  int64_t i = total * thread / n_threads;
  const int64_t end = total * (thread + 1) / n_threads;
  while (i < end) {
    const int64_t token = i / units, unit = i % units;
    const int64_t n = end - i < units - unit ? end - i : units - unit;
    const int64_t col = unit * encoding_.unit_cols;
    const int64_t n_cols = cols_ - col < n * encoding_.unit_cols ? cols_ - col : n * encoding_.unit_cols;
    encode_row(encoding_, x + token * row_stride + col, n_cols,
               scratch_.data() + unit * tokens_ * encoding_.record_bytes(), tokens_, token);
    i += n;
  }
}

}  // namespace stoker
