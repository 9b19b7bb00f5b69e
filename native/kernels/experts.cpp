// Reading order: forward -> plan the segments -> one region: encode rows | gate, up, activation | down.
#include "kernels/experts.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "kernels/activations.h"
#include "kernels/matmul.h"
#include "kernels/thread_pool.h"

namespace stoker {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTokenBlock = 64;
constexpr int64_t kSegmentRows = 256;  // rows of one expert that are worked on together
constexpr int64_t kBatchRows = 1024;   // rows between two barriers; bounds the workspace
constexpr int64_t kFewColumns = 16384; // about 4 microseconds of encoding
constexpr int64_t kMaxUnit = 128;      // columns of the widest encoding unit
constexpr int64_t kDownRun = 16;       // tiles of down that a thread takes at once
constexpr int64_t kDownRunOfMany = 4;  // where each tile has many rows to do
constexpr int64_t kStripTiles = 48;    // tiles of gate, then of up, that a thread takes at once for a few rows
constexpr int64_t kStripRows = 256;    // rows times tiles of one strip; its results stay in L1
constexpr int64_t kStripFewRows = 4;   // segments of more rows use a strip's weights often: how they stream matters less

// Consecutive rows of one expert; `row` counts from the start of the call, `slot` from the start of the batch.
struct Segment {
  int64_t expert, row, n_rows, slot;
};

struct Batch {
  int64_t first_segment, n_segments, n_rows;
};

struct Plan {
  std::vector<Segment> segments;
  std::vector<Batch> batches;
};

Plan plan_batches(const ExpertRows& rows) {
  Plan plan;
  for (int64_t e = 0; e < rows.n_experts; ++e) {
    for (int64_t row = rows.row_start[e]; row < rows.row_start[e + 1]; row += kSegmentRows) {
      const int64_t n = std::min<int64_t>(kSegmentRows, rows.row_start[e + 1] - row);
      if (plan.batches.empty() || plan.batches.back().n_rows + n > kBatchRows) {
        plan.batches.push_back({static_cast<int64_t>(plan.segments.size()), 0, 0});
      }
      Batch& batch = plan.batches.back();
      plan.segments.push_back({e, row, n, batch.n_rows});
      batch.n_segments += 1;
      batch.n_rows += n;
    }
  }
  return plan;
}

// What all threads share during one call. Encoded rows of a segment start at slot * row_bytes.
struct Job {
  const ExpertRows& rows;
  const PlacedMatrix& gate;
  const PlacedMatrix& up;
  const PlacedMatrix& down;
  const GateParams& params;
  const float* x;
  float* out;
  Encoding gate_encoding, up_encoding, down_encoding;
  char* gate_rows;  // encoded x for gate, and for up where the encodings agree
  char* up_rows;
  char* hidden_rows;  // encoded act(gate) * up

