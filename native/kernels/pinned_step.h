// The single tokens of a step, each under its sequence's pinned rosters: routed layer by layer, counted when all of it is
// done, so that a step that fails leaves the rosters as they were. One serves all steps of the same sequences and rosters. The caller owns rosters and results. Must not know:
// phases, prefixes, how a change of topic is seen.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/pinned_roster.h"

namespace stoker {

// Sums over the tokens and layers that were routed.
struct RosterMeters {
  int64_t tokens = 0;
  int64_t kept = 0;            // choices of the gate that are used
  int64_t changed_tokens = 0;  // tokens with other experts than the gate's
  double mass = 0.0, kl = 0.0;  // as in RosterToken
};

class PinnedStep {
 public:
  // rosters[l * T + t]: of token t in layer l; a layer's are all there or all without members, and all of one E and K.
  // renormalise: [L].
  PinnedStep(std::vector<PinnedRoster> rosters, std::vector<bool> renormalise, int64_t T);

  int64_t layers() const { return static_cast<int64_t>(renormalise_.size()); }
  int64_t tokens() const { return T_; }
  const PinnedRoster& roster(int64_t layer, int64_t row) const { return rosters_[at(layer, row)]; }
  bool covers(int64_t layer) const { return roster(layer, 0).member != nullptr; }

  // The tokens' routes in a layer that is covered, from the gate's [T, E] and [T, K]. False: one has no route, see
  // pinned_token, and the layer counts as not routed.
  bool route(int64_t layer, const GateRow& gate);

  // A new step, with results [L, T, K] of its own: nothing is routed yet.
  void begin(const UsedRow& out) {
    out_ = out;
    routed_.assign(routed_.size(), false);
  }
  void skip(int64_t layer) { routed_[static_cast<size_t>(layer)] = false; }
  bool routed(int64_t layer) const { return routed_[static_cast<size_t>(layer)]; }
  const RosterToken& token(int64_t layer, int64_t row) const { return tokens_[at(layer, row)]; }

  // Token `number` of the sequence of `row` has used what it was routed to, in all layers that were.
  void count(int64_t row, int64_t number) const;

  RosterMeters take_meters() { return std::exchange(meters_, {}); }

 private:
  size_t at(int64_t layer, int64_t row) const { return static_cast<size_t>(layer * T_ + row); }
  UsedRow out_at(int64_t layer, int64_t row) const;

  std::vector<PinnedRoster> rosters_;
  std::vector<RosterToken> tokens_;
  std::vector<bool> renormalise_, routed_;
  int64_t T_ = 0, K_ = 0;
  UsedRow out_;
  RosterMeters meters_;
};

}  // namespace stoker
