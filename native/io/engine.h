// How reads are carried out. An engine takes reads from its feed (the queue), runs them, and hands them back finished.
// It knows nothing of tickets, classes or deadlines; the feed never gives it more than the queue's depth at once.
#pragma once
#include <memory>

#include "io/request.h"

namespace stoker::io {

class Feed {
 public:
  virtual Request* take() = 0;  // the next read to start, or nullptr when there is none or the depth is reached
  virtual void finish(Request& request) = 0;

 protected:
  ~Feed() = default;
};

class Engine {
 public:
  virtual ~Engine() = default;  // the feed has nothing more to give; returns when the last read has ended
  virtual void wake() = 0;      // there may be something to take
};

std::unique_ptr<Engine> make_thread_engine(Feed& feed, int depth);
// Throws std::system_error where io_uring is absent, forbidden or too old (before Linux 5.6).
std::unique_ptr<Engine> make_uring_engine(Feed& feed, int depth);

}  // namespace stoker::io
