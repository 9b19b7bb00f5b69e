#include "kernels/pinned_step.h"

#include <algorithm>

namespace stoker {

PinnedStep::PinnedStep(std::vector<PinnedRoster> rosters, std::vector<bool> renormalise, int64_t T)
    : rosters_(std::move(rosters)), tokens_(rosters_.size()), renormalise_(std::move(renormalise)),
      routed_(renormalise_.size()), T_(T) {
  for (const PinnedRoster& roster : rosters_) K_ = std::max(K_, roster.K);
}

UsedRow PinnedStep::out_at(int64_t layer, int64_t row) const {
  const int64_t k = (layer * T_ + row) * K_;
  return {out_.experts + k, out_.weights + k, out_.free + k};
}

bool PinnedStep::route(int64_t layer, const GateRow& gate) {
  const auto l = static_cast<size_t>(layer);
  const int64_t E = roster(layer, 0).E;
  routed_[l] = false;
  RosterMeters added;
  for (int64_t t = 0; t < T_; ++t) {
    const GateRow row{gate.logits + t * E, gate.probabilities + t * E, gate.experts + t * K_, gate.weights + t * K_};
    RosterToken& token = tokens_[at(layer, t)] = {};
    if (!pinned_token(roster(layer, t), row, renormalise_[l], out_at(layer, t), token)) return false;
    ++added.tokens, added.kept += token.kept, added.changed_tokens += token.kept != K_;
    added.mass += token.mass, added.kl += token.kl;
  }
  meters_.tokens += added.tokens, meters_.kept += added.kept, meters_.changed_tokens += added.changed_tokens;
  meters_.mass += added.mass, meters_.kl += added.kl;
  return routed_[l] = true;
}

void PinnedStep::count(int64_t row, int64_t number) const {
  for (int64_t layer = 0; layer < layers(); ++layer) {
    if (routed(layer)) use_pinned(roster(layer, row), out_at(layer, row).experts, number);
  }
}

}  // namespace stoker
