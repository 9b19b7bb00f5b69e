// Python bindings of pinned rosters. Addresses come as integers: the door (stoker/native/roster.py) has checked shapes, dtypes
// and contiguity; here only the experts' numbers are checked, because that is cheap in C++ alone. The GIL stays held: a call
// is over sooner than another thread could take it.
#pragma once
#include <nanobind/nanobind.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>

#include "kernels/pinned_roster.h"

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

// A tuple a row (range, held, mass, kl, changed, kept), or None where one has a logit that is not finite. Row t is rosters[t]'s.
inline nanobind::object pinned_tokens(nanobind::list rosters, uintptr_t logits, uintptr_t probabilities, uintptr_t gate,
                                      uintptr_t gate_weights, bool renormalise, uintptr_t used, uintptr_t weights, uintptr_t free) {
  nanobind::list found;
  int64_t t = 0;
  for (nanobind::handle item : rosters) {
    const PinnedRoster& roster = nanobind::cast<const PinnedRoster&>(item);
    const int64_t e = t * roster.E, k = t * roster.K;
    const GateRow row{reinterpret_cast<const float*>(logits) + e, reinterpret_cast<const float*>(probabilities) + e,
                      reinterpret_cast<const int64_t*>(gate) + k, reinterpret_cast<const float*>(gate_weights) + k};
    const UsedRow out{reinterpret_cast<int64_t*>(used) + k, reinterpret_cast<float*>(weights) + k, reinterpret_cast<int64_t*>(free) + k};
    check_ids(row.experts, roster);
    RosterToken token;
    if (!pinned_token(roster, row, renormalise, out, token)) return nanobind::none();
    found.append(nanobind::make_tuple(token.range, token.held, token.mass, token.kl, token.changed, token.kept));
    ++t;
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
      }, "member"_a, "count"_a, "last"_a, "E"_a, "K"_a)
      .def("use", [](const PinnedRoster& roster, uintptr_t experts, int64_t token) {
        check_ids(reinterpret_cast<const int64_t*>(experts), roster);
        use_pinned(roster, reinterpret_cast<const int64_t*>(experts), token);
      }, "experts"_a, "token"_a);
  m.def("pinned_tokens", &pinned_tokens, "rosters"_a, "logits"_a, "probabilities"_a, "gate"_a, "gate_weights"_a, "renormalise"_a,
        "used"_a, "weights"_a, "free"_a);
  m.def("held_shares", &held_shares, "scores"_a, "free"_a, "member"_a, "T"_a, "K"_a, "held"_a);
}
