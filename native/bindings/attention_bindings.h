// Python bindings of attention, norms and routing.
#pragma once
#include <nanobind/nanobind.h>

inline void bind_attention(nanobind::module_&) {}
