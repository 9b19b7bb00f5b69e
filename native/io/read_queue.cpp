#include "io/read_queue.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "io/arena.h"

namespace stoker::io {
namespace {

constexpr int kMaxDepth = 1024;

std::int64_t clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool ended(State state) { return state != State::pending && state != State::in_flight; }

bool overlaps(const Request& request, const std::uint8_t* begin, const std::uint8_t* end) {
  return request.address < end && begin < request.address + request.length;
}

}  // namespace

ReadQueue::ReadQueue(int depth, Backend backend, bool direct) : depth_(depth), want_direct_(direct), allowed_(depth) {
  if (depth < 1 || depth > kMaxDepth)
    throw std::invalid_argument("depth must be 1 to " + std::to_string(kMaxDepth) + ", got " + std::to_string(depth));
  if (backend != Backend::threads) {
    try {
      engine_ = make_uring_engine(*this, depth);
      backend_ = Backend::io_uring;
    } catch (const std::system_error& error) {
      if (backend == Backend::io_uring) throw;
      backend_note_ = error.what();
    }
  }
  if (engine_ == nullptr) engine_ = make_thread_engine(*this, depth);
  add_writer(this);
}

ReadQueue::~ReadQueue() {
  close();
  remove_writer(this);
}

// ---- files

bool ReadQueue::direct() const {
  std::lock_guard lock(mutex_);
  return want_direct_ && !fell_back_;
}

int ReadQueue::open(const std::string& path, std::optional<bool> direct) {
  const bool want = direct.value_or(want_direct_);
  File file(path, want);
  std::lock_guard lock(mutex_);
  if (closed_) throw std::invalid_argument("the read queue is closed");
  fell_back_ |= want && !file.direct();
  files_.push_back(std::move(file));
  return static_cast<int>(files_.size()) - 1;
}

bool ReadQueue::is_direct(int file) const {
  std::lock_guard lock(mutex_);
  if (file < 0 || static_cast<std::size_t>(file) >= files_.size())
    throw std::invalid_argument("file " + std::to_string(file) + " is not open in this queue");
  return files_[static_cast<std::size_t>(file)].direct();
}

// ---- in

void ReadQueue::check(const Extent& extent) const {
  if (closed_) throw std::invalid_argument("the read queue is closed");
  if (extent.file < 0 || static_cast<std::size_t>(extent.file) >= files_.size())
    throw std::invalid_argument("file " + std::to_string(extent.file) + " is not open in this queue");
  const File& file = files_[static_cast<std::size_t>(extent.file)];
  const auto address = reinterpret_cast<std::uintptr_t>(extent.address);
  const auto where = [&] {
    return file.path() + ": offset " + std::to_string(extent.offset) + ", length " + std::to_string(extent.length) +
           ", address " + std::to_string(address);
  };
  if (extent.length == 0 || address == 0) throw std::invalid_argument("an empty read: " + where());
  if (extent.offset + extent.length < extent.offset || extent.offset + extent.length > INT64_MAX)
    throw std::invalid_argument("an extent outside any file: " + where());
  if (file.direct() && (extent.offset | extent.length | address) % kBlockBytes != 0)
    throw std::invalid_argument("a direct read needs multiples of " + std::to_string(kBlockBytes) + ": " + where());
}

Ticket ReadQueue::submit(const Extent& extent, bool prefetch, std::int64_t deadline_ns, std::int64_t tag) {
  std::lock_guard lock(mutex_);
  check(extent);
  Request& request = pool_.take();
  request.file = &files_[static_cast<std::size_t>(extent.file)];
  request.offset = extent.offset;
  request.length = extent.length;
  request.address = extent.address;
  request.tag = tag;
  request.deadline_ns = deadline_ns;
  request.sequence = ++sequence_;
  request.prefetch = prefetch;
  request.submit_ns = clock_ns();
  enqueue(request);
  // At full depth no one needs waking: whoever ends a read takes the next.
  if (in_flight_.size() < static_cast<std::size_t>(allowed_)) engine_->wake();
  return pool_.ticket_of(request);
}

void ReadQueue::allow(int depth) {
  if (depth < 1 || depth > depth_)
    throw std::invalid_argument("1 to " + std::to_string(depth_) + " may be in flight, got " + std::to_string(depth));
  std::lock_guard lock(mutex_);
  const bool more = depth > allowed_;
  allowed_ = depth;
  if (more && !(demand_.empty() && prefetch_.empty())) engine_->wake();
}

void ReadQueue::enqueue(Request& request) {
  const std::int64_t deadline_ns = request.deadline_ns > 0 ? request.deadline_ns : INT64_MAX;
  (request.prefetch ? prefetch_ : demand_).insert({deadline_ns, request.sequence, &request});
}

void ReadQueue::unqueue(Request& request) {
  const std::int64_t deadline_ns = request.deadline_ns > 0 ? request.deadline_ns : INT64_MAX;
  (request.prefetch ? prefetch_ : demand_).erase({deadline_ns, request.sequence, &request});
}

bool ReadQueue::promote(Ticket ticket) {
  std::lock_guard lock(mutex_);
  Request& request = pool_.at(ticket);
  if (request.state == State::pending && request.prefetch) {
    unqueue(request);
    request.prefetch = false;
    enqueue(request);
    ++stats_.promoted;
  }
  return request.state != State::expired && request.state != State::cancelled;
}

bool ReadQueue::cancel(Ticket ticket) {
  std::lock_guard lock(mutex_);
  Request& request = pool_.at(ticket);
  if (request.state == State::pending) {
    unqueue(request);
    drop(request, State::cancelled);
  }
  if (request.state != State::cancelled && request.state != State::expired) return false;
  pool_.free(request);
  return true;
}

void ReadQueue::drop(Request& request, State state) {
  request.state = state;
  request.end_ns = clock_ns();
  ++(state == State::expired ? stats_.expired : stats_.cancelled);
  if (request.waiters > 0) ended_.notify_all();
}

// ---- the engine's side

Request* ReadQueue::take() {
  std::lock_guard lock(mutex_);
  const std::int64_t now_ns = clock_ns();
  drop_late(now_ns);
  if (in_flight_.size() >= static_cast<std::size_t>(allowed_)) return nullptr;
  Pending& pending = demand_.empty() ? prefetch_ : demand_;
  if (pending.empty()) return nullptr;
  Request& request = *pending.begin()->request;
  pending.erase(pending.begin());
  start(request, now_ns);
  return &request;
}

void ReadQueue::drop_late(std::int64_t now_ns) {
  while (!prefetch_.empty() && prefetch_.begin()->deadline_ns <= now_ns) {
    Request& request = *prefetch_.begin()->request;
    prefetch_.erase(prefetch_.begin());
    drop(request, State::expired);
  }
}

void ReadQueue::start(Request& request, std::int64_t now_ns) {
  request.state = State::in_flight;
  request.start_ns = now_ns;
  if (in_flight_.empty()) busy_since_ns_ = now_ns;
  in_flight_.push_back(&request);
  stats_.in_flight_max = std::max(stats_.in_flight_max, static_cast<std::int64_t>(in_flight_.size()));
  ++started_;
  const auto planned = std::find_if(faults_.begin(), faults_.end(), [this](const Planned& p) { return p.nth == started_; });
  if (planned == faults_.end()) return;
  request.fault = planned->fault;
  request.delay_ns = planned->delay_ns;
  faults_.erase(planned);
}

void ReadQueue::finish(Request& request) {
  std::lock_guard lock(mutex_);
  request.end_ns = clock_ns();
  request.state = request.error == 0 ? State::done : State::failed;
  std::erase(in_flight_, &request);
  if (in_flight_.empty()) stats_.busy_ns += request.end_ns - busy_since_ns_;
  stats_.short_results += request.shorts;
  stats_.retries += request.retries;
  stats_.queued_ns += request.start_ns - request.submit_ns;
  stats_.service_ns += request.end_ns - request.start_ns;
  if (request.error != 0) {
    ++stats_.failed;
  } else {
    ++(request.prefetch ? stats_.prefetch_reads : stats_.demand_reads);
    (request.prefetch ? stats_.prefetch_bytes : stats_.demand_bytes) += static_cast<std::int64_t>(request.length);
  }
  if (request.waiters > 0 || drains_ > 0) ended_.notify_all();
}

// ---- out

std::optional<std::size_t> ReadQueue::wait_any(std::span<const Ticket> tickets, std::int64_t limit_ns) {
  if (tickets.empty()) throw std::invalid_argument("no tickets to wait for");
  std::unique_lock lock(mutex_);
  std::vector<Request*> requests;
  requests.reserve(tickets.size());
  for (const Ticket ticket : tickets) requests.push_back(&pool_.at(ticket));
  std::size_t first = 0;
  const auto one_ended = [&] {
    for (first = 0; first < requests.size(); ++first)
      if (ended(requests[first]->state)) return true;
    return false;
  };
  if (one_ended()) return first;
  if (limit_ns <= 0) return std::nullopt;
  for (Request* request : requests) ++request->waiters;  // asks for the notification, and keeps the slot from reuse
  const bool found = ended_.wait_for(lock, std::chrono::nanoseconds(limit_ns), one_ended);
  for (Request* request : requests) --request->waiters;
  return found ? std::optional(first) : std::nullopt;
}

void ReadQueue::free(Ticket ticket) {
  std::lock_guard lock(mutex_);
  Request& request = pool_.at(ticket);
  if (!ended(request.state)) throw std::invalid_argument("ticket " + std::to_string(ticket) + " has not ended");
  pool_.free(request);
}

Report ReadQueue::report(Ticket ticket) const {
  std::lock_guard lock(mutex_);
  const Request& r = pool_.at(ticket);
  const bool over = ended(r.state);  // before that the engine may be writing to got and error
  return {r.state, r.submit_ns, r.start_ns,           r.end_ns, r.file->path(), r.offset,
          r.length, over ? r.got : 0, r.tag, over ? r.error : 0};
}

State ReadQueue::state(Ticket ticket) const {
  std::lock_guard lock(mutex_);
  return pool_.at(ticket).state;
}

Stats ReadQueue::stats() const {
  std::lock_guard lock(mutex_);
  Stats stats = stats_;
  stats.in_flight = static_cast<std::int64_t>(in_flight_.size());
  stats.pending = static_cast<std::int64_t>(demand_.size() + prefetch_.size());
  stats.outstanding = static_cast<std::int64_t>(pool_.outstanding());
  if (!in_flight_.empty()) stats.busy_ns += clock_ns() - busy_since_ns_;
  return stats;
}

void ReadQueue::inject(std::int64_t nth, Fault fault, std::int64_t delay_ns) {
  if (nth < 1) throw std::invalid_argument("nth counts from 1 (the next read to start), got " + std::to_string(nth));
  std::lock_guard lock(mutex_);
  faults_.push_back({started_ + nth, fault, delay_ns});
}

// ---- the end

void ReadQueue::let_go(const std::uint8_t* begin, const std::uint8_t* end) {
  std::unique_lock lock(mutex_);
  for (Pending* pending : {&demand_, &prefetch_}) {
    for (auto place = pending->begin(); place != pending->end();) {
      Request& request = *place->request;
      const bool hit = overlaps(request, begin, end);
      place = hit ? pending->erase(place) : std::next(place);
      if (hit) drop(request, State::cancelled);
    }
  }
  ++drains_;
  ended_.wait(lock, [&] {
    return std::none_of(in_flight_.begin(), in_flight_.end(), [&](Request* r) { return overlaps(*r, begin, end); });
  });
  --drains_;
}

void ReadQueue::cancel_all() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  for (Pending* pending : {&demand_, &prefetch_}) {
    for (const Place& place : *pending) drop(*place.request, State::cancelled);
    pending->clear();
  }
}

void ReadQueue::close() {
  std::call_once(close_once_, [this] {  // a second caller waits for the first
    cancel_all();
    engine_.reset();
    std::lock_guard lock(mutex_);
    for (File& file : files_) file.close();
  });
}

}  // namespace stoker::io
