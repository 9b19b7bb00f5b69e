"""What the server knows of its memory: malloc's own figure follows what is given out; collections leave a model out."""

import ctypes
import gc
from collections import deque

from stoker.server.memory import allocated_bytes, set_apart, together

MIB = 1 << 20


class Node:
    """Lives in a cycle, and says when it goes."""

    def __init__(self, gone: list[int]) -> None:
        self.me, self.gone = self, gone

    def __del__(self) -> None:
        self.gone.append(1)


def test_what_malloc_has_given_out_goes_up_and_down() -> None:
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    before = allocated_bytes()
    assert before is not None and before > 0
    for size in (4096, 64 * MIB):  # from the heap, and mapped
        blocks = [libc.malloc(size) for _ in range(4 * MIB // size or 1)]
        held = allocated_bytes()
        for block in blocks:
            libc.free(block)
        after = allocated_bytes()
        assert held is not None and after is not None
        assert held - before >= len(blocks) * size > 0.9 * (held - before)
        assert abs(after - before) < MIB


def test_what_lived_before_is_left_out_and_what_is_new_is_collected() -> None:
    gone: list[int] = []
    Node(gone)
    model = [[number] for number in range(300_000)]
    try:
        set_apart()
        assert gone == [1], "dead cycles are not kept with the model"
        assert gc.get_freeze_count() > len(model)
        Node(gone)
        gc.collect()
        assert gone == [1, 1]
    finally:
        together()
    assert gc.get_freeze_count() == 0


def test_dead_cycles_go_soon_beside_a_model() -> None:
    """Python itself decides when to collect all. What lives as long as a request must not wait long."""
    model = [[number] for number in range(1_000_000)]
    dead_at_most = []
    for apart in (False, True):
        gone: list[int] = []
        gc.collect()  # both times the model has outlived a collection, whatever other tests have left
        if apart:
            set_apart()
        try:
            alive, dead = deque[Node](maxlen=8_000), 0
            for made in range(1, 150_001):
                alive.append(Node(gone))
                dead = max(dead, made - len(alive) - len(gone))
        finally:
            together()
        dead_at_most.append(dead)
        alive.clear()
        gc.collect()
    assert dead_at_most[1] < 0.8 * dead_at_most[0], dead_at_most
    assert len(model) == 1_000_000
