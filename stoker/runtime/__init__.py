"""transformers models with streamed experts and quantised linears, inside a memory ledger."""

import os

# torch's OpenMP workers spin after each parallel region by default and would take the cores from the native pool.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
