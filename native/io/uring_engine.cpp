// The engine on io_uring: one thread submits and reaps, asleep in io_uring_enter in between. New work reaches it through an
// eventfd that the ring itself reads, so nothing polls.
#include "io/engine.h"

#if defined(__linux__)
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <exception>
#include <future>

#include "io/ring.h"
#include "io/spawn.h"

namespace stoker::io {
namespace {

// What a completion is about: a Request (aligned, so its low bits are free), the wake-up, or the end of an injected delay.
constexpr std::uint64_t kWake = 1;
constexpr std::uint64_t kDelayOver = 2;

class UringEngine final : public Engine {
 public:
  UringEngine(Feed& feed, int depth) : feed_(feed), wake_fd_(eventfd(0, EFD_CLOEXEC)) {
    if (wake_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    std::promise<void> ready;
    std::future<void> started = ready.get_future();
    try {
      thread_ = spawn("stoker-read", [this, depth, ready = std::move(ready)]() mutable {
        run(static_cast<unsigned>(depth), ready);
      });
      started.get();
    } catch (...) {
      if (thread_.joinable()) thread_.join();
      close(wake_fd_);
      throw;
    }
  }

  ~UringEngine() override {
    stopping_ = true;
    wake();
    thread_.join();
    close(wake_fd_);
  }

  void wake() override {
    if (woken_.exchange(true)) return;  // one unread wake-up is enough
    const std::uint64_t one = 1;
    while (write(wake_fd_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

 private:
  // The ring is made on the thread that uses it: a single-issuer ring belongs to its maker.
  void run(unsigned depth, std::promise<void>& ready) {
    std::unique_ptr<Ring> ring;
    try {
      ring = std::make_unique<Ring>(depth + 2);
    } catch (...) {
      ready.set_exception(std::current_exception());
      return;
    }
    ready.set_value();
    ring_ = ring.get();
    loop();
  }

  void loop() {
    listen();
    for (;;) {
      while (Request* request = feed_.take()) start(*request);
      if (stopping_ && reading_ == 0 && !listening_) return;
      ring_->enter(1);
      ring_->reap([this](std::uint64_t about, int result) { handle(about, result); });
    }
  }

  void listen() {
    io_uring_sqe& entry = ring_->next_entry();
    entry.opcode = IORING_OP_READ;
    entry.fd = wake_fd_;
    entry.addr = reinterpret_cast<std::uint64_t>(&wake_count_);
    entry.len = sizeof wake_count_;
    entry.user_data = kWake;
    listening_ = true;
  }

  void start(Request& request) {
    ++reading_;
    if (request.fault == Fault::delay) {
      delay_ = {request.delay_ns / 1'000'000'000, request.delay_ns % 1'000'000'000};
      io_uring_sqe& entry = ring_->next_entry();
      entry.opcode = IORING_OP_TIMEOUT;
      entry.addr = reinterpret_cast<std::uint64_t>(&delay_);
      entry.len = 1;
      entry.user_data = reinterpret_cast<std::uint64_t>(&request) | kDelayOver;
      ring_->enter(0);  // the kernel copies the time here
    } else {
      read(request);
    }
  }

  void read(Request& request) {
    io_uring_sqe& entry = ring_->next_entry();
    entry.opcode = IORING_OP_READ;
    entry.fd = request.file->fd();
    entry.off = request.offset + request.done;
    entry.addr = reinterpret_cast<std::uint64_t>(request.address + request.done);
    entry.len = static_cast<std::uint32_t>(request.next_bytes());
    entry.user_data = reinterpret_cast<std::uint64_t>(&request);
    if (request.retries > 0) entry.flags = IOSQE_ASYNC;  // the quick way had its chance: let a kernel worker block on it
  }

  void handle(std::uint64_t about, int result) {
    if (about == kWake) {
      listening_ = false;
      woken_ = false;
      if (!stopping_) listen();
      return;
    }
    Request& request = *reinterpret_cast<Request*>(about & ~kDelayOver);
    if ((about & kDelayOver) != 0 || advance(request, result) == Next::again) {
      read(request);
      return;
    }
    --reading_;
    feed_.finish(request);
  }

  Feed& feed_;
  int wake_fd_;
  std::atomic<bool> woken_{false}, stopping_{false};
  std::thread thread_;
  // The thread's own:
  Ring* ring_ = nullptr;
  int reading_ = 0;
  bool listening_ = false;
  std::uint64_t wake_count_ = 0;
  struct {
    std::int64_t seconds, nanoseconds;
  } delay_{};
};

}  // namespace

std::unique_ptr<Engine> make_uring_engine(Feed& feed, int depth) { return std::make_unique<UringEngine>(feed, depth); }

}  // namespace stoker::io
#else
#include <cerrno>
#include <system_error>

namespace stoker::io {

std::unique_ptr<Engine> make_uring_engine(Feed&, int) {
  throw std::system_error(ENOSYS, std::generic_category(), "io_uring is a Linux interface");
}

}  // namespace stoker::io
#endif
