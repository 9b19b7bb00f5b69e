#include "io/ring.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <thread>

namespace stoker::io {
namespace {

// Completions are then delivered where this thread waits for them, without interrupting it. From Linux 6.1 on.
#if defined(IORING_SETUP_DEFER_TASKRUN)
constexpr unsigned kPreferredFlags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
#else
constexpr unsigned kPreferredFlags = 0;
#endif
// One mapping for both rings, completions never dropped, and IORING_OP_READ (it came with RW_CUR_POS, in Linux 5.6).
constexpr unsigned kNeeded = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_RW_CUR_POS;

int setup(unsigned entries, io_uring_params& params) {
  params = {};
  params.flags = kPreferredFlags;
  int fd = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
  if (fd < 0 && errno == EINVAL && kPreferredFlags != 0) {
    params = {};
    fd = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
  }
  return fd;
}

}  // namespace

Ring::Ring(unsigned entries) {
  io_uring_params params;
  fd_ = setup(entries, params);
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "io_uring_setup");
  try {
    if ((params.features & kNeeded) != kNeeded)
      throw std::system_error(ENOSYS, std::generic_category(), "this kernel's io_uring is too old (5.6 is needed)");
    map(params);
  } catch (...) {
    release();
    throw;
  }
}

Ring::~Ring() { release(); }

void Ring::release() {
  if (sqes_ != nullptr) munmap(sqes_, sqes_bytes_);
  if (rings_ != nullptr) munmap(rings_, rings_bytes_);
  if (fd_ >= 0) close(fd_);
}

void Ring::map(const io_uring_params& params) {
  const auto map_part = [this](std::size_t nbytes, std::uint64_t offset) {
    void* part = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, static_cast<off_t>(offset));
    if (part == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of io_uring");
    return part;
  };
  rings_bytes_ = std::max<std::size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                       params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
  rings_ = map_part(rings_bytes_, IORING_OFF_SQ_RING);
  sqes_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
  sqes_ = static_cast<io_uring_sqe*>(map_part(sqes_bytes_, IORING_OFF_SQES));

  char* base = static_cast<char*>(rings_);
  const auto word = [base](std::uint32_t offset) { return reinterpret_cast<unsigned*>(base + offset); };
  sq_head_ = word(params.sq_off.head);
  sq_tail_ = word(params.sq_off.tail);
  sq_array_ = word(params.sq_off.array);
  sq_mask_ = *word(params.sq_off.ring_mask);
  sq_entries_ = params.sq_entries;
  cq_head_ = word(params.cq_off.head);
  cq_tail_ = word(params.cq_off.tail);
  cq_mask_ = *word(params.cq_off.ring_mask);
  cqes_ = reinterpret_cast<io_uring_cqe*>(base + params.cq_off.cqes);
}

io_uring_sqe& Ring::next_entry() {
  const unsigned tail = *sq_tail_;
  if (tail - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE) == sq_entries_) std::abort();  // broken invariant: made too small
  io_uring_sqe& entry = sqes_[tail & sq_mask_];
  std::memset(&entry, 0, sizeof entry);
  sq_array_[tail & sq_mask_] = tail & sq_mask_;
  // The kernel looks at entries only inside enter(), so the tail may move before the caller has filled this one.
  __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
  ++queued_;
  return entry;
}

void Ring::enter(unsigned wait_for) {
  for (;;) {
    const long submitted = syscall(__NR_io_uring_enter, fd_, queued_, wait_for, IORING_ENTER_GETEVENTS, nullptr, 0);
    if (submitted >= 0) {
      queued_ -= static_cast<unsigned>(submitted);
      if (queued_ == 0 || wait_for == 0) return;
      if (__atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE) != *cq_head_) return;  // the rest goes with the next enter
      continue;
    }
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EBUSY) {  // the kernel lacks memory, or wants completions reaped first
      if (__atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE) != *cq_head_) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      continue;
    }
    std::perror("stoker: io_uring_enter");
    std::abort();  // only a broken invariant of this file gets here
  }
}

}  // namespace stoker::io
#endif
