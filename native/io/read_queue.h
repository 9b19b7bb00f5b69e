// The read queue: extents in, completions out. Demand reads start before every pending prefetch, at most `depth` are in
// flight, so a prefetch delays a demand by no more than what was already started. Within a class: earliest deadline, then
// first come. Owns files, tickets, order and counters; an Engine carries reads out. Knows nothing of experts or Python.
// Every member may be called from any thread.
#pragma once
#include <condition_variable>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <tuple>
#include <vector>

#include "io/engine.h"
#include "io/tickets.h"
#include "io/writers.h"

namespace stoker::io {

enum class Backend { automatic, io_uring, threads };

struct Extent {
  int file;
  std::uint64_t offset;
  std::size_t length;
  std::uint8_t* address;
};

struct Stats {
  std::int64_t demand_reads = 0, demand_bytes = 0, prefetch_reads = 0, prefetch_bytes = 0;  // completed, by class at start
  std::int64_t expired = 0, cancelled = 0, failed = 0, promoted = 0;
  std::int64_t short_results = 0, retries = 0;
  std::int64_t in_flight = 0, in_flight_max = 0, pending = 0, outstanding = 0;
  std::int64_t queued_ns = 0, service_ns = 0;  // sums over reads: submit to start, start to end
  std::int64_t busy_ns = 0;                    // time with at least one read in flight
};

struct Report {  // what is known of one read
  State state;
  std::int64_t submit_ns, start_ns, end_ns;
  std::string path;
  std::uint64_t offset;
  std::size_t length, got;
  std::int64_t tag;
  int error;  // errno, kEndOfFile, or 0
};

class ReadQueue final : private Feed, private MemoryWriter {
 public:
  // Throws std::system_error where the backend cannot be had; `automatic` then takes threads.
  ReadQueue(int depth, Backend backend, bool direct);
  ~ReadQueue() override;

  int depth() const { return depth_; }
  void allow(int depth);         // from now on at most so many in flight, 1 to the queue's depth
  Backend backend() const { return backend_; }
  const std::string& backend_note() const { return backend_note_; }  // why `automatic` did not take io_uring
  bool direct() const;           // wanted, and no file had to fall back

  int open(const std::string& path, std::optional<bool> direct);
  bool is_direct(int file) const;

  // Throws std::invalid_argument for an extent that cannot be right (unknown file, unaligned direct read, empty).
  Ticket submit(const Extent& extent, bool prefetch, std::int64_t deadline_ns, std::int64_t tag);
  // Index of the first ticket that is finished; nullopt when `limit_ns` passed without one. Frees nothing.
  std::optional<std::size_t> wait_any(std::span<const Ticket> tickets, std::int64_t limit_ns);
  void free(Ticket ticket);      // a finished ticket; its report stays readable for TicketPool::kRemembered more
  bool promote(Ticket ticket);   // false: it had been dropped (expired or cancelled) and will not arrive
  bool cancel(Ticket ticket);    // true: its bytes never land from now on, and the ticket is freed
  Report report(Ticket ticket) const;
  State state(Ticket ticket) const;
  Stats stats() const;
  void inject(std::int64_t nth, Fault fault, std::int64_t delay_ns);  // nth read to start from now, from 1
  void close();                  // cancels what is pending, waits for what is in flight

 private:
  struct Place {  // in the order of starting
    std::int64_t deadline_ns;
    std::uint64_t sequence;
    Request* request;
    bool operator<(const Place& other) const {
      return std::tie(deadline_ns, sequence) < std::tie(other.deadline_ns, other.sequence);
    }
  };
  using Pending = std::set<Place>;

  Request* take() override;
  void finish(Request& request) override;
  void let_go(const std::uint8_t* begin, const std::uint8_t* end) override;

  void check(const Extent& extent) const;
  void drop_late(std::int64_t now_ns);
  void drop(Request& request, State state);
  void enqueue(Request& request);
  void unqueue(Request& request);
  void start(Request& request, std::int64_t now_ns);
  void cancel_all();

  const int depth_;
  const bool want_direct_;
  Backend backend_ = Backend::threads;
  std::string backend_note_;
  std::once_flag close_once_;

  mutable std::mutex mutex_;
  int allowed_;
  std::condition_variable ended_;  // a read that someone waits for has ended
  std::deque<File> files_;
  bool fell_back_ = false;
  mutable TicketPool pool_;
  Pending demand_, prefetch_;
  std::vector<Request*> in_flight_;
  int drains_ = 0;  // let_go() calls that wait
  std::uint64_t sequence_ = 0;
  std::int64_t started_ = 0;
  struct Planned {
    std::int64_t nth;
    Fault fault;
    std::int64_t delay_ns;
  };
  std::vector<Planned> faults_;
  std::int64_t busy_since_ns_ = 0;
  Stats stats_;
  bool closed_ = false;
  std::unique_ptr<Engine> engine_;  // last: its threads use everything above
};

}  // namespace stoker::io
