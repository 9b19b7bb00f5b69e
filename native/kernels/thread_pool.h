// A persistent pool: one parallel region at a time, run by the calling thread (number 0) and the workers.
// Owns its threads. Workers sleep on a futex; they spin for a few microseconds at most before sleeping, 40 inside a region.
// Regions from several callers are run one after the other. A region must not throw and must not start another region.
// After fork the child gets a fresh pool: threads start at the first region, so importing the module starts none.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace stoker {

// Waking the other threads costs 5 to 35 microseconds: work on fewer bytes of weights than this is done sooner by one.
constexpr int64_t kAloneBytes = 256 * 1024;

class ThreadPool {
 public:
  explicit ThreadPool(int n_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return n_threads_.load(std::memory_order_relaxed); }
  // Takes effect for the next region.
  void resize(int n_threads);

  // Calls fn(thread, n_threads) once on every thread and returns when all are done. With `alone` the caller is the only
  // thread of the region: fn(0, 1), and barriers let it pass.
  template <class F>
  void run(F&& fn, bool alone = false) {
    using Fn = std::remove_reference_t<F>;
    run_erased([](void* f, int thread, int n) { (*static_cast<Fn*>(f))(thread, n); },
               const_cast<void*>(static_cast<const void*>(&fn)), alone ? Who::caller : Who::all);
  }

  // For work that is taken from a queue, without barriers: fn(thread, n_threads) on the caller, who returns only with the
  // queue empty, and on the workers that come before that. A worker that is late (its core is busy) is not waited for.
  template <class F>
  void share(F&& fn, bool alone = false) {
    using Fn = std::remove_reference_t<F>;
    run_erased([](void* f, int thread, int n) { (*static_cast<Fn*>(f))(thread, n); },
               const_cast<void*>(static_cast<const void*>(&fn)), alone ? Who::caller : Who::who_comes);
  }

  // Inside a region: no thread passes before all have arrived; writes before it are visible after it.
  void barrier();

 private:
  using Call = void (*)(void*, int, int);
  enum class Who { caller, all, who_comes };
  void run_erased(Call call, void* fn, Who who);
  bool enter(int epoch);
  void start_workers();
  void stop_workers();
  void work(int thread, int n_threads, int seen_epoch);

  std::mutex region_;                // held for a whole region, and while the number of threads changes
  std::vector<std::thread> workers_;
  std::atomic<int> n_threads_;
  int region_threads_ = 1;           // threads of the running region
  Call call_ = nullptr;
  void* fn_ = nullptr;
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<int> epoch_{0};       // incremented to start a region
  alignas(64) std::atomic<uint64_t> tickets_{0};  // epoch, and how many workers may still enter its region (low 16 bits)
  alignas(64) std::atomic<int> running_{0};     // workers that have not finished the region
  alignas(64) std::atomic<int> arrived_{0};     // threads at the barrier
  alignas(64) std::atomic<int> generation_{0};  // incremented when a barrier opens
};

// The pool of the process. Its first size is the number of CPUs that the process may run on.
ThreadPool& pool();

}  // namespace stoker
