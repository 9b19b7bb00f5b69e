#include "io/writers.h"

#include <algorithm>
#include <mutex>
#include <vector>

namespace stoker::io {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<MemoryWriter*> writers;
};

// Never destroyed: arenas and queues may outlive every static object of this library.
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

}  // namespace

void add_writer(MemoryWriter* writer) {
  std::lock_guard lock(registry().mutex);
  registry().writers.push_back(writer);
}

void remove_writer(MemoryWriter* writer) {
  std::lock_guard lock(registry().mutex);
  std::erase(registry().writers, writer);
}

void let_go_of(const std::uint8_t* begin, const std::uint8_t* end) {
  std::lock_guard lock(registry().mutex);  // held throughout: no queue can go away in the middle
  for (MemoryWriter* writer : registry().writers) writer->let_go(begin, end);
}

}  // namespace stoker::io
