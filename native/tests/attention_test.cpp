// Attention against a plain double-precision reference, on every instruction set and number of threads; run under sanitizers.
// Cache memory is exactly as large as it must be, and pages begin as NaN, so that a stray read shows in both ways.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "kernels/attention.h"
#include "kernels/attention_ops.h"
#include "kernels/dispatch.h"
#include "kernels/layer_front.h"
#include "kernels/matmul.h"
#include "kernels/norm.h"
#include "kernels/thread_pool.h"
#include "kernels/topk.h"

using namespace stoker;

#define CHECK(condition)                                                     \
  do {                                                                       \
    if (!(condition)) {                                                      \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);   \
      std::exit(1);                                                          \
    }                                                                        \
  } while (0)

namespace {

std::mt19937 random_bits(1);

std::vector<float> noise(int64_t n, float size = 1.0f) {
  std::normal_distribution<float> normal(0.0f, size);
  std::vector<float> v(static_cast<size_t>(n));
  for (float& x : v) x = normal(random_bits);
  return v;
}

// An f32 matrix in tile16, and the plain rows that it came from.
struct Weights {
  std::vector<float> rows, buffer;
  Matrix matrix;
  Weights(int64_t n_rows, int64_t cols) : rows(noise(n_rows * cols, 1.0f / std::sqrt(static_cast<float>(cols)))) {
    const int64_t tiles = (n_rows + 15) / 16;
    buffer.assign(static_cast<size_t>(tiles * cols * 16 + 16), 0.0f);
    float* codes = buffer.data();
    while (reinterpret_cast<uintptr_t>(codes) % 64 != 0) ++codes;
    for (int64_t r = 0; r < n_rows; ++r)
      for (int64_t c = 0; c < cols; ++c) codes[(r / 16 * cols + c) * 16 + r % 16] = rows[static_cast<size_t>(r * cols + c)];
    matrix.format = Format::f32, matrix.rows = n_rows, matrix.cols = cols, matrix.codes = codes;
  }
  Weights(const Weights&) = delete;
  std::vector<double> times(const std::vector<double>& x) const {
    std::vector<double> y(static_cast<size_t>(matrix.rows), 0.0);
    for (size_t r = 0; r < y.size(); ++r)
      for (size_t c = 0; c < x.size(); ++c) y[r] += x[c] * rows[r * x.size() + c];
    return y;
  }
};

struct Shape {
  int64_t heads, kv_heads, head_dim, rotary_dim, window;
  QkNorm norm;
  bool gate, sinks;
};

struct Case {
  static constexpr int64_t kWidth = 40, kTokens = 150;
  Shape s;
  Weights q, k, v, o;
  std::vector<float> q_norm, k_norm, sinks, x, cos, sin;
  AttentionLayer layer;

  explicit Case(const Shape& shape)
      : s(shape), q(s.heads * s.head_dim * (s.gate ? 2 : 1), kWidth), k(s.kv_heads * s.head_dim, kWidth),
        v(s.kv_heads * s.head_dim, kWidth), o(kWidth, s.heads * s.head_dim), q_norm(noise(s.head_dim * (whole() ? s.heads : 1))),
        k_norm(noise(s.head_dim * (whole() ? s.kv_heads : 1))), sinks(noise(s.heads)), x(noise(kTokens * kWidth)) {
    for (int64_t t = 0; t < kTokens; ++t)
      for (int64_t d = 0; d < s.rotary_dim; ++d) {
        const double turn = static_cast<double>(d % (s.rotary_dim / 2)) / static_cast<double>(s.rotary_dim / 2);
        const double angle = static_cast<double>(t) / std::pow(100.0, turn);
        cos.push_back(static_cast<float>(std::cos(angle))), sin.push_back(static_cast<float>(std::sin(angle)));
      }
    layer.q = q.matrix, layer.k = k.matrix, layer.v = v.matrix, layer.o = o.matrix;
    layer.n_heads = s.heads, layer.n_kv_heads = s.kv_heads, layer.head_dim = s.head_dim, layer.rotary_dim = s.rotary_dim;
    layer.layer = 1, layer.n_layers = 2, layer.scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
    layer.norm = s.norm, layer.q_norm = q_norm.data(), layer.k_norm = k_norm.data(), layer.eps = 1e-5f;
    layer.output_gate = s.gate, layer.window = s.window, layer.sinks = s.sinks ? sinks.data() : nullptr;
  }
  bool whole() const { return s.norm == QkNorm::whole; }

