// Memory that reads land in: one anonymous mapping, 2 MiB aligned, in huge pages where the system grants them.
// Owns the mapping and its guard pages; a page before and a page behind are unreadable, so an overrun faults at once.
// Knows nothing of files, tensors or Python. Whoever holds the shared_ptr keeps the memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

namespace stoker::io {

inline constexpr std::size_t kBlockBytes = 4096;  // what direct reads are aligned to
inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

class Arena {
 public:
  // Throws std::system_error when the system has no room; nbytes is rounded up to whole blocks.
  static std::shared_ptr<Arena> create(std::size_t nbytes, bool huge_pages);
  // First makes every live queue let go of the memory: pending reads are cancelled, those in flight are waited for.
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::uint8_t* data() const { return data_; }
  std::size_t nbytes() const { return nbytes_; }

  // Faults the pages of [offset, offset + nbytes) in now, so that a later step does not pay for it. Harmless beside
  // reads into the same bytes, and from several threads. Throws std::out_of_range.
  void populate(std::size_t offset, std::size_t nbytes);

  struct Pages {
    std::size_t resident_bytes, huge_bytes;
  };
  // What the kernel holds for this mapping now (/proc/self/smaps). Zero and zero where the system does not tell.
  Pages pages() const;

 private:
  Arena() = default;
  void* mapping_ = nullptr;  // with guard pages
  std::size_t mapping_bytes_ = 0;
  std::uint8_t* data_ = nullptr;
  std::size_t nbytes_ = 0;
};

}  // namespace stoker::io
