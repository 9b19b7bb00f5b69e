// Row invariance, bounds and threads of the quantised kernels, for the sanitizers: every buffer is exactly as long as the
// layout says, so that a read or write past an end is seen. Values are checked against a plain dequantised sum.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "kernels/dispatch.h"
#include "kernels/experts.h"
#include "kernels/gather.h"
#include "kernels/half.h"
#include "kernels/low_rank.h"
#include "kernels/matmul.h"
#include "kernels/pinned_roster.h"
#include "kernels/thread_pool.h"

using namespace stoker;

namespace {

int failures = 0;

void check(bool ok, const char* what, const char* where) {
  if (ok) return;
  std::fprintf(stderr, "FAILED: %s (%s)\n", what, where);
  ++failures;
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Bytes = std::unique_ptr<char, Free>;

// Exactly `n` bytes that begin at a multiple of 64.
Bytes allocate(size_t n) { return Bytes(static_cast<char*>(std::aligned_alloc(64, (n + 63) / 64 * 64))); }

struct Weights {
  Matrix m;
  Bytes codes, scales, biases;
  std::vector<float> dense;  // [rows, cols]
};

uint16_t bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return static_cast<uint16_t>(u >> 16);
}

Weights make_weights(Format format, int bits, int group, int64_t rows, int64_t cols, std::mt19937& rng) {
  Weights w;
  w.m.format = format;
  w.m.bits = bits;
  w.m.group = group;
  w.m.rows = rows;
  w.m.cols = cols;
  const int64_t tiles = w.m.tiles();
  const int64_t words = format == Format::affine ? cols * bits / 32 : format == Format::bf16 ? (cols + 1) / 2 : cols;
  w.codes = allocate(static_cast<size_t>(tiles * words * 64));
  std::memset(w.codes.get(), 0, static_cast<size_t>(tiles * words * 64));
  uint32_t* codes = reinterpret_cast<uint32_t*>(w.codes.get());
  std::uniform_real_distribution<float> unit(0.5f, 1.0f);
  uint16_t *scales = nullptr, *biases = nullptr;
  if (format == Format::affine) {
    const size_t n = static_cast<size_t>(tiles * (cols / group) * 16);
    w.scales = allocate(2 * n);
    w.biases = allocate(2 * n);
    scales = reinterpret_cast<uint16_t*>(w.scales.get());
    biases = reinterpret_cast<uint16_t*>(w.biases.get());
    for (size_t i = 0; i < n; ++i) scales[i] = bf16(unit(rng) / 16), biases[i] = bf16(-unit(rng) / 2);
  }
  w.dense.resize(static_cast<size_t>(rows * cols));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const int64_t tile = r / 16, lane = r % 16;
      float value;
      if (format == Format::affine) {
        const uint32_t code = static_cast<uint32_t>(rng()) & ((1u << bits) - 1u);
        codes[(tile * words + c * bits / 32) * 16 + lane] |= code << (c * bits % 32);
        const int64_t g = (tile * (cols / group) + c / group) * 16 + lane;
        value = static_cast<float>(code) * bf16_to_float(scales[g]) + bf16_to_float(biases[g]);
      } else {
        value = bf16_to_float(bf16(unit(rng) - 0.75f));
        uint32_t u;
        std::memcpy(&u, &value, 4);
        if (format == Format::bf16) {
          codes[(tile * words + c / 2) * 16 + lane] |= (u >> 16) << (16 * (c % 2));
        } else {
          codes[(tile * words + c) * 16 + lane] = u;
        }
      }
      w.dense[static_cast<size_t>(r * cols + c)] = value;
    }
  }
  w.m.codes = w.codes.get();
  w.m.scales = scales;
  w.m.biases = biases;
  return w;
}

std::vector<float> random_rows(int64_t n, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = normal(rng);
  return x;
}

