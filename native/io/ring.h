// One io_uring, by raw system calls: set up, queue entries, enter, reap. For one thread. Knows nothing of reads.
#pragma once
#if defined(__linux__)
#include <linux/io_uring.h>

#include <cstddef>
#include <cstdint>

namespace stoker::io {

class Ring {
 public:
  // Throws std::system_error: ENOSYS (absent or too old), EPERM (forbidden), ENOMEM (locked-memory limit).
  explicit Ring(unsigned entries);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  io_uring_sqe& next_entry();  // zeroed; the ring must have been made large enough for all that is outstanding
  void enter(unsigned wait_for);  // submits what was queued and blocks until `wait_for` completions are there

  template <class Handle>
  void reap(Handle handle) {
    unsigned head = *cq_head_;
    const unsigned tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
    for (; head != tail; ++head) {
      const io_uring_cqe cqe = cqes_[head & cq_mask_];
      __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
      handle(cqe.user_data, cqe.res);
    }
  }

 private:
  void map(const io_uring_params& params);
  void release();

  int fd_ = -1;
  void* rings_ = nullptr;
  std::size_t rings_bytes_ = 0;
  io_uring_sqe* sqes_ = nullptr;
  std::size_t sqes_bytes_ = 0;
  unsigned *sq_head_ = nullptr, *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, sq_entries_ = 0, cq_mask_ = 0;
  io_uring_cqe* cqes_ = nullptr;
  unsigned queued_ = 0;
};

}  // namespace stoker::io
#endif
