"""First use of memory: how fast it comes, and how much of the computing stands still meanwhile.

On a virtual machine whose memory was given back, the host has to find each page, and a first prompt fills gigabytes of
slots. Much is used at once, because what another program has just freed comes back fast. Knows no model.
"""

import threading
import time

import psutil
import torch

from stoker.bench.probe_kernels import DENSE, HIDDEN, SomeDense, fill, median_s
from stoker.native import kernels
from stoker.native.io import Arena
from stoker.plan.profile import FirstUse

FRESH_BYTES, LEAST_BYTES = 1 << 30, 128 << 20
WEIGHTS_BYTES = 64 << 20
TOKENS = 64  # a product of about a millisecond


def measure(threads: int) -> FirstUse:
    """One thread uses a gigabyte for the first time while `threads` compute."""
    before, nbytes = kernels.threads(), max(LEAST_BYTES, min(FRESH_BYTES, psutil.virtual_memory().available // 4))
    with torch.inference_mode(), Arena(WEIGHTS_BYTES) as weights, Arena(nbytes) as fresh:
        fill(weights)
        dense, x, out = SomeDense(weights), torch.randn(TOKENS, HIDDEN), torch.empty(TOKENS, DENSE.rows)
        try:
            kernels.set_threads(threads)
            usual_s = median_s(lambda: dense.product(x, out), seconds=0.3)
            user = threading.Thread(target=fresh.populate)
            started, products = time.perf_counter(), 0
            user.start()
            while user.is_alive():
                dense.product(x, out)
                products += 1
            user.join()
            took_s = time.perf_counter() - started
            return FirstUse(nbytes / took_s, min(1.0, max(0.0, 1 - products * usual_s / took_s)))
        finally:
            kernels.set_threads(before)