void test_matmul(const char* isa) {
  std::mt19937 rng(1);
  struct Case { Format format; int bits, group; int64_t rows, cols; };
  for (const Case& c : {Case{Format::affine, 4, 64, 37, 192}, Case{Format::affine, 4, 32, 16, 32}, Case{Format::affine, 4, 128, 50, 256},
                        Case{Format::affine, 8, 64, 5, 64}, Case{Format::affine, 8, 32, 33, 96}, Case{Format::affine, 8, 128, 17, 128},
                        Case{Format::bf16, 0, 0, 35, 77}, Case{Format::f32, 0, 0, 19, 45}}) {
    for (int activation_bits : {8, 16}) {
      Weights w = make_weights(c.format, c.bits, c.group, c.rows, c.cols, rng);
      w.m.activation_bits = activation_bits;
      const int64_t T = 100;  // encoded by all threads, which single rows are not
      const std::vector<float> x = random_rows(T * c.cols, rng);
      std::vector<float> all(static_cast<size_t>(T * c.rows)), one(static_cast<size_t>(c.rows));
      pool().resize(2);
      matmul(w.m, x.data(), T, all.data());
      double error = 0, size = 0;
      for (int64_t t = 0; t < T; ++t) {
        pool().resize(t % 3 + 1);
        matmul(w.m, x.data() + t * c.cols, 1, one.data());
        check(std::memcmp(one.data(), all.data() + t * c.rows, one.size() * 4) == 0, "a row depends on its company", isa);
        for (int64_t r = 0; r < c.rows; ++r) {
          double want = 0;
          for (int64_t k = 0; k < c.cols; ++k) want += double(x[static_cast<size_t>(t * c.cols + k)]) * w.dense[static_cast<size_t>(r * c.cols + k)];
          error += std::pow(one[static_cast<size_t>(r)] - want, 2);
          size += want * want;
        }
      }
      check(std::sqrt(error / size) < (activation_bits == 8 ? 1e-2 : 1e-4), "matmul is off by more than 1%, or 0.01% in 16 bits", isa);
      std::vector<float> rows(static_cast<size_t>(9 * c.cols));
      std::vector<int64_t> ids(9, c.rows - 1);
      ids[0] = 0;
      gather_rows(w.m, ids.data(), 9, rows.data());
      check(std::memcmp(rows.data(), w.dense.data(), static_cast<size_t>(c.cols) * 4) == 0, "gathered row differs", isa);
    }
  }
}

// A record of exactly record_bytes, filled from three matrices.
Bytes make_record(const Weights* w, PlacedMatrix* placed, int64_t& record_bytes) {
  int64_t at = 0;
  const auto take = [&](int64_t n) { const int64_t start = at; at = (at + n + 63) / 64 * 64; return start; };
  int64_t sizes[3][2];
  for (int i = 0; i < 3; ++i) {
    const Matrix& m = w[i].m;
    sizes[i][0] = m.tiles() * m.cols * m.bits / 32 * 64;
    sizes[i][1] = m.tiles() * (m.cols / m.group) * 32;
    placed[i] = {m, take(sizes[i][0]), take(sizes[i][1]), take(sizes[i][1]), -1};
  }
  record_bytes = at;
  Bytes record = allocate(static_cast<size_t>(at));
  for (int i = 0; i < 3; ++i) {
    std::memcpy(record.get() + placed[i].codes, w[i].m.codes, static_cast<size_t>(sizes[i][0]));
    std::memcpy(record.get() + placed[i].scales, w[i].m.scales, static_cast<size_t>(sizes[i][1]));
    std::memcpy(record.get() + placed[i].biases, w[i].m.biases, static_cast<size_t>(sizes[i][1]));
  }
  return record;
}

