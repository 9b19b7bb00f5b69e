#include "io/request.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "io/arena.h"

namespace stoker::io {
namespace {

constexpr int kPoison = 0xA5;

// Bytes that an injected fault takes back are overwritten: whoever does not read them again is found out.
std::int64_t apply_fault(Request& request, std::int64_t result) {
  const Fault fault = std::exchange(request.fault, Fault::none);
  if (fault == Fault::none || fault == Fault::delay || result < 0) return result;
  const std::int64_t keep = fault == Fault::short_read ? result / 2 : 0;
  std::memset(request.address + request.done + keep, kPoison, static_cast<std::size_t>(result - keep));
  switch (fault) {
    case Fault::eio: return -EIO;
    case Fault::eintr: return -EINTR;
    case Fault::eagain: return -EAGAIN;
    default: return keep;
  }
}

Next fail(Request& request, int error) {
  request.error = error;
  return Next::finished;
}

}  // namespace

std::size_t Request::next_bytes() const { return std::min(length - done, kMaxCallBytes); }

Next advance(Request& request, std::int64_t raw_result) {
  const std::int64_t result = apply_fault(request, raw_result);
  if (result == -EINTR || result == -EAGAIN)
    return ++request.retries <= kMaxRetries ? Next::again : fail(request, static_cast<int>(-result));
  if (result < 0) return fail(request, static_cast<int>(-result));

  request.got = request.done + static_cast<std::size_t>(result);
  if (request.got >= request.length) {
    request.done = request.length;
    return Next::finished;
  }
  // Direct reads go on from a whole block: a part of one is read again, and if nothing but that part comes, the file ends.
  const std::size_t whole = request.file->direct() ? request.got / kBlockBytes * kBlockBytes : request.got;
  if (whole > request.done) {
    if (static_cast<std::size_t>(result) < kMaxCallBytes) ++request.shorts;
    request.done = whole;
    return Next::again;
  }
  if (result > 0 && !std::exchange(request.partial_block, true)) {
    ++request.shorts;
    return Next::again;
  }
  return fail(request, kEndOfFile);
}

}  // namespace stoker::io