  static int64_t row_bytes(Encoding e, int64_t cols) { return e.units(cols) * e.record_bytes(); }
  EncodedRows view(char* base, Encoding e, int64_t cols, const Segment& s) const {
    return {base + s.slot * row_bytes(e, cols), s.n_rows, e.record_bytes()};
  }
  const char* record(const Segment& s) const { return reinterpret_cast<const char*>(rows.addresses[s.expert]); }
};

void encode_batch(const Job& job, const Plan& plan, const Batch& batch, int thread, int n_threads) {
  const int64_t D = job.gate.shape.cols;
  const int64_t first = batch.n_rows * thread / n_threads, last = batch.n_rows * (thread + 1) / n_threads;
  for (int64_t i = 0; i < batch.n_segments; ++i) {
    const Segment& s = plan.segments[static_cast<size_t>(batch.first_segment + i)];
    const int64_t begin = std::max<int64_t>(0, first - s.slot), end = std::min(s.n_rows, last - s.slot);
    for (int64_t t = begin; t < end; ++t) {
      const float* x = job.x + job.rows.token_of_row[s.row + t] * D;
      encode_row(job.gate_encoding, x, D, job.gate_rows + s.slot * Job::row_bytes(job.gate_encoding, D), s.n_rows, t);
      if (job.up_rows != job.gate_rows) {
        encode_row(job.up_encoding, x, D, job.up_rows + s.slot * Job::row_bytes(job.up_encoding, D), s.n_rows, t);
      }
    }
  }
}

int64_t work(const Plan& plan, const PlacedMatrix& gate, const PlacedMatrix& up, const PlacedMatrix& down) {
  int64_t total = 0;
  for (const Segment& s : plan.segments) {
    for (const PlacedMatrix* m : {&gate, &up, &down}) total += multiply_work(m->shape, s.n_rows);
  }
  return total;
}

void add_row_bias(const Matrix& m, int64_t tile, int64_t n_tokens, float* acc) {
  if (!m.row_bias) return;
  const int64_t row0 = tile * kTileRows, rows = std::min(kTileRows, m.rows - row0);
  for (int64_t t = 0; t < n_tokens; ++t) {
    for (int64_t r = 0; r < rows; ++r) acc[t * kTileRows + r] += m.row_bias[row0 + r];
  }
}

// act(gate) * up for units [unit0, unit1) of the hidden row, encoded at once while it is in the cache. All tiles of gate,
// then all of up: each is one forward stream.
void hidden_units(const Job& job, const Segment& s, int64_t unit0, int64_t unit1) {
  alignas(64) float gate_acc[kStripRows * kTileRows], up_acc[kStripRows * kTileRows], hidden[kMaxUnit];
  const Matrix gate = job.gate.at(job.record(s)), up = job.up.at(job.record(s));
  const TileKernel gate_kernel = kernels().tile_kernel(gate), up_kernel = kernels().tile_kernel(up);
  const EncodedRows gate_x = job.view(job.gate_rows, job.gate_encoding, gate.cols, s);
  const EncodedRows up_x = job.view(job.up_rows, job.up_encoding, up.cols, s);
  const int64_t F = gate.rows, unit_cols = job.down_encoding.unit_cols;
  const int64_t tile0 = unit0 * unit_cols / kTileRows, tile1 = std::min(unit1 * unit_cols / kTileRows, gate.tiles());
  const EncodedRows target = job.view(job.hidden_rows, job.down_encoding, F, s);
  const int64_t block = kStripRows / (tile1 - tile0);
  for (int64_t t0 = 0; t0 < s.n_rows; t0 += block) {
    const int64_t n = std::min(block, s.n_rows - t0), tile_floats = n * kTileRows;
    for (int64_t tile = tile0; tile < tile1; ++tile) {
      gate_kernel(gate, gate_x.at(0, t0), gate_x.unit_stride(), n, tile, gate_acc + (tile - tile0) * tile_floats);
      add_row_bias(gate, tile, n, gate_acc + (tile - tile0) * tile_floats);
    }
    for (int64_t tile = tile0; tile < tile1; ++tile) {
      up_kernel(up, up_x.at(0, t0), up_x.unit_stride(), n, tile, up_acc + (tile - tile0) * tile_floats);
      add_row_bias(up, tile, n, up_acc + (tile - tile0) * tile_floats);
    }
    kernels().gated(job.params, gate_acc, up_acc, gate_acc, (tile1 - tile0) * tile_floats);
    for (int64_t unit = unit0; unit < unit1; ++unit) {
      const int64_t n_cols = std::min(unit_cols, F - unit * unit_cols), first = unit * unit_cols / kTileRows - tile0;
      for (int64_t t = 0; t < n; ++t) {
        for (int64_t i = 0; i * kTileRows < n_cols; ++i) {
          std::memcpy(hidden + i * kTileRows, gate_acc + (first + i) * tile_floats + t * kTileRows, kTileRows * sizeof(float));
        }
        encode_row(job.down_encoding, hidden, n_cols, const_cast<char*>(target.at(unit, 0)), s.n_rows, t0 + t);
      }
    }
  }
}

void down_tiles(const Job& job, const Segment& s, int64_t tile0, int64_t tile1) {
  alignas(64) float acc[kTokenBlock * kTileRows];
  const Matrix down = job.down.at(job.record(s));
  const TileKernel kernel = kernels().tile_kernel(down);
  const EncodedRows h = job.view(job.hidden_rows, job.down_encoding, down.cols, s);
  const int64_t D = down.rows;
  for (int64_t t0 = 0; t0 < s.n_rows; t0 += kTokenBlock) {
    const int64_t n = std::min(kTokenBlock, s.n_rows - t0);
    for (int64_t tile = tile0; tile < tile1; ++tile) {
      kernel(down, h.at(0, t0), h.unit_stride(), n, tile, acc);
      add_row_bias(down, tile, n, acc);
      const int64_t row0 = tile * kTileRows;
      const size_t nbytes = static_cast<size_t>(std::min(kTileRows, D - row0)) * sizeof(float);
      for (int64_t t = 0; t < n; ++t) {
        std::memcpy(job.out + job.rows.out_row[s.row + t0 + t] * D + row0, acc + t * kTileRows, nbytes);
      }
    }
  }
}

bool few_rows_each(const Plan& plan, const Batch& batch) {
  for (int64_t i = 0; i < batch.n_segments; ++i) {
    if (plan.segments[static_cast<size_t>(batch.first_segment + i)].n_rows > kStripFewRows) return false;
  }
  return true;
}

// Units of the hidden row that a thread takes at once: long streams, but several tasks for each thread.
int64_t units_per_task(const Batch& batch, const Encoding& e, int64_t units, int n_threads) {
  const int64_t by_length = kStripTiles * kTileRows / e.unit_cols, by_balance = batch.n_segments * units / (4 * n_threads);
  return std::max<int64_t>(1, std::min(by_length, by_balance));
}

// Tasks are (segment, part), parts of a segment adjacent; threads take the next one until none is left.
template <class F>
void take_tasks(TileQueue& queue, const Plan& plan, const Batch& batch, int64_t parts, F&& task) {
  const int64_t n_tasks = batch.n_segments * parts;
  for (;;) {
    const int64_t i = queue.next.fetch_add(1, std::memory_order_relaxed);
    if (i >= n_tasks) return;
    task(plan.segments[static_cast<size_t>(batch.first_segment + i / parts)], i % parts);
  }
}

}  // namespace