void test_experts(const char* isa) {
  std::mt19937 rng(2);
  const int64_t D = 64, F = 192;
  std::vector<Bytes> records;
  PlacedMatrix placed[3];
  std::vector<int64_t> addresses;
  for (int e = 0; e < 3; ++e) {
    const Weights w[3] = {make_weights(Format::affine, 4, 64, F, D, rng), make_weights(Format::affine, 4, 64, F, D, rng),
                          make_weights(Format::affine, 4, 64, D, F, rng)};
    int64_t record_bytes;
    records.push_back(make_record(w, placed, record_bytes));
    addresses.push_back(reinterpret_cast<int64_t>(records.back().get()));
  }
  const Experts experts(placed[0], placed[1], placed[2], {});
  const int64_t T = 300;
  const std::vector<float> x = random_rows(T * D, rng);
  std::vector<int32_t> start{0}, token, row;
  for (int e = 0; e < 3; ++e) {
    for (int t = 0; t < (e == 1 ? 3 : 300); ++t) token.push_back(t), row.push_back(static_cast<int32_t>(row.size()));
    start.push_back(static_cast<int32_t>(token.size()));
  }
  std::vector<float> all(token.size() * D), one(D);
  pool().resize(3);
  experts.forward({3, addresses.data(), start.data(), token.data(), row.data()}, x.data(), all.data());
  pool().resize(2);
  for (size_t p = 0; p < token.size(); p += 29) {
    const int64_t e = p < 300 ? 0 : p < 303 ? 1 : 2;
    const int32_t single[2] = {0, 1}, zero = 0;
    experts.forward({1, &addresses[static_cast<size_t>(e)], single, &token[p], &zero}, x.data(), one.data());
    check(std::memcmp(one.data(), all.data() + p * D, D * 4) == 0, "an expert's row depends on its company", isa);
  }
  double norm = 0;
  for (float v : all) norm += double(v) * v;
  check(std::isfinite(norm) && norm > 0, "experts gave nothing", isa);
}

void test_pool() {
  ThreadPool p(4);
  for (int round = 0; round < 200; ++round) {
    p.resize(round % 4 + 1);
    std::vector<int> seen(4, 0), after(4, 0);
    p.run([&](int thread, int n) {
      seen[static_cast<size_t>(thread)] = 1;
      p.barrier();
      for (int i = 0; i < n; ++i) after[static_cast<size_t>(thread)] += seen[static_cast<size_t>(i)];
      p.barrier();
      seen[static_cast<size_t>(thread)] = 2;
    });
    for (int i = 0; i < round % 4 + 1; ++i) check(after[static_cast<size_t>(i)] == round % 4 + 1, "a thread passed the barrier early", "pool");
  }
  int alone = 0;
  p.run([&](int thread, int n) { p.barrier(), alone += thread == 0 && n == 1; }, true);
  check(alone == 1, "a region of one thread ran on several", "pool");
  for (int round = 0; round < 2000; ++round) {  // whoever comes late must find the region closed, and the next one open
    if (round % 100 == 0) p.resize(round / 100 % 4 + 1);
    std::atomic<int> next{0}, inside{0};
    std::vector<int> done(32, 0);
    p.share([&](int, int) {
      ++inside;
      for (int i; (i = next++) < 32;) done[static_cast<size_t>(i)] += 1;
      --inside;
    });
    check(inside == 0 && done == std::vector<int>(32, 1), "shared work was lost, done twice or left by a thread inside", "pool");
    if (round % 5 == 0) p.run([&](int, int) { ++inside, p.barrier(); });
    check(round % 5 != 0 || inside == p.size(), "a region after a shared one ran on too few threads", "pool");
  }
  std::atomic<int> total{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&] { for (int i = 0; i < 100; ++i) p.run([&](int, int) { total += 1; }); });
  }
  for (std::thread& t : callers) t.join();
  check(total == 3 * 100 * p.size(), "a region ran on too few threads", "pool");
}

