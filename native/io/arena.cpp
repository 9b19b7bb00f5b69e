#include "io/arena.h"

#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>

#include "io/writers.h"

namespace stoker::io {
namespace {

std::uintptr_t round_up(std::uintptr_t value, std::size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

std::shared_ptr<Arena> Arena::create(std::size_t nbytes, bool huge_pages) {
  if (nbytes == 0 || nbytes > std::numeric_limits<std::size_t>::max() / 2)
    throw std::system_error(EINVAL, std::generic_category(), "arena size");
  std::shared_ptr<Arena> arena(new Arena);
  arena->nbytes_ = round_up(nbytes, kBlockBytes);

  // Reserve with room to align, then keep only [guard | data | guard].
  const std::size_t reserve_bytes = arena->nbytes_ + kHugePageBytes + 2 * kBlockBytes;
  void* reserve = mmap(nullptr, reserve_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserve == MAP_FAILED) fail("mmap");
  const auto begin = reinterpret_cast<std::uintptr_t>(reserve);
  const std::uintptr_t data = round_up(begin + kBlockBytes, kHugePageBytes);
  const std::uintptr_t keep_begin = data - kBlockBytes, keep_end = data + arena->nbytes_ + kBlockBytes;
  if (keep_begin > begin) munmap(reserve, keep_begin - begin);
  if (begin + reserve_bytes > keep_end) munmap(reinterpret_cast<void*>(keep_end), begin + reserve_bytes - keep_end);
  arena->mapping_ = reinterpret_cast<void*>(keep_begin);
  arena->mapping_bytes_ = keep_end - keep_begin;

  // Writable memory is accounted for here: this is where a system without room refuses.
  auto* bytes = reinterpret_cast<std::uint8_t*>(data);
  if (mprotect(bytes, arena->nbytes_, PROT_READ | PROT_WRITE) != 0) fail("mprotect");
  arena->data_ = bytes;
#ifdef MADV_HUGEPAGE
  // Advice: a kernel without huge pages refuses it and the memory is as good, only slower; pages() tells.
  madvise(bytes, arena->nbytes_, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#else
  (void)huge_pages;
#endif
  return arena;
}

Arena::~Arena() {
  if (data_ != nullptr) let_go_of(data_, data_ + nbytes_);
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

void Arena::populate(std::size_t offset, std::size_t nbytes) {
  if (offset > nbytes_ || nbytes > nbytes_ - offset) throw std::out_of_range("outside the arena");
  const std::size_t end = offset + nbytes;
  // Stores, not madvise(MADV_POPULATE_WRITE): that keeps everybody who maps memory waiting while pages are being found.
  for (std::size_t at = offset / kBlockBytes * kBlockBytes; at < end; at += kBlockBytes) {
    std::atomic_ref<std::uint8_t>(data_[at]).fetch_or(0);  // one step, so that a read into the same page loses nothing
  }
}

Arena::Pages Arena::pages() const {
  Pages pages{0, 0};
  std::ifstream smaps("/proc/self/smaps");
  const auto data = reinterpret_cast<std::uintptr_t>(data_);
  bool ours = false;
  for (std::string line; std::getline(smaps, line);) {
    unsigned long long begin = 0, end = 0, kib = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &begin, &end) == 2) ours = begin >= data && end <= data + nbytes_;
    if (!ours) continue;
    if (std::sscanf(line.c_str(), "Rss: %llu kB", &kib) == 1) pages.resident_bytes += kib * 1024;
    if (std::sscanf(line.c_str(), "AnonHugePages: %llu kB", &kib) == 1) pages.huge_bytes += kib * 1024;
  }
  return pages;
}

}  // namespace stoker::io
