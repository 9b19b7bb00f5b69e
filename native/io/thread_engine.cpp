// The engine of `depth` threads, each in one blocking pread at a time: for every POSIX system.
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <semaphore>
#include <vector>

#include "io/engine.h"
#include "io/spawn.h"

namespace stoker::io {
namespace {

constexpr auto kRetryPause = std::chrono::milliseconds(1);

void carry_out(Request& request) {
  if (request.fault == Fault::delay) std::this_thread::sleep_for(std::chrono::nanoseconds(request.delay_ns));
  for (;;) {
    const ssize_t got = pread(request.file->fd(), request.address + request.done, request.next_bytes(),
                              static_cast<off_t>(request.offset + request.done));
    const int retries = request.retries;
    if (advance(request, got < 0 ? -errno : got) == Next::finished) return;
    if (request.retries > retries) std::this_thread::sleep_for(kRetryPause);
  }
}

class ThreadEngine final : public Engine {
 public:
  ThreadEngine(Feed& feed, int depth) : feed_(feed) {
    threads_.reserve(static_cast<std::size_t>(depth));
    try {
      for (int i = 0; i < depth; ++i) threads_.push_back(spawn("stoker-read", [this] { work(); }));
    } catch (...) {
      stop();
      throw;
    }
  }

  ~ThreadEngine() override { stop(); }

  void wake() override { wakes_.release(); }

 private:
  void work() {
    for (;;) {
      wakes_.acquire();
      while (Request* request = feed_.take()) {
        carry_out(*request);
        feed_.finish(*request);
      }
      if (stopping_) return;
    }
  }

  void stop() {
    stopping_ = true;
    wakes_.release(static_cast<std::ptrdiff_t>(threads_.size()));
    for (std::thread& thread : threads_) thread.join();
  }

  Feed& feed_;
  std::atomic<bool> stopping_{false};
  std::counting_semaphore<> wakes_{0};
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Engine> make_thread_engine(Feed& feed, int depth) { return std::make_unique<ThreadEngine>(feed, depth); }

}  // namespace stoker::io