// Buffers as long as the shapes say; a token alone has the bits that it has among others, on one thread and on three.
void test_low_rank(const char* isa) {
  std::mt19937 rng(7);
  std::normal_distribution<float> normal;
  for (Format format : {Format::bf16, Format::f32}) {
    for (auto [rank, inputs, outputs, T] : {std::array<int64_t, 4>{16, 544, 96, 1}, {1, 1, 1, 2}, {5, 257, 17, 40}, {33, 70, 100, 17}}) {
      const Weights a = make_weights(format, 0, 0, rank, inputs, rng), b = make_weights(format, 0, 0, outputs, rank, rng);
      const LowRank pair{a.m, b.m};
      std::vector<float> x(static_cast<size_t>(T * inputs)), y(static_cast<size_t>(T * outputs));
      for (float& value : x) value = normal(rng);
      for (float& value : y) value = normal(rng);
      std::vector<float> alone = y;
      pool().resize(1);
      for (int64_t t = 0; t < T; ++t) low_rank_add(pair, x.data() + t * inputs, 1, alone.data() + t * outputs);
      for (int threads : {1, 3}) {
        std::vector<float> together = y;
        pool().resize(threads);
        low_rank_add(pair, x.data(), T, together.data());
        check(std::memcmp(together.data(), alone.data(), alone.size() * sizeof(float)) == 0, "low-rank rows depend on the call", isa);
      }
      for (int64_t t = 0; t < T; ++t) {
        for (int64_t o = 0; o < outputs; ++o) {
          double sum = y[static_cast<size_t>(t * outputs + o)], size = std::fabs(sum);
          for (int64_t r = 0; r < rank; ++r) {
            double low = 0, low_size = 0;
            for (int64_t c = 0; c < inputs; ++c) {
              const double term = double(a.dense[static_cast<size_t>(r * inputs + c)]) * x[static_cast<size_t>(t * inputs + c)];
              low += term, low_size += std::fabs(term);
            }
            const double weight = b.dense[static_cast<size_t>(o * rank + r)];
            sum += weight * low, size += std::fabs(weight) * low_size;
          }
          check(std::fabs(alone[static_cast<size_t>(t * outputs + o)] - sum) <= 2e-6 * size, "low-rank sums", isa);
        }
      }
    }
  }
}

void test_pinned_roster() {
  std::mt19937 rng(5);
  std::normal_distribution<float> normal;
  const std::array<std::array<int64_t, 3>, 4> shapes{{{128, 8, 32}, {8, 2, 2}, {5, 5, 5}, {7, 1, 3}}};
  for (const auto& [E, K, members] : shapes) {
    const auto wide = static_cast<size_t>(E), narrow = static_cast<size_t>(K);
    const auto member = std::make_unique<bool[]>(wide);
    std::fill_n(member.get() + (E - members), members, true);
    std::vector<int64_t> count(wide), last(wide, -1), gate(narrow), used(narrow), free(narrow);
    std::vector<float> logits(wide), p(wide, 1.0f / static_cast<float>(E)), gate_weights(narrow, 0.5f), weights(narrow);
    for (float& value : logits) value = normal(rng);
    for (int64_t k = 0; k < K; ++k) gate[static_cast<size_t>(k)] = k;
    const PinnedRoster roster{member.get(), count.data(), last.data(), E, K};
    const GateRow row{logits.data(), p.data(), gate.data(), gate_weights.data()};
    RosterToken token;
    check(pinned_token(roster, row, true, {used.data(), weights.data(), free.data()}, token), "a token is routed", "roster");
    for (const int64_t expert : used) check(member[static_cast<size_t>(expert)] || token.kept == K, "only members", "roster");
    check(token.held >= 0 && token.held <= 1, "a share", "roster");
    use_pinned(roster, used.data(), 9);
    check(last[static_cast<size_t>(used.back())] == 9 && count[static_cast<size_t>(used.back())] == 1, "uses", "roster");
    logits.back() = std::nanf("");
    check(!pinned_token(roster, row, true, {used.data(), weights.data(), free.data()}, token), "NaN says nothing", "roster");
  }
}

}  // namespace

int main() {
  test_pool();
  test_pinned_roster();
  for (const char* isa : {"portable", "avx2", "avx512"}) {
    if (!force_isa(isa)) {
      std::printf("%s: not available here\n", isa);
      continue;
    }
    test_matmul(isa);
    test_experts(isa);
    test_low_rank(isa);
    std::printf("%s: done\n", isa);
  }
  return failures == 0 ? 0 : 1;
}
