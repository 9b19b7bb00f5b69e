// The module stoker.native._kernels. Use it through stoker/native/kernels.py.
#include <nanobind/nanobind.h>

#include "bindings/attention_bindings.h"
#include "bindings/matmul_bindings.h"
#include "bindings/prerouter_bindings.h"
#include "bindings/roster_bindings.h"

NB_MODULE(_kernels, m) {
  bind_matmul(m);
  bind_attention(m);
  bind_prerouter(m);
  bind_roster(m);
}