  void finish(std::vector<double>& heads, int64_t n, const std::vector<float>& weight, int64_t t) const {
    const int64_t span = whole() ? n * s.head_dim : s.head_dim, half = s.rotary_dim / 2;
    for (int64_t at = 0; s.norm != QkNorm::none && at < n * s.head_dim; at += span) {
      double sum = 0;
      for (int64_t d = 0; d < span; ++d) sum += heads[at + d] * heads[at + d];
      for (int64_t d = 0; d < span; ++d) heads[at + d] *= weight[d] / std::sqrt(sum / static_cast<double>(span) + 1e-5);
    }
    for (int64_t h = 0; h < n; ++h)
      for (int64_t d = 0; d < half; ++d) {
        double& a = heads[h * s.head_dim + d];
        double& b = heads[h * s.head_dim + d + half];
        const double c = cos[t * s.rotary_dim + d], w = sin[t * s.rotary_dim + d], old = a;
        a = a * c - b * w, b = b * c + old * w;
      }
  }

  std::vector<double> reference() const {
    std::vector<std::vector<double>> keys, values;
    std::vector<double> out;
    for (int64_t t = 0; t < kTokens; ++t) {
      const std::vector<double> row(x.begin() + t * kWidth, x.begin() + (t + 1) * kWidth);
      std::vector<double> both = q.times(row), query, gate, key = k.times(row), mixed;
      for (int64_t h = 0; h < s.heads; ++h) {
        const auto at = both.begin() + h * s.head_dim * (s.gate ? 2 : 1);
        query.insert(query.end(), at, at + s.head_dim);
        if (s.gate) gate.insert(gate.end(), at + s.head_dim, at + 2 * s.head_dim);
      }
      finish(query, s.heads, q_norm, t), finish(key, s.kv_heads, k_norm, t);
      keys.push_back(key), values.push_back(v.times(row));
      for (int64_t h = 0; h < s.heads; ++h) {
        const int64_t kv = h / (s.heads / s.kv_heads) * s.head_dim, from = s.window ? std::max<int64_t>(0, t - s.window + 1) : 0;
        double sum = s.sinks ? std::exp(static_cast<double>(sinks[h])) : 0.0;
        std::vector<double> head(static_cast<size_t>(s.head_dim), 0.0);
        for (int64_t j = from; j <= t; ++j) {
          double score = 0;
          for (int64_t d = 0; d < s.head_dim; ++d) score += query[h * s.head_dim + d] * keys[j][kv + d];
          const double p = std::exp(score / std::sqrt(static_cast<double>(s.head_dim)));
          sum += p;
          for (int64_t d = 0; d < s.head_dim; ++d) head[d] += p * values[j][kv + d];
        }
        for (int64_t d = 0; d < s.head_dim; ++d)
          mixed.push_back(head[d] / sum / (s.gate ? 1.0 + std::exp(-gate[h * s.head_dim + d]) : 1.0));
      }
      const std::vector<double> y = o.times(mixed);
      out.insert(out.end(), y.begin(), y.end());
    }
    return out;
  }

  // The tokens in calls of `chunk`, over fresh pages in descending order.
  std::vector<float> run(int64_t chunk) const {
    const int64_t blocks = (kTokens + kKvBlockTokens - 1) / kKvBlockTokens;
    const int64_t block_halves = 2 * 2 * s.kv_heads * kKvBlockTokens * s.head_dim;
    std::vector<uint16_t> cache(static_cast<size_t>(blocks * block_halves), 0x7e00);
    std::vector<int32_t> table, seq(static_cast<size_t>(kTokens), 0), pos;
    for (int64_t b = 0; b < blocks; ++b) table.push_back(static_cast<int32_t>(blocks - 1 - b));
    for (int64_t t = 0; t < kTokens; ++t) pos.push_back(static_cast<int32_t>(t));
    const int32_t start = 0;
    std::vector<float> out(static_cast<size_t>(kTokens * kWidth), NAN);
    for (int64_t t = 0; t < kTokens; t += chunk) {
      const int64_t n = std::min(chunk, kTokens - t);
      const AttentionStep step{n, cos.data() + t * s.rotary_dim, sin.data() + t * s.rotary_dim, cache.data(), 1, blocks, table.data(),
                               seq.data() + t, pos.data() + t, &start};
      CHECK(attention_forward(layer, step, x.data() + t * kWidth, out.data() + t * kWidth) == AttentionStatus::ok);
    }
    return out;
  }
};

double relative(const std::vector<float>& got, const std::vector<double>& want) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]), size += want[i] * want[i];
  }
  return std::sqrt(difference / size);
}

