#include "kernels/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace stoker {
namespace {

const KernelTable* find(const char* name) {
  if (std::strcmp(name, "portable") == 0) return portable_table();
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (std::strcmp(name, "avx2") == 0 && avx2) return avx2_table();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
  if (std::strcmp(name, "avx512") == 0 && avx512) return avx512_table();
#endif
  return nullptr;
}

const KernelTable* choose() {
  if (const char* wanted = std::getenv("STOKER_ISA"); wanted && *wanted) {
    if (const KernelTable* table = find(wanted)) return table;
    throw std::runtime_error("STOKER_ISA=" + std::string(wanted) +
                             " is unknown or not available on this machine (known: avx512, avx2, portable)");
  }
  for (const char* name : {"avx512", "avx2"}) {
    if (const KernelTable* table = find(name)) return table;
  }
  return portable_table();
}

std::atomic<const KernelTable*> table_in_use{nullptr};

}  // namespace

const KernelTable& kernels() {
  const KernelTable* table = table_in_use.load(std::memory_order_acquire);
  if (!table) {
    table = choose();
    table_in_use.store(table, std::memory_order_release);
  }
  return *table;
}

bool force_isa(const char* name) {
  const KernelTable* table = find(name);
  if (table) table_in_use.store(table, std::memory_order_release);
  return table != nullptr;
}

}  // namespace stoker
