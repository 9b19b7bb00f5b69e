// One token under a pinned roster: the best of the members, their weights, and what the rule and its meters ask about the
// token. The caller owns all memory. Must not know: phases, prefixes, how a change of topic is seen.
#pragma once
#include <cstdint>

namespace stoker {

struct PinnedRoster {
  const bool* member = nullptr;  // [E]
  int64_t* count = nullptr;      // [E] how often each expert was used
  int64_t* last = nullptr;       // [E] the token of its last use
  int64_t E = 0, K = 0;          // at least K members
};

struct GateRow {
  const float* logits = nullptr;         // [E]
  const float* probabilities = nullptr;  // [E] their softmax
  const int64_t* experts = nullptr;      // [K] the gate's own route
  const float* weights = nullptr;        // [K]
};

struct UsedRow {
  int64_t* experts = nullptr;  // [K] what the token uses
  float* weights = nullptr;    // [K]
  int64_t* free = nullptr;     // [K] the best of all experts
};

struct RosterToken {
  double range = 0.0;         // largest - smallest logit
  double held = 0.0;          // held_share
  double mass = 1.0;          // probability of what is used over that of the gate's choices
  double kl = 0.0;            // from the gate's route to the used one, nats
  int64_t changed = 0;        // of the free choices, how many are not used
  int64_t kept = 0;           // of the gate's choices, how many are used
};

// How much of the weight of the free choices (softmax of their scores, [K], the best first) the roster holds.
double held_share(const double* scores, const int64_t* free, const bool* member, int64_t K);

// The choices fall by logit; equal ones: lower id first. Where they are the gate's, its ids and weights are copied; else the
// weights are the members' probabilities, divided by their sum if `renormalise`. False: a logit is not finite
// or there are fewer than K members, and nothing is said.
bool pinned_token(const PinnedRoster& roster, const GateRow& gate, bool renormalise, const UsedRow& used, RosterToken& token);

// `token` has used experts [K].
void use_pinned(const PinnedRoster& roster, const int64_t* experts, int64_t token);

}  // namespace stoker