void test_blocks() {
  const Shape shapes[] = {
      {4, 4, 16, 16, 0, QkNorm::head, false, false}, {8, 1, 24, 8, 0, QkNorm::whole, false, false}, {6, 2, 72, 36, 0, QkNorm::none, true, false},
      {4, 2, 7, 4, 50, QkNorm::head, false, true},   {50, 1, 16, 16, 0, QkNorm::head, false, false}, {2, 1, 64, 0, 64, QkNorm::none, false, false}};
  for (const Shape& shape : shapes) {
    const Case c(shape);
    const std::vector<double> want = c.reference();
    for (const char* isa : {"avx512", "avx2", "portable"}) {
      if (!force_isa(isa)) continue;
      pool().resize(1);
      const std::vector<float> first = c.run(Case::kTokens);
      const double error = relative(first, want);
      if (!(error < 2e-3)) std::fprintf(stderr, "%s: head_dim %d: relative error %g\n", isa, static_cast<int>(shape.head_dim), error);
      CHECK(error < 2e-3);
      for (int threads : {1, 2, 4}) {
        pool().resize(threads);
        for (int64_t chunk : {int64_t{1}, int64_t{67}, Case::kTokens}) CHECK(c.run(chunk) == first);
      }
    }
  }
}

double half_value(uint32_t h) {
  return h < 0x400 ? std::ldexp(h, -24) : std::ldexp(1024 + (h & 0x3ff), static_cast<int>(h >> 10) - 25);
}

// The conversion to half precision agrees with the hardware's at every half and around every rounding point.
void test_half() {
  std::vector<float> values;
  for (uint32_t h = 0; h < 0x7c00; ++h) {
    const double exact = half_value(h), next = half_value(h + 1);  // past the last half: 65536
    const float middle = static_cast<float>((exact + next) / 2);
    for (float f : {static_cast<float>(exact), middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f)}) {
      values.push_back(f), values.push_back(-f);
    }
  }
  std::vector<std::vector<uint16_t>> answers;
  for (const char* isa : {"portable", "avx2", "avx512"}) {
    if (!force_isa(isa)) continue;
    std::vector<uint16_t>& bits = answers.emplace_back(values.size());
    CHECK(attention_ops().to_half(values.data(), bits.data(), static_cast<int64_t>(values.size())));  // 65520 and above are there
    CHECK(!attention_ops().to_half(values.data(), bits.data(), static_cast<int64_t>(values.size()) - 6));
    attention_ops().to_half(values.data(), bits.data(), static_cast<int64_t>(values.size()));
    CHECK(bits == answers[0]);
    for (uint32_t h = 0; h < 0x7c00; ++h) CHECK(bits[8 * h] == h && bits[8 * h + 1] == (h | 0x8000));
    const float special[] = {INFINITY, -INFINITY, NAN, 1e30f, 0.0f};
    uint16_t half[5];
    CHECK(!attention_ops().to_half(special, half, 3));
    CHECK(half[0] == 0x7c00 && half[1] == 0xfc00 && (half[2] & 0x7c00) == 0x7c00 && (half[2] & 0x3ff) != 0);
    CHECK(attention_ops().to_half(special + 3, half, 2));
  }
}

void test_bad_indices() {
  const Case c({2, 1, 16, 16, 0, QkNorm::none, false, false});
  std::vector<uint16_t> cache(2 * 2 * 64 * 16);
  std::vector<float> out(Case::kWidth);
  const auto status = [&](int32_t block, int32_t seq, int32_t pos, int32_t start) {
    const AttentionStep step{1, c.cos.data(), c.sin.data(), cache.data(), 1, 1, &block, &seq, &pos, &start};
    return attention_forward(c.layer, step, c.x.data(), out.data());
  };
  CHECK(status(0, 0, 0, 0) == AttentionStatus::ok);
  CHECK(status(0, 0, 63, 63) == AttentionStatus::ok);
  CHECK(status(0, 1, 0, 0) == AttentionStatus::bad_sequence && status(0, -1, 0, 0) == AttentionStatus::bad_sequence);
  CHECK(status(0, 0, 64, 0) == AttentionStatus::bad_position && status(0, 0, 2, 3) == AttentionStatus::bad_position);
  CHECK(status(0, 0, -1, -1) == AttentionStatus::bad_position && status(-1, 0, 0, 0) == AttentionStatus::bad_block);
}

