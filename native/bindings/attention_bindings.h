// Python bindings of attention, norms and routing. Addresses come as integers: the door (stoker/native/attention.py) has
// checked shapes, dtypes and contiguity; positions and block numbers are checked by the kernels.
#pragma once
#include <nanobind/nanobind.h>

#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

#include "kernels/attention.h"
#include "kernels/layer_front.h"
#include "kernels/norm.h"
#include "kernels/topk.h"

namespace stoker {

constexpr int64_t kReleaseGilFloats = 1 << 14;  // a few microseconds of work; below, another thread may take the GIL for longer

// Which rows of a step take which pairs. The pairs are Python's: they outlive it.
struct Adapted {
  std::vector<AdaptedRows> rows;
};

inline std::span<const AdaptedRows> rows_of(const Adapted* adapted) {
  return adapted == nullptr ? std::span<const AdaptedRows>() : std::span<const AdaptedRows>(adapted->rows);
}

template <class F>
void call_outside_gil_if(bool large, F&& f) {
  std::optional<nanobind::gil_scoped_release> release;
  if (large) release.emplace();
  f();
}

inline LayerFront make_front(const AttentionLayer& attention, uintptr_t before, float before_eps, bool before_offset, uintptr_t after,
                             float after_eps, bool after_offset, const Matrix* router, int64_t top_k, bool renormalise) {
  LayerFront f;
  f.attention = attention;
  f.before = {reinterpret_cast<const float*>(before), before_eps, before_offset};
  f.after = {reinterpret_cast<const float*>(after), after_eps, after_offset};
  f.top_k = top_k, f.renormalise = renormalise;
  if (router != nullptr) f.router = *router;
  const bool routes = router != nullptr && top_k > 0 && top_k <= router->rows && router->cols == attention.q.cols;
  if (attention.o.rows != attention.q.cols || !(routes || (router == nullptr && top_k == 0))) {
    throw std::invalid_argument("the shapes of the layer do not fit together");
  }
  return f;
}

inline AttentionLayer make_attention(const Matrix& q, const Matrix& k, const Matrix& v, const Matrix& o, int64_t n_heads,
                                     int64_t n_kv_heads, int64_t head_dim, int64_t rotary_dim, int64_t layer, int64_t n_layers,
                                     float scale, int norm, uintptr_t q_norm, uintptr_t k_norm, float eps, bool unit_offset,
                                     bool output_gate, int64_t window, uintptr_t sinks) {
  AttentionLayer a;
  a.q = q, a.k = k, a.v = v, a.o = o;
  a.n_heads = n_heads, a.n_kv_heads = n_kv_heads, a.head_dim = head_dim, a.rotary_dim = rotary_dim;
  a.layer = layer, a.n_layers = n_layers, a.scale = scale;
  a.norm = static_cast<QkNorm>(norm), a.eps = eps, a.unit_offset = unit_offset;
  a.q_norm = reinterpret_cast<const float*>(q_norm), a.k_norm = reinterpret_cast<const float*>(k_norm);
  a.output_gate = output_gate, a.window = window, a.sinks = reinterpret_cast<const float*>(sinks);
  const bool sound = n_kv_heads > 0 && n_heads > 0 && n_heads % n_kv_heads == 0 && head_dim > 0 && rotary_dim >= 0 &&
                     rotary_dim <= head_dim && rotary_dim % 2 == 0 && layer >= 0 && layer < n_layers && window >= 0 &&
                     q.rows == n_heads * a.q_head_stride() && k.rows == a.kv_width() && v.rows == a.kv_width() &&
                     o.cols == a.q_width() && k.cols == q.cols && v.cols == q.cols;
  if (!sound) throw std::invalid_argument("the shapes of the attention block do not fit together");
  return a;
}

}  // namespace stoker

