// One read: what was asked, how far it has come, how it ended. Shared by the queue, which orders reads, and the engines,
// which carry them out. advance() is the one place that says what the result of a system call means.
#pragma once
#include <cstddef>
#include <cstdint>

#include "io/file.h"

namespace stoker::io {

enum class State : std::uint8_t { pending, in_flight, done, expired, failed, cancelled };

// Faults put below the queue, for tests of everything above.
enum class Fault : std::uint8_t { none, eio, short_read, end_of_file, eintr, eagain, delay };

inline constexpr int kEndOfFile = -1;                                // in Request::error, beside errno values
inline constexpr std::size_t kMaxCallBytes = std::size_t{1} << 30;   // one system call; longer reads are continued
inline constexpr int kMaxRetries = 16;

struct Request {
  // What was asked; fixed while the read exists.
  const File* file = nullptr;
  std::uint64_t offset = 0;
  std::size_t length = 0;
  std::uint8_t* address = nullptr;
  std::int64_t tag = 0;
  std::int64_t deadline_ns = 0;  // 0: none
  std::uint64_t sequence = 0;

  // The queue's, under its lock.
  State state = State::pending;
  bool prefetch = false;
  bool freed = false;
  std::uint64_t generation = 0;
  std::uint32_t waiters = 0;
  std::int64_t submit_ns = 0, start_ns = 0, end_ns = 0;

  // The engine's, while the read is in flight.
  std::size_t done = 0;   // bytes that are whole in memory
  std::size_t got = 0;    // bytes that arrived, for the report of a failure
  int error = 0;          // errno, or kEndOfFile
  int retries = 0;
  int shorts = 0;
  bool partial_block = false;  // a direct read stopped inside its first block once
  Fault fault = Fault::none;
  std::int64_t delay_ns = 0;

  std::size_t next_bytes() const;  // length of the next system call
};

enum class Next { finished, again };

// Takes the result of a system call (bytes, or -errno). `again`: call once more at offset + done.
Next advance(Request& request, std::int64_t result);

}  // namespace stoker::io