void test_norm_and_choice() {
  const std::vector<float> x = noise(200 * 1000), weight = noise(1000);
  std::vector<float> out(x.size()), row(1000);
  rms_norm(x.data(), weight.data(), 200, 1000, 1e-6f, false, out.data());
  for (int64_t t = 0; t < 200; ++t) {
    rms_norm(x.data() + t * 1000, weight.data(), 1, 1000, 1e-6f, false, row.data());
    for (size_t d = 0; d < 1000; ++d) CHECK(row[d] == out[t * 1000 + d]);
  }
  const float logits[] = {0.0f, 3.0f, 3.0f, -INFINITY, 2.0f};
  std::vector<float> many, weights(2000 * 5);
  std::vector<int64_t> experts(2000 * 5);
  for (int t = 0; t < 2000; ++t) many.insert(many.end(), logits, logits + 5);
  topk_softmax(many.data(), 2000, 5, 5, true, weights.data(), experts.data());
  const int64_t order[] = {1, 2, 4, 0, 3};
  for (size_t i = 0; i < experts.size(); ++i) CHECK(experts[i] == order[i % 5]);
  CHECK(weights[0] == weights[1] && weights[4] == 0.0f && std::abs(weights[0] + weights[1] + weights[2] + weights[3] - 1.0f) < 1e-6f);
}

// One call equals its parts; many tokens go to several threads in every part.
void test_front() {
  const Case c({2, 1, 16, 16, 0, QkNorm::none, false, false});
  const int64_t D = c.layer.q.cols, E = 8, K = 3;
  const std::vector<float> before = noise(static_cast<size_t>(D)), after = noise(static_cast<size_t>(D)), gate = noise(static_cast<size_t>(16 * D));
  LayerFront front;
  front.attention = c.layer, front.top_k = K, front.renormalise = true;
  front.before = {before.data(), 1e-6f, false}, front.after = {after.data(), 1e-5f, true};
  front.router.format = Format::f32, front.router.rows = E, front.router.cols = D, front.router.codes = gate.data();
  std::vector<uint16_t> cache(2 * 2 * 64 * 16);
  const int32_t block = 0, seq = 0, pos = 0, start = 0;
  const AttentionStep step{1, c.cos.data(), c.sin.data(), cache.data(), 1, 1, &block, &seq, &pos, &start};
  std::vector<float> hidden(static_cast<size_t>(D)), normed(hidden), logits(E), weights(K), wanted(hidden), rows(hidden), route(E), shares(K);
  std::vector<int64_t> experts(K), chosen(K);
  CHECK(layer_front(front, step, c.x.data(), {hidden.data(), normed.data(), logits.data(), weights.data(), experts.data()}) == AttentionStatus::ok);
  rms_norm(c.x.data(), before.data(), 1, D, 1e-6f, false, rows.data());
  CHECK(attention_forward(c.layer, step, rows.data(), wanted.data()) == AttentionStatus::ok);
  for (int64_t d = 0; d < D; ++d) CHECK(hidden[d] == c.x[d] + wanted[d]);
  rms_norm(hidden.data(), after.data(), 1, D, 1e-5f, true, rows.data());
  CHECK(rows == normed);
  matmul(front.router, rows.data(), 1, route.data());
  topk_softmax(route.data(), 1, E, K, true, shares.data(), chosen.data());
  CHECK(route == logits && shares == weights && chosen == experts);
  std::vector<float> many = noise(300000), twice(many.size());
  add_rows(many.data(), many.data(), static_cast<int64_t>(many.size()), twice.data());
  for (size_t i = 0; i < many.size(); ++i) CHECK(twice[i] == many[i] + many[i]);
}

}  // namespace

int main() {
  pool().resize(2);
  test_front();
  test_half();
  test_bad_indices();
  test_norm_and_choice();
  test_blocks();
  std::puts("attention: ok");
}
