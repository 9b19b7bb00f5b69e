// Python bindings of pinned rosters. Addresses come as integers: the door (stoker/native/roster.py) has checked shapes, dtypes
// and contiguity; here only the experts' numbers are checked, because that is cheap in C++ alone. The GIL stays held: a call
// is over sooner than another thread could take it.
#pragma once
#include <nanobind/nanobind.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/pinned_roster.h"
#include "kernels/pinned_step.h"

namespace stoker {

inline PinnedRoster make_pinned_roster(uintptr_t member, uintptr_t count, uintptr_t last, int64_t E, int64_t K) {
  const PinnedRoster roster{reinterpret_cast<const bool*>(member), reinterpret_cast<int64_t*>(count),
                            reinterpret_cast<int64_t*>(last), E, K};
  if (K < 1 || std::count(roster.member, roster.member + E, true) < K) throw std::invalid_argument("fewer members than a token uses");
  return roster;
}

inline void check_ids(const int64_t* ids, const PinnedRoster& roster) {
  for (int64_t k = 0; k < roster.K; ++k) {
    if (ids[k] < 0 || ids[k] >= roster.E) {
      throw std::out_of_range("expert " + std::to_string(ids[k]) + " is not in [0, " + std::to_string(roster.E) + ")");
    }
  }
}

inline void check_place(int64_t place, int64_t places, const char* of) {
  if (place < 0 || place >= places) throw std::out_of_range(std::string(of) + " " + std::to_string(place) + " of " + std::to_string(places));
}

// rosters: a list a token of a roster or None a layer. A layer is covered where all of its rosters are there and have one shape.
inline PinnedStep make_pinned_step(nanobind::list rosters, nanobind::list renormalise) {
  const size_t T = rosters.size(), L = renormalise.size();
  if (T == 0) throw std::invalid_argument("a step without tokens");
  std::vector<PinnedRoster> found(L * T);
  std::vector<bool> divided(L);
  for (size_t l = 0; l < L; ++l) divided[l] = nanobind::cast<bool>(renormalise[l]);
  for (size_t t = 0; t < T; ++t) {
    const auto row = nanobind::cast<nanobind::list>(rosters[t]);
    if (row.size() != L) throw std::invalid_argument("the sequences have not the same layers");
    for (size_t l = 0; l < L; ++l) {
      if (!row[l].is_none()) found[l * T + t] = nanobind::cast<const PinnedRoster&>(row[l]);
    }
  }
  for (size_t l = 0; l < L; ++l) {
    const PinnedRoster first = found[l * T];
    const auto fits = [&](const PinnedRoster& one) { return one.member != nullptr && one.E == first.E && one.K == first.K; };
    if (!std::all_of(&found[l * T], &found[l * T] + T, fits)) std::fill_n(&found[l * T], T, PinnedRoster{});
  }
  return {std::move(found), std::move(divided), static_cast<int64_t>(T)};
}

inline bool route_pinned(PinnedStep& step, int64_t layer, uintptr_t logits, uintptr_t probabilities, uintptr_t gate,
                         uintptr_t gate_weights) {
  check_place(layer, step.layers(), "layer");
  if (!step.covers(layer)) throw std::invalid_argument("a layer without its rosters");
  const GateRow row{reinterpret_cast<const float*>(logits), reinterpret_cast<const float*>(probabilities),
                    reinterpret_cast<const int64_t*>(gate), reinterpret_cast<const float*>(gate_weights)};
  for (int64_t t = 0; t < step.tokens(); ++t) check_ids(row.experts + t * step.roster(layer, t).K, step.roster(layer, t));
  return step.route(layer, row);
}

// (layer, range, held, changed) of each layer that was routed.
inline nanobind::list finish_pinned(const PinnedStep& step, int64_t row, int64_t number) {
  check_place(row, step.tokens(), "token");
  step.count(row, number);
  nanobind::list found;
  for (int64_t layer = 0; layer < step.layers(); ++layer) {
    const RosterToken& token = step.token(layer, row);
    if (step.routed(layer)) found.append(nanobind::make_tuple(layer, token.range, token.held, token.changed));
  }
  return found;
}

inline void held_shares(uintptr_t scores, uintptr_t free, uintptr_t member, int64_t T, int64_t K, uintptr_t held) {
  for (int64_t t = 0; t < T; ++t) {
    reinterpret_cast<double*>(held)[t] = held_share(reinterpret_cast<const double*>(scores) + t * K,
                                                    reinterpret_cast<const int64_t*>(free) + t * K, reinterpret_cast<const bool*>(member), K);
  }
}

}  // namespace stoker

inline void bind_roster(nanobind::module_& m) {
  namespace nb = nanobind;
  using namespace nb::literals;
  using namespace stoker;

  nb::class_<PinnedRoster>(m, "PinnedRoster")
      .def("__init__", [](PinnedRoster* self, uintptr_t member, uintptr_t count, uintptr_t last, int64_t E, int64_t K) {
        new (self) PinnedRoster(make_pinned_roster(member, count, last, E, K));
      }, "member"_a, "count"_a, "last"_a, "E"_a, "K"_a);
  nb::class_<PinnedStep>(m, "PinnedStep")
      .def("__init__", [](PinnedStep* self, nb::list rosters, nb::list renormalise) {
        new (self) PinnedStep(make_pinned_step(rosters, renormalise));
      }, "rosters"_a, "renormalise"_a)
      .def("experts", [](const PinnedStep& step) {
        nb::list found;
        for (int64_t layer = 0; layer < step.layers(); ++layer) found.append(step.covers(layer) ? step.roster(layer, 0).E : 0);
        return found;
      })
      .def("route", &route_pinned, "layer"_a, "logits"_a, "probabilities"_a, "gate"_a, "gate_weights"_a)
      .def("begin", [](PinnedStep& step, uintptr_t used, uintptr_t weights, uintptr_t free) {
        step.begin({reinterpret_cast<int64_t*>(used), reinterpret_cast<float*>(weights), reinterpret_cast<int64_t*>(free)});
      }, "used"_a, "weights"_a, "free"_a)
      .def("skip", [](PinnedStep& step, int64_t layer) {
        check_place(layer, step.layers(), "layer");
        step.skip(layer);
      }, "layer"_a)
      .def("finish", &finish_pinned, "row"_a, "number"_a)
      .def("take_meters", [](PinnedStep& step) {
        const RosterMeters found = step.take_meters();
        return nb::make_tuple(found.tokens, found.kept, found.changed_tokens, found.mass, found.kl);
      });
  m.def("held_shares", &held_shares, "scores"_a, "free"_a, "member"_a, "T"_a, "K"_a, "held"_a);
}
