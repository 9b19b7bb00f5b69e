// Python bindings of prerouter heads. Addresses come as integers: the door (stoker/native/prerouter.py) has checked shapes,
// dtypes and contiguity; here only the experts' numbers are checked, because that is cheap in C++ alone.
#pragma once
#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>

#include "kernels/prerouter_head.h"

namespace stoker {

inline PrerouterHead make_prerouter_head(const Matrix& dense, const Matrix& out, uintptr_t table, bool table_is_bf16) {
  if (dense.rows != out.rows + out.cols) throw std::invalid_argument("the shapes of the head do not fit together");
  return {dense, out, reinterpret_cast<const void*>(table), table_is_bf16};
}

inline HeadTokens head_tokens(const PrerouterHead& head, uintptr_t hidden, uintptr_t used, uintptr_t before, int64_t T, int64_t K) {
  const HeadTokens tokens{reinterpret_cast<const float*>(hidden), reinterpret_cast<const int64_t*>(used),
                          reinterpret_cast<const int64_t*>(before), T, K};
  for (const int64_t* ids : {tokens.used, tokens.before}) {
    for (int64_t i = 0; i < T * K; ++i) {
      if (ids[i] < -1 || ids[i] >= head.experts()) {
        throw std::out_of_range("expert " + std::to_string(ids[i]) + " is not in [-1, " + std::to_string(head.experts()) + ")");
      }
    }
  }
  return tokens;
}

}  // namespace stoker

inline void bind_prerouter(nanobind::module_& m) {
  namespace nb = nanobind;
  using namespace nb::literals;
  using namespace stoker;
  using release = nb::call_guard<nb::gil_scoped_release>;

  nb::class_<PrerouterHead>(m, "PrerouterHead")
      .def("logits", [](const PrerouterHead& head, uintptr_t hidden, uintptr_t used, uintptr_t before, int64_t T, int64_t K,
                        uintptr_t logits) {
        prerouter_logits(head, head_tokens(head, hidden, used, before, T, K), reinterpret_cast<float*>(logits));
      }, "hidden"_a, "used"_a, "before"_a, "T"_a, "K"_a, "logits"_a, release())
      .def("route", [](const PrerouterHead& head, uintptr_t hidden, uintptr_t used, uintptr_t before, int64_t T, int64_t K,
                       int64_t top_k, bool renormalise, uintptr_t weights, uintptr_t experts) {
        prerouter_route(head, head_tokens(head, hidden, used, before, T, K), top_k, renormalise, reinterpret_cast<float*>(weights),
                        reinterpret_cast<int64_t*>(experts));
      }, "hidden"_a, "used"_a, "before"_a, "T"_a, "K"_a, "top_k"_a, "renormalise"_a, "weights"_a, "experts"_a, release());
  m.def("make_prerouter_head", &make_prerouter_head, "dense"_a, "out"_a, "table"_a, "table_is_bf16"_a);
}
