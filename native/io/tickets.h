// The pool of reads behind tickets. A ticket is a slot number and the slot's generation, so looking one up is O(1) and a
// stale one is recognised. Slots never move. A freed slot is reused only after kRemembered others were freed, so that its
// outcome can be asked for a while. Not thread-safe: the queue locks.
#pragma once
#include <cstdint>
#include <deque>

#include "io/request.h"

namespace stoker::io {

using Ticket = std::int64_t;

class TicketPool {
 public:
  static constexpr std::size_t kRemembered = 4096;
  static constexpr std::size_t kMaxOutstanding = std::size_t{1} << 16;

  // Throws std::runtime_error when kMaxOutstanding reads are neither waited for nor cancelled.
  Request& take();
  void free(Request& request);
  Ticket ticket_of(const Request& request) const;
  // Throws std::invalid_argument for a number that was never a ticket, or one freed too long ago.
  Request& at(Ticket ticket);
  std::size_t outstanding() const { return slots_.size() - free_.size(); }

 private:
  struct Slot {
    Request request;  // first, so that a request's address is its slot's
    std::uint32_t index = 0;
  };
  std::deque<Slot> slots_;
  std::deque<Slot*> free_;  // longest free first
};

}  // namespace stoker::io
