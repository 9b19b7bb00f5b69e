"""Conversion in parallel over experts, not inside one: torch's own threads cost more than they give on small tensors.

Owns order and bounds: results come in the order of the jobs, few are in flight. Knows nothing of what the jobs do.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")
WORKERS = min(4, os.cpu_count() or 1)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """torch works in the calling thread alone, until the end of the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def in_order(jobs: Iterable[Callable[[], Result]]) -> Iterator[Result]:
    """Run jobs in a few threads; yield their results in order, never more than one a worker ahead."""
    with ThreadPoolExecutor(WORKERS, "convert", initializer=lambda: torch.set_num_threads(1)) as pool:
        flying: deque[Future[Result]] = deque()
        try:
            for job in jobs:
                flying.append(pool.submit(job))
                if len(flying) > WORKERS:
                    yield flying.popleft().result()
            while flying:
                yield flying.popleft().result()
        finally:
            for future in flying:
                future.cancel()
