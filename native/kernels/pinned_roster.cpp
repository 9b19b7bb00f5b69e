#include "kernels/pinned_roster.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace stoker {
namespace {

constexpr double kTiny = 1e-9;    // what the meters take for the weight of an expert that is not used
constexpr float kNoZero = 1e-20f;  // as in stoker/routing/select.py: weights are divided by their sum and this

// The K best of the experts that `may` lets in, best first, by insertion; equal ones: lower id first. How many there are.
template <class May>
int64_t best(const float* logits, int64_t E, int64_t K, int64_t* found, May may) {
  int64_t n = 0;
  for (int64_t e = 0; e < E; ++e) {
    if (!may(e) || (n == K && !(logits[e] > logits[found[K - 1]]))) continue;
    int64_t at = n < K ? n++ : K - 1;
    for (; at > 0 && logits[e] > logits[found[at - 1]]; --at) found[at] = found[at - 1];
    found[at] = e;
  }
  return n;
}

bool among(const int64_t* ids, int64_t K, int64_t id) { return std::find(ids, ids + K, id) != ids + K; }

double total(const float* p, const int64_t* ids, int64_t K) {
  double sum = 0.0;
  for (int64_t k = 0; k < K; ++k) sum += p[ids[k]];
  return sum;
}

// torch adds a cumulative sum up in double and rounds it once; so does this, for the same bits.
void weigh(const float* p, const int64_t* ids, int64_t K, bool renormalise, float* weights) {
  const float divisor = renormalise ? static_cast<float>(total(p, ids, K)) + kNoZero : 1.0f;
  for (int64_t k = 0; k < K; ++k) weights[k] = p[ids[k]] / divisor;
}

double route_kl(const float* p, const int64_t* gate, const int64_t* used, int64_t K, double gate_sum, double used_sum) {
  double kl = 0.0;
  for (int64_t k = 0; k < K; ++k) {
    const double from = p[gate[k]] / gate_sum;
    const double to = among(used, K, gate[k]) ? std::max(p[gate[k]] / used_sum, kTiny) : kTiny;
    kl += from * std::log(std::max(from, kTiny) / to);
  }
  return kl;
}

void meter(const float* p, const int64_t* gate, const int64_t* used, int64_t K, RosterToken& token) {
  const double gate_sum = std::max(total(p, gate, K), kTiny), used_sum = total(p, used, K);
  token.mass = used_sum / gate_sum;
  token.kl = route_kl(p, gate, used, K, gate_sum, std::max(used_sum, kTiny));
}

}  // namespace

double held_share(const double* scores, const int64_t* free, const bool* member, int64_t K) {
  double all = 0.0, held = 0.0;
  for (int64_t k = 0; k < K; ++k) {
    const double weight = std::exp(scores[k] - scores[0]);
    all += weight;
    if (member[free[k]]) held += weight;
  }
  return held / all;
}

bool pinned_token(const PinnedRoster& roster, const GateRow& gate, bool renormalise, const UsedRow& used, RosterToken& token) {
  const int64_t E = roster.E, K = roster.K;
  if (!std::all_of(gate.logits, gate.logits + E, [](float x) { return std::isfinite(x); })) return false;
  const auto [low, high] = std::minmax_element(gate.logits, gate.logits + E);
  token.range = static_cast<double>(*high) - static_cast<double>(*low);
  best(gate.logits, E, K, used.free, [](int64_t) { return true; });
  if (best(gate.logits, E, K, used.experts, [&](int64_t e) { return roster.member[e]; }) < K) return false;
  thread_local std::vector<double> scores;
  scores.assign(static_cast<size_t>(K), 0.0);
  for (int64_t k = 0; k < K; ++k) {
    scores[static_cast<size_t>(k)] = gate.logits[used.free[k]];
    token.changed += !among(used.experts, K, used.free[k]);
    token.kept += among(used.experts, K, gate.experts[k]);
  }
  token.held = held_share(scores.data(), used.free, roster.member, K);
  if (token.kept == K) {
    std::copy_n(gate.experts, K, used.experts);
    std::copy_n(gate.weights, K, used.weights);
    return true;
  }
  weigh(gate.probabilities, used.experts, K, renormalise, used.weights);
  meter(gate.probabilities, gate.experts, used.experts, K, token);
  return true;
}

void use_pinned(const PinnedRoster& roster, const int64_t* experts, int64_t token) {
  for (int64_t k = 0; k < roster.K; ++k) {
    ++roster.count[experts[k]];
    roster.last[experts[k]] = token;
  }
}

}  // namespace stoker
