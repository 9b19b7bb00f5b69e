#include "kernels/thread_pool.h"

#include <cassert>
#include <cstdio>
#include <cstdlib>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace stoker {
namespace {

// Looks before a thread sleeps, each a `pause` (34 ns on Zen 4). A futex round trip costs both sides 10 microseconds:
// inside a region the others will be done sooner than that as a rule; between regions nobody knows.
constexpr int kSpinsInRegion = 1024;
constexpr int kSpinsBetween = 128;

thread_local bool in_region = false;

inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Returns when `value` is no longer `old`.
void await_change(const std::atomic<int>& value, int old, int spins) {
  for (int i = 0; i < spins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

int default_threads() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  const unsigned n = std::thread::hardware_concurrency();
  return n ? static_cast<int>(n) : 1;
}

constexpr int kTicketBits = 16;

uint64_t tickets_of(int epoch, int workers) {
  return static_cast<uint64_t>(static_cast<uint32_t>(epoch)) << kTicketBits | static_cast<uint64_t>(workers);
}

std::atomic<ThreadPool*> instance{nullptr};

// The parent's threads do not exist in the child, and its locks may be held for ever: the child starts over (the old pool leaks).
void after_fork_in_child() {
  if (ThreadPool* old = instance.load()) instance.store(new ThreadPool(old->size()));
  in_region = false;
}

}  // namespace

ThreadPool::ThreadPool(int n_threads) : n_threads_(n_threads < 1 ? 1 : n_threads) {}

ThreadPool::~ThreadPool() {
  std::lock_guard<std::mutex> lock(region_);
  stop_workers();
}

void ThreadPool::resize(int n_threads) {
  std::lock_guard<std::mutex> lock(region_);
  n_threads_.store(n_threads < 1 ? 1 : n_threads, std::memory_order_relaxed);
}

void ThreadPool::start_workers() {
  stop_workers();
  region_threads_ = size();
  const int seen = epoch_.load(std::memory_order_relaxed);
  for (int thread = 1; thread < region_threads_; ++thread) {
    workers_.emplace_back(&ThreadPool::work, this, thread, region_threads_, seen);
  }
}

void ThreadPool::stop_workers() {
  if (workers_.empty()) return;
  stop_ = true;
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
  stop_ = false;
}

void ThreadPool::work(int thread, int n_threads, int seen_epoch) {
  in_region = true;
  for (;;) {
    await_change(epoch_, seen_epoch, kSpinsBetween);
    seen_epoch = epoch_.load(std::memory_order_acquire);
    if (stop_) return;
    if (!enter(seen_epoch)) continue;
    call_(fn_, thread, n_threads);
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) running_.notify_one();
  }
}

// Whether the region of this epoch may still be entered.
bool ThreadPool::enter(int epoch) {
  uint64_t left = tickets_.load(std::memory_order_acquire);
  do {
    if (left >> kTicketBits != static_cast<uint32_t>(epoch) || left == tickets_of(epoch, 0)) return false;
  } while (!tickets_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel, std::memory_order_acquire));
  return true;
}

void ThreadPool::run_erased(Call call, void* fn, Who who) {
  const bool alone = who == Who::caller;
  if (in_region) {
    std::fputs("stoker: a parallel region was started inside a parallel region\n", stderr);
    std::abort();
  }
  std::lock_guard<std::mutex> lock(region_);
  if (!alone && static_cast<int>(workers_.size()) + 1 != size()) start_workers();
  in_region = true;
  const int workers = alone ? 0 : static_cast<int>(workers_.size());
  region_threads_ = workers + 1;
  if (workers > 0) {
    call_ = call;
    fn_ = fn;
    running_.store(workers, std::memory_order_relaxed);
    const int epoch = static_cast<int>(static_cast<uint32_t>(epoch_.load(std::memory_order_relaxed)) + 1u);  // wraps
    tickets_.store(tickets_of(epoch, workers), std::memory_order_release);
    epoch_.store(epoch, std::memory_order_release);
    epoch_.notify_all();
  }
  call(fn, 0, workers + 1);
  if (workers > 0 && who == Who::who_comes) {
    const uint64_t closed = tickets_of(epoch_.load(std::memory_order_relaxed), 0);
    const int absent = static_cast<int>(tickets_.exchange(closed, std::memory_order_acq_rel) - closed);
    running_.fetch_sub(absent, std::memory_order_acq_rel);
  }
  for (int left; workers > 0 && (left = running_.load(std::memory_order_acquire)) != 0;) await_change(running_, left, kSpinsInRegion);
  in_region = false;
}

void ThreadPool::barrier() {
  const int n = region_threads_;
  if (n == 1) return;
  const int generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == n - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
  } else {
    await_change(generation_, generation, kSpinsInRegion);
  }
}

ThreadPool& pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    instance.store(new ThreadPool(default_threads()));  // never destroyed: workers may outlive static destructors
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
#endif
  });
  return *instance.load(std::memory_order_acquire);
}

}  // namespace stoker
