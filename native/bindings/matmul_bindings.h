// Python bindings of the quantised kernels. Addresses come as integers: the door (stoker/native/kernels.py) has checked
// shapes, dtypes and contiguity; here only the indices are checked, because that is cheap in C++ alone.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/activations.h"
#include "kernels/dispatch.h"
#include "kernels/experts.h"
#include "kernels/gather.h"
#include "kernels/layer_front.h"
#include "kernels/low_rank.h"
#include "kernels/matmul.h"
#include "kernels/thread_pool.h"

namespace stoker {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline Matrix make_matrix(const std::string& kind, int bits, int group, bool scale_is_half, int64_t rows, int64_t cols,
                          uintptr_t codes, uintptr_t scales, uintptr_t biases, uintptr_t row_bias, int activation_bits) {
  Matrix m;
  if (kind == "affine") {
    m.format = Format::affine;
    if ((bits != 4 && bits != 8) || (group != 32 && group != 64 && group != 128) || cols % group != 0) {
      throw std::invalid_argument("affine needs 4 or 8 bits and a group of 32, 64 or 128 that divides the columns");
    }
  } else if (kind == "bf16" || kind == "f32") {
    m.format = kind == "bf16" ? Format::bf16 : Format::f32;
  } else {
    throw std::invalid_argument("unknown weight format " + kind);
  }
  if (rows <= 0 || cols <= 0) throw std::invalid_argument("a matrix needs at least one row and one column");
  if (codes % 64 != 0 || scales % 32 != 0 || biases % 32 != 0 || row_bias % 4 != 0) {
    throw std::invalid_argument("codes must be aligned to 64 bytes, scales and biases to 32");
  }
  if (activation_bits != 8 && activation_bits != 16) throw std::invalid_argument("activation_bits must be 8 or 16");
  m.activation_bits = activation_bits;
  m.bits = bits;
  m.group = group;
  m.scale_is_half = scale_is_half;
  m.rows = rows;
  m.cols = cols;
  m.codes = pointer<const void>(codes);
  m.scales = pointer<const uint16_t>(scales);
  m.biases = pointer<const uint16_t>(biases);
  m.row_bias = pointer<const float>(row_bias);
  return m;
}

inline LowRank make_low_rank(const Matrix& a, const Matrix& b) {
  const auto plain = [](const Matrix& m) { return m.format != Format::affine && m.row_bias == nullptr; };
  if (!plain(a) || !plain(b) || a.rows != b.cols) throw std::invalid_argument("a low-rank pair is two plain matrices that fit together");
  return {a, b};
}

// `shape` comes with offsets in place of addresses; row_bias -1: none.
inline PlacedMatrix make_placed(const Matrix& shape, int64_t codes, int64_t scales, int64_t biases, int64_t row_bias) {
  if (codes % 64 != 0 || scales % 64 != 0 || biases % 64 != 0) throw std::invalid_argument("parts must be aligned to 64 bytes");
  return {shape, codes, scales, biases, row_bias};
}

inline void check_range(const int32_t* values, int64_t n, int64_t limit, const char* name) {
  for (int64_t i = 0; i < n; ++i) {
    if (values[i] < 0 || values[i] >= limit) {
      throw std::out_of_range(std::string(name) + "[" + std::to_string(i) + "] = " + std::to_string(values[i]) +
                              " is not in [0, " + std::to_string(limit) + ")");
    }
  }
}

inline void check_addresses(const int64_t* addresses, int64_t n) {
  for (int64_t e = 0; e < n; ++e) {
    if (addresses[e] == 0 || addresses[e] % 64 != 0) {
      throw std::out_of_range("the address of expert " + std::to_string(e) + " is null or not aligned to 64 bytes");
    }
  }
}

inline void forward_experts(const Experts& experts, int64_t n_experts, uintptr_t addresses, uintptr_t row_start, int64_t n_rows,
                            uintptr_t token_of_row, uintptr_t out_row, uintptr_t x, int64_t n_tokens, uintptr_t out,
                            int64_t n_out) {
  const ExpertRows rows{n_experts, pointer<const int64_t>(addresses), pointer<const int32_t>(row_start),
                        pointer<const int32_t>(token_of_row), pointer<const int32_t>(out_row)};
  if (rows.row_start[0] != 0 || rows.row_start[n_experts] != n_rows) {
    throw std::out_of_range("row_start must begin with 0 and end with the number of rows");
  }
  for (int64_t e = 0; e < n_experts; ++e) {
    if (rows.row_start[e] > rows.row_start[e + 1]) throw std::out_of_range("row_start must not decrease");
  }
  check_addresses(rows.addresses, n_experts);
  check_range(rows.token_of_row, n_rows, n_tokens, "token_of_row");
  check_range(rows.out_row, n_rows, n_out, "out_row");
  experts.forward(rows, pointer<const float>(x), pointer<float>(out));
}

// One token through its experts, weighted and added to `residual`: out [D] = residual + sum over k of weights[k] * expert k.
inline void forward_token(const Experts& experts, const std::vector<int64_t>& addresses, uintptr_t x, uintptr_t weights,
                          uintptr_t residual, uintptr_t out) {
  thread_local std::vector<float> pairs;
  thread_local std::vector<int32_t> row_start, zeros;
  const int64_t K = static_cast<int64_t>(addresses.size()), D = experts.width();
  pairs.resize(static_cast<size_t>(K * D));
  zeros.assign(static_cast<size_t>(K), 0);
  row_start.resize(static_cast<size_t>(K + 1));
  std::iota(row_start.begin(), row_start.end(), 0);
  check_addresses(addresses.data(), K);
  experts.forward({K, addresses.data(), row_start.data(), zeros.data(), row_start.data()}, pointer<const float>(x), pairs.data());
  combine(pairs.data(), pointer<const float>(weights), 1, K, D, pointer<float>(out));
  add_rows(pointer<const float>(residual), pointer<const float>(out), D, pointer<float>(out));
}

inline void gather_checked(const Matrix& m, uintptr_t ids, int64_t n, uintptr_t out) {
  const int64_t* id = pointer<const int64_t>(ids);
  for (int64_t i = 0; i < n; ++i) {
    if (id[i] < 0 || id[i] >= m.rows) {
      throw std::out_of_range("id " + std::to_string(id[i]) + " is not in [0, " + std::to_string(m.rows) + ")");
    }
  }
  gather_rows(m, id, n, pointer<float>(out));
}

// Every thread reads its share once; returns the xor of the bytes, so that the reads cannot be left out.
inline uint64_t read_once(uintptr_t address, int64_t nbytes) {
  if (address % 64 != 0 || nbytes < 0 || nbytes % 64 != 0) throw std::invalid_argument("address and nbytes must be multiples of 64");
  std::atomic<uint64_t> all{0};
  const KernelTable& table = kernels();
  pool().run([&](int thread, int n_threads) {
    const int64_t lines = nbytes / 64, first = lines * thread / n_threads, last = lines * (thread + 1) / n_threads;
    all ^= table.read_bytes(pointer<const char>(address) + first * 64, (last - first) * 64);
  });
  return all;
}

}  // namespace stoker