Matrix PlacedMatrix::at(const char* record) const {
  Matrix m = shape;
  m.codes = record + codes;
  m.scales = reinterpret_cast<const uint16_t*>(record + scales);
  m.biases = reinterpret_cast<const uint16_t*>(record + biases);
  m.row_bias = row_bias < 0 ? nullptr : reinterpret_cast<const float*>(record + row_bias);
  return m;
}

Experts::Experts(const PlacedMatrix& gate, const PlacedMatrix& up, const PlacedMatrix& down, const GateParams& params)
    : gate_(gate), up_(up), down_(down), params_(params) {
  const Matrix &g = gate.shape, &u = up.shape, &d = down.shape;
  if (g.rows != u.rows || g.cols != u.cols || d.cols != g.rows || d.rows != g.cols) {
    throw std::invalid_argument("gate and up must be [F, D] and down [D, F]");
  }
  // act(gate) * up has a heavy tail: in 8 bits it alone would cost 0.9% of relative error, as much as all the rest.
  if (d.format == Format::affine) down_.shape.activation_bits = 16;
}

void Experts::forward(const ExpertRows& rows, const float* x, float* out) const {
  static std::mutex busy;
  static Scratch gate_scratch, up_scratch, hidden_scratch;  // shared by all pools: one call works at a time anyway
  std::lock_guard<std::mutex> lock(busy);

  const Plan plan = plan_batches(rows);
  int64_t most_rows = 0;
  for (const Batch& batch : plan.batches) most_rows = std::max(most_rows, batch.n_rows);
  if (most_rows == 0) return;
  const int64_t D = gate_.shape.cols, F = down_.shape.cols;
  Job job{rows, gate_, up_, down_, params_, x, out, encoding_of(gate_.shape), encoding_of(up_.shape),
          encoding_of(down_.shape), nullptr, nullptr, nullptr};
  job.gate_rows = gate_scratch.reserve(most_rows * Job::row_bytes(job.gate_encoding, D));
  job.up_rows = job.up_encoding == job.gate_encoding
                    ? job.gate_rows
                    : up_scratch.reserve(most_rows * Job::row_bytes(job.up_encoding, D));
  job.hidden_rows = hidden_scratch.reserve(most_rows * Job::row_bytes(job.down_encoding, F));
  std::vector<TileQueue> queues(2 * plan.batches.size());
  kernels();  // an unusable STOKER_ISA throws here, not in a worker

  const int64_t units = job.down_encoding.units(F), tiles = down_.shape.tiles();
  // A few rows are encoded before the workers have woken up; then nobody waits for them at the first barrier.
  const bool few = most_rows * D <= kFewColumns && plan.batches.size() == 1;
  if (few) encode_batch(job, plan, plan.batches[0], 0, 1);
  pool().run([&](int thread, int n_threads) {
    for (size_t b = 0; b < plan.batches.size(); ++b) {
      const Batch& batch = plan.batches[b];
      if (!few) {
        encode_batch(job, plan, batch, thread, n_threads);
        pool().barrier();
      }
      const bool few_each = few_rows_each(plan, batch);
      const int64_t run = few_each ? units_per_task(batch, job.down_encoding, units, n_threads) : 1;
      const int64_t down_run = few_each ? kDownRun : kDownRunOfMany;
      take_tasks(queues[2 * b], plan, batch, (units + run - 1) / run, [&](const Segment& s, int64_t part) {
        hidden_units(job, s, part * run, std::min((part + 1) * run, units));
      });
      pool().barrier();
      take_tasks(queues[2 * b + 1], plan, batch, (tiles + down_run - 1) / down_run, [&](const Segment& s, int64_t part) {
        down_tiles(job, s, part * down_run, std::min((part + 1) * down_run, tiles));
      });
      // The next batch overwrites gate_rows, which nobody reads any more, and hidden_rows only after its first barrier.
    }
  }, work(plan, gate_, up_, down_) < kAloneBytes);
}

void combine(const float* pairs, const float* weights, int64_t T, int64_t K, int64_t D, float* out) {
  const auto rows = [&](int64_t t0, int64_t t1) {
    for (int64_t t = t0; t < t1; ++t) {
      float* o = out + t * D;
      std::memset(o, 0, static_cast<size_t>(D) * sizeof(float));
      for (int64_t k = 0; k < K; ++k) {
        const float w = weights[t * K + k];
        const float* p = pairs + (t * K + k) * D;
        for (int64_t d = 0; d < D; ++d) o[d] += w * p[d];
      }
    }
  };
  if (T * K * D < 65536) {  // waking the threads would cost more
    rows(0, T);
    return;
  }
  pool().run([&](int thread, int n_threads) { rows(T * thread / n_threads, T * (thread + 1) / n_threads); });
}

}  // namespace stoker