inline void bind_attention(nanobind::module_& m) {
  namespace nb = nanobind;
  using namespace nb::literals;
  using namespace stoker;

  m.def("rms_norm", [](uintptr_t x, uintptr_t weight, int64_t T, int64_t D, float eps, bool unit_offset, uintptr_t out) {
    call_outside_gil_if(T * D > kReleaseGilFloats, [&] {
      rms_norm(reinterpret_cast<const float*>(x), reinterpret_cast<const float*>(weight), T, D, eps, unit_offset,
               reinterpret_cast<float*>(out));
    });
  }, "x"_a, "weight"_a, "T"_a, "D"_a, "eps"_a, "unit_offset"_a, "out"_a);

  m.def("topk_softmax", [](uintptr_t logits, int64_t T, int64_t E, int64_t k, bool renormalise, uintptr_t weights, uintptr_t experts) {
    call_outside_gil_if(T * E > kReleaseGilFloats / 16, [&] {
      topk_softmax(reinterpret_cast<const float*>(logits), T, E, k, renormalise, reinterpret_cast<float*>(weights),
                   reinterpret_cast<int64_t*>(experts));
    });
  }, "logits"_a, "T"_a, "E"_a, "k"_a, "renormalise"_a, "weights"_a, "experts"_a);

  nb::class_<AttentionStep>(m, "AttentionStep")
      .def("__init__", [](AttentionStep* self, int64_t T, uintptr_t cos, uintptr_t sin, uintptr_t kv_base, int64_t B,
                          int64_t blocks_per_seq, uintptr_t block_table, uintptr_t seq_of_token, uintptr_t pos_of_token,
                          uintptr_t start_of_seq) {
        new (self) AttentionStep{T,
                                 reinterpret_cast<const float*>(cos),
                                 reinterpret_cast<const float*>(sin),
                                 reinterpret_cast<void*>(kv_base),
                                 B,
                                 blocks_per_seq,
                                 reinterpret_cast<const int32_t*>(block_table),
                                 reinterpret_cast<const int32_t*>(seq_of_token),
                                 reinterpret_cast<const int32_t*>(pos_of_token),
                                 reinterpret_cast<const int32_t*>(start_of_seq)};
      });

  nb::class_<Adapted>(m, "Adapted")
      .def(nb::init<>())
      .def("append", [](Adapted& self, int64_t first, int64_t last, const LowRank* q, const LowRank* k, const LowRank* v, const LowRank* o) {
        if (first < 0 || first > last) throw std::invalid_argument("rows must be a range that begins at 0 or later");
        self.rows.push_back({first, last, q, k, v, o});
      }, "first"_a, "last"_a, "q"_a.none(), "k"_a.none(), "v"_a.none(), "o"_a.none());

  nb::class_<AttentionLayer>(m, "AttentionLayer")
      .def("forward", [](const AttentionLayer& layer, const AttentionStep& step, uintptr_t x, uintptr_t out, const Adapted* adapted) {
        return static_cast<int>(attention_forward(layer, step, reinterpret_cast<const float*>(x), reinterpret_cast<float*>(out),
                                                  rows_of(adapted)));
      }, "step"_a, "x"_a, "out"_a, "adapted"_a.none(), nb::call_guard<nb::gil_scoped_release>())
      .def("scratch_bytes", [](const AttentionLayer& layer, int64_t T) { return attention_scratch_bytes(layer, T); }, "T"_a);
  nb::class_<LayerFront>(m, "LayerFront")
      .def("forward", [](const LayerFront& layer, const AttentionStep& step, uintptr_t x, uintptr_t hidden, uintptr_t normed,
                         uintptr_t logits, uintptr_t weights, uintptr_t experts, const Adapted* adapted) {
        const FrontResults out{reinterpret_cast<float*>(hidden), reinterpret_cast<float*>(normed), reinterpret_cast<float*>(logits),
                               reinterpret_cast<float*>(weights), reinterpret_cast<int64_t*>(experts)};
        return static_cast<int>(layer_front(layer, step, reinterpret_cast<const float*>(x), out, rows_of(adapted)));
      }, "step"_a, "x"_a, "hidden"_a, "normed"_a, "logits"_a, "weights"_a, "experts"_a, "adapted"_a.none(),
         nb::call_guard<nb::gil_scoped_release>());
  m.def("make_front", &make_front, "attention"_a, "before"_a, "before_eps"_a, "before_offset"_a, "after"_a, "after_eps"_a,
        "after_offset"_a, "router"_a.none(), "top_k"_a, "renormalise"_a);
  m.def("make_attention", &make_attention, "q"_a, "k"_a, "v"_a, "o"_a, "n_heads"_a, "n_kv_heads"_a, "head_dim"_a, "rotary_dim"_a,
        "layer"_a, "n_layers"_a, "scale"_a, "norm"_a, "q_norm"_a, "k_norm"_a, "eps"_a, "unit_offset"_a, "output_gate"_a,
        "window"_a, "sinks"_a);
}
