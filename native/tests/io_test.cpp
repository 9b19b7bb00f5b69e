// Exercises native/io under the sanitizers: both engines, racing submitters, promoters and cancellers, faults, deadlines, and
// arenas and queues that go away with reads in flight. Content is checked byte for byte. Exit status 0 when all holds.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "io/arena.h"
#include "io/file.h"
#include "io/read_queue.h"

using namespace stoker::io;

namespace {

constexpr std::size_t kRecord = 4 * kBlockBytes;
constexpr int kRecords = 48;
constexpr std::int64_t kForeverNs = 60'000'000'000;

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);         \
      std::abort();                                                                \
    }                                                                              \
  } while (0)

// Byte `at` of the file: no two blocks alike.
std::uint8_t byte_at(std::size_t at) { return static_cast<std::uint8_t>((at * 2654435761u >> 13) ^ (at >> 12) ^ at); }

struct TemporaryFile {
  std::string path;

  TemporaryFile() {
    const char* folder = std::getenv("TMPDIR");
    path = std::string(folder != nullptr ? folder : "/tmp") + "/stoker_io_test_XXXXXX";
    const int fd = mkstemp(path.data());
    CHECK(fd >= 0);
    std::vector<std::uint8_t> bytes(kRecord * kRecords);
    for (std::size_t at = 0; at < bytes.size(); ++at) bytes[at] = byte_at(at);
    CHECK(write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
    close(fd);
  }
  ~TemporaryFile() { unlink(path.c_str()); }
};

struct Bench {  // one queue on the file, slot i for record i
  ReadQueue queue;
  int file;
  std::shared_ptr<Arena> arena;

  Bench(const std::string& path, Backend backend, int depth, bool direct)
      : queue(depth, backend, direct), file(queue.open(path, std::nullopt)), arena(Arena::create(kRecord * kRecords, true)) {}