inline void bind_matmul(nanobind::module_& m) {
  namespace nb = nanobind;
  using namespace nb::literals;
  using release = nb::call_guard<nb::gil_scoped_release>;
  using stoker::pointer;

  m.def("set_threads", [](int n) { stoker::pool().resize(n); }, "n"_a, release());
  m.def("threads", [] { return stoker::pool().size(); });
  m.def("isa", [] { return std::string(stoker::kernels().isa); });
  m.def("force_isa", [](const std::string& name) { return stoker::force_isa(name.c_str()); }, "name"_a);
  m.def("scratch_bytes", &stoker::scratch_bytes);
  m.def("read_once", &stoker::read_once, "address"_a, "nbytes"_a, release());

  nb::class_<stoker::Matrix>(m, "Matrix")
      .def_ro("rows", &stoker::Matrix::rows)
      .def_ro("cols", &stoker::Matrix::cols);
  m.def("make_matrix", &stoker::make_matrix, "kind"_a, "bits"_a, "group"_a, "scale_is_half"_a, "rows"_a, "cols"_a, "codes"_a,
        "scales"_a, "biases"_a, "row_bias"_a, "activation_bits"_a);
  m.def("matmul", [](const stoker::Matrix& w, uintptr_t x, int64_t T, uintptr_t out) {
    stoker::matmul(w, pointer<const float>(x), T, pointer<float>(out));
  }, "matrix"_a, "x"_a, "T"_a, "out"_a, release());
  nb::class_<stoker::LowRank>(m, "LowRank");
  m.def("make_low_rank", &stoker::make_low_rank, "a"_a, "b"_a);
  m.def("low_rank_add", [](const stoker::LowRank& pair, uintptr_t x, int64_t T, uintptr_t y) {
    stoker::low_rank_add(pair, pointer<const float>(x), T, pointer<float>(y));
  }, "pair"_a, "x"_a, "T"_a, "y"_a, release());
  m.def("gather_rows", &stoker::gather_checked, "matrix"_a, "ids"_a, "n"_a, "out"_a, release());

  nb::class_<stoker::PlacedMatrix>(m, "PlacedMatrix");
  m.def("make_placed", &stoker::make_placed, "shape"_a, "codes"_a, "scales"_a, "biases"_a, "row_bias"_a);
  nb::class_<stoker::Experts>(m, "Experts")
      .def("__init__", [](stoker::Experts* self, const stoker::PlacedMatrix& gate, const stoker::PlacedMatrix& up,
                          const stoker::PlacedMatrix& down, int activation, float alpha, float limit) {
        new (self) stoker::Experts(gate, up, down, {static_cast<stoker::Activation>(activation), alpha, limit});
      })
      .def("forward", &stoker::forward_experts, "n_experts"_a, "addresses"_a, "row_start"_a, "n_rows"_a, "token_of_row"_a,
           "out_row"_a, "x"_a, "n_tokens"_a, "out"_a, "n_out"_a, release())
      .def("forward_token", &stoker::forward_token, "addresses"_a, "x"_a, "weights"_a, "residual"_a, "out"_a, release());
  m.def("combine", [](uintptr_t pairs, uintptr_t weights, int64_t T, int64_t K, int64_t D, uintptr_t out) {
    stoker::combine(pointer<const float>(pairs), pointer<const float>(weights), T, K, D, pointer<float>(out));
  }, "pairs"_a, "weights"_a, "T"_a, "K"_a, "D"_a, "out"_a, release());
}
