// Starts a thread that receives no signals (they belong to the main thread) and carries a name for `top -H`.
#pragma once
#include <pthread.h>

#include <csignal>
#include <thread>
#include <utility>

namespace stoker::io {

template <class Body>
std::thread spawn(const char* name, Body body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // inherited by the new thread: there is no moment without it
  struct Restore {
    sigset_t* mask;
    ~Restore() { pthread_sigmask(SIG_SETMASK, mask, nullptr); }
  } restore{&before};
  return std::thread([name, body = std::move(body)]() mutable {
#if defined(__APPLE__)
    pthread_setname_np(name);
#else
    pthread_setname_np(pthread_self(), name);
#endif
    body();
  });
}

}  // namespace stoker::io
