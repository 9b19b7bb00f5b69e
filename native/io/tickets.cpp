#include "io/tickets.h"

#include <stdexcept>
#include <string>

namespace stoker::io {
namespace {

constexpr int kIndexBits = 20;
constexpr Ticket kIndexMask = (Ticket{1} << kIndexBits) - 1;
static_assert(TicketPool::kMaxOutstanding + TicketPool::kRemembered < (std::size_t{1} << kIndexBits));

}  // namespace

Request& TicketPool::take() {
  if (outstanding() >= kMaxOutstanding)
    throw std::runtime_error(std::to_string(kMaxOutstanding) + " reads are outstanding: wait for some of them or cancel them");
  Slot* slot = nullptr;
  if (free_.size() > kRemembered && free_.front()->request.waiters == 0) {
    slot = free_.front();
    free_.pop_front();
  } else {
    slot = &slots_.emplace_back();
    slot->index = static_cast<std::uint32_t>(slots_.size() - 1);
  }
  const std::uint64_t generation = slot->request.generation + 1;
  slot->request = Request{};
  slot->request.generation = generation;
  return slot->request;
}

void TicketPool::free(Request& request) {
  if (request.freed) return;
  request.freed = true;
  free_.push_back(reinterpret_cast<Slot*>(&request));
}

Ticket TicketPool::ticket_of(const Request& request) const {
  return static_cast<Ticket>(request.generation) << kIndexBits | reinterpret_cast<const Slot*>(&request)->index;
}

Request& TicketPool::at(Ticket ticket) {
  const auto index = static_cast<std::size_t>(ticket & kIndexMask);
  if (ticket > 0 && index < slots_.size()) {
    Request& request = slots_[index].request;
    if (request.generation == static_cast<std::uint64_t>(ticket >> kIndexBits)) return request;
  }
  throw std::invalid_argument("ticket " + std::to_string(ticket) + " is unknown, or was freed long ago");
}

}  // namespace stoker::io
