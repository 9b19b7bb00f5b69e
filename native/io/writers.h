// Who may still write into memory: every live read queue is listed here, and an arena asks all of them to let go of its
// bytes before it unmaps them. Without this, a read in flight could land in memory that by then belongs to someone else.
#pragma once
#include <cstdint>

namespace stoker::io {

class MemoryWriter {
 public:
  virtual ~MemoryWriter() = default;
  // Returns when no byte of [begin, end) will be written any more: pending reads are cancelled, started ones awaited.
  virtual void let_go(const std::uint8_t* begin, const std::uint8_t* end) = 0;
};

void add_writer(MemoryWriter* writer);
void remove_writer(MemoryWriter* writer);
void let_go_of(const std::uint8_t* begin, const std::uint8_t* end);

}  // namespace stoker::io