  std::uint8_t* slot(int index) { return arena->data() + static_cast<std::size_t>(index) * kRecord; }
  Ticket submit(int index, bool prefetch = false, std::int64_t deadline_ns = 0) {
    return queue.submit({file, static_cast<std::size_t>(index) * kRecord, kRecord, slot(index)}, prefetch, deadline_ns, index);
  }
  void wait(Ticket ticket) { CHECK(queue.wait_any({&ticket, 1}, kForeverNs).has_value()); }
  State finish(Ticket ticket) {
    wait(ticket);
    const State state = queue.state(ticket);
    queue.free(ticket);
    return state;
  }
  bool whole(int index) {
    const std::size_t start = static_cast<std::size_t>(index) * kRecord;
    for (std::size_t at = 0; at < kRecord; ++at)
      if (slot(index)[at] != byte_at(start + at)) return false;
    return true;
  }
  bool untouched(int index) {
    for (std::size_t at = 0; at < kRecord; ++at)
      if (slot(index)[at] != 0) return false;
    return true;
  }
};

// Each thread has its own slots; promotions and cancellations hit anybody's recent tickets.
void race(Bench& bench, int threads) {
  std::atomic<Ticket> recent[8] = {};
  std::atomic<int> done{0}, gone{0};
  const auto work = [&](int part) {
    std::mt19937 random(static_cast<unsigned>(part));
    for (int round = 0; round < 6; ++round) {
      std::vector<std::pair<int, Ticket>> mine;
      for (int index = part; index < kRecords; index += threads) {
        std::memset(bench.slot(index), 0, kRecord);
        mine.emplace_back(index, bench.submit(index, random() % 2 == 0));
        recent[random() % 8] = mine.back().second;
        if (const Ticket other = recent[random() % 8]; other != 0 && random() % 3 == 0) bench.queue.promote(other);
      }
      for (auto& [index, ticket] : mine) {
        if (random() % 3 == 0 && bench.queue.cancel(ticket)) {
          CHECK(bench.untouched(index));
          ++gone;
          continue;
        }
        CHECK(bench.finish(ticket) == State::done);
        CHECK(bench.whole(index));
        ++done;
      }
    }
  };
  std::vector<std::thread> workers;
  for (int part = 0; part < threads; ++part) workers.emplace_back(work, part);
  for (std::thread& worker : workers) worker.join();
  const Stats stats = bench.queue.stats();
  CHECK(stats.demand_reads + stats.prefetch_reads == done && stats.cancelled == gone);
  CHECK(stats.outstanding == 0 && stats.pending == 0 && stats.in_flight == 0 && stats.in_flight_max <= bench.queue.depth());
}

void faults(Bench& bench) {
  for (int nth = 1; nth <= 8; ++nth) {
    for (const Fault fault : {Fault::eio, Fault::end_of_file, Fault::short_read, Fault::eintr, Fault::eagain, Fault::delay}) {
      bench.queue.inject(nth, fault, 1'000'000);
      Ticket tickets[8];
      for (int index = 0; index < 8; ++index) tickets[index] = bench.submit(index);
      const bool fatal = fault == Fault::eio || fault == Fault::end_of_file;
      for (int index = 0; index < 8; ++index) {
        const bool hit = fatal && index == nth - 1;
        CHECK(bench.finish(tickets[index]) == (hit ? State::failed : State::done));
        CHECK(hit || bench.whole(index));
        if (hit) CHECK(bench.queue.report(tickets[index]).error == (fault == Fault::eio ? EIO : kEndOfFile));
      }
    }
  }
}

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void deadlines_and_order(const std::string& path, Backend backend) {
  Bench bench(path, backend, 1, true);
  bench.queue.inject(1, Fault::delay, 200'000'000);
  const Ticket hold = bench.submit(0);
  while (bench.queue.state(hold) == State::pending) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const Ticket late = bench.submit(1, true, now_ns() + 1'000'000);
  const Ticket prefetch = bench.submit(2, true);
  const Ticket promoted = bench.submit(3, true);
  const Ticket demand = bench.submit(4);
  CHECK(bench.queue.promote(promoted));
  CHECK(!bench.queue.cancel(hold));
  for (const Ticket ticket : {hold, prefetch, promoted, demand}) CHECK(bench.finish(ticket) == State::done);
  CHECK(bench.finish(late) == State::expired && bench.untouched(1));
  const auto started = [&](Ticket ticket) { return bench.queue.report(ticket).start_ns; };
  CHECK(started(promoted) < started(demand) && started(demand) < started(prefetch));
}

// Whoever goes first, nothing lands in memory that is gone (AddressSanitizer and the guard pages would tell).
void departures(const std::string& path, Backend backend) {
  for (int round = 0; round < 12; ++round) {
    Bench bench(path, backend, 4, round % 2 == 0);
    bench.queue.inject(1, Fault::delay, 3'000'000);
    std::vector<Ticket> tickets;
    for (int index = 0; index < kRecords; ++index) tickets.push_back(bench.submit(index, index % 2 == 0));
    std::thread waiter([&] { bench.wait(tickets.back()); });
    if (round % 3 == 0) {
      bench.arena.reset();
      const Stats stats = bench.queue.stats();
      CHECK(stats.in_flight == 0 && stats.pending == 0);
    }
    if (round % 3 == 1) bench.queue.close();
    if (round % 3 == 2) bench.wait(tickets.front());
    waiter.join();
  }
}

void synchronous(const std::string& path) {
  const auto arena = Arena::create(kRecord * kRecords + kBlockBytes, false);
  for (const std::size_t offset : {0u, 1u, 4096u, 5001u}) {
    for (const std::size_t shift : {0u, 7u}) {
      const std::size_t length = kRecord * kRecords - offset;
      read_file_into(path, offset, length, arena->data() + shift, [] {});
      for (std::size_t at = 0; at < length; ++at) CHECK(arena->data()[shift + at] == byte_at(offset + at));
    }
  }
  bool short_read = false;
  try {
    read_file_into(path, 10, kRecord * kRecords, arena->data(), [] {});
  } catch (const ShortRead& error) {
    short_read = error.got_bytes == kRecord * kRecords - 10;
  }
  CHECK(short_read);
}

bool available(Backend backend) {
  try {
    ReadQueue(1, backend, true);
    return true;
  } catch (const std::system_error& error) {
    std::printf("io_uring: not on this kernel (%s)\n", error.what());
    return false;
  }
}

}  // namespace

int main() {
  const TemporaryFile file;
  synchronous(file.path);
  for (const Backend backend : {Backend::threads, Backend::io_uring}) {
    if (!available(backend)) continue;
    for (const bool direct : {true, false}) {
      Bench bench(file.path, backend, 3, direct);
      race(bench, 4);
      faults(bench);
    }
    deadlines_and_order(file.path, backend);
    departures(file.path, backend);
    std::printf("%s: ok\n", backend == Backend::threads ? "threads" : "io_uring");
  }
  return 0;
}
