"""A machine and models with round numbers, so that forecasts can be checked by hand."""

from dataclasses import replace
from typing import Any

from stoker.plan.profile import Burst, Costs, FirstUse, Kernels, Profile, Sustained, Waits
from stoker.plan.sizes import ModelShape

MB = 1_000_000


def machine(
    *,
    record_ms: float = 1.0,
    latency_ms: float = 0.0,
    expert_bytes_s: float = 10e9,
    macs_s: float = 100e9,
    layer_ms: float = 0.0,
    miss_ms: float = 0.0,
    wait_ms: float = 0.0,
    keep_ms: float = 0.0,
    touch_bytes_s: float = 1e15,
    touch_alone_bytes_s: float | None = None,
    holds: float = 0.5,
    reads_hold: float = 0.0,
    progress: float = 1.0,
    buffered_bytes_s: float = 0.5e9,
    load_s: float = 0.0,
) -> Profile:
    """A MiB takes record_ms, one after the other; every read has latency_ms before it from idle."""
    sizes = (1 << 18, 1 << 20, 1 << 22)

    def burst(size: int, reads: int) -> Burst:
        each = record_ms * size / (1 << 20)
        last = latency_ms + each * reads
        return Burst(size, reads, latency_ms + each, last, 0.9 * last, 1.3 * last, 9)

    steady = tuple(
        Sustained(size, depth, (1 << 20) * 1e3 / record_ms, 1.0, 2.0) for size in sizes for depth in (1, 4, 8)
    )
    rates = {1: macs_s, 512: macs_s}
    return Profile(
        machine={"cpu": "example", "kernel": "1", "device": "disk", "threads": "2", "version": "3"},
        threads=2,
        memory_bytes=16 << 30,
        directory="/models",
        backend="io_uring",
        direct=True,
        bursts=tuple(burst(size, reads) for size in sizes for reads in (1, 2, 4, 8)),
        sustained=steady,
        depth=2,
        buffered_bytes_s=buffered_bytes_s,
        kernels=Kernels(
            isa="avx2",
            read_bytes_s={1: 10e9, 2: 20e9},
            matvec_bytes_s=10e9,
            experts_bytes_s=expert_bytes_s,
            dense_macs_s=dict(rates),
            expert_macs_s=dict(rates),
            attention_macs_s={"decode": 1e15, "prefill": 1e15},
            pair_bytes_s=1e15,
        ),
        first_use=FirstUse(touch_bytes_s, holds, alone_bytes_s=touch_alone_bytes_s or touch_bytes_s),
        waits=Waits(progress=progress, alone_bytes_s=expert_bytes_s, dense_bytes_s=10e9, holds=reads_hold),
        costs=Costs(
            step_ms=0.0,
            layer_ms=layer_ms,
            plain_layer_ms=3 * layer_ms,
            keep_ms=keep_ms,
            miss_ms=miss_ms,
            wait_ms=wait_ms,
            process_bytes=400 << 20,
            load_s=load_s,
            load_layer_s=0.0,
        ),
    )


def model(**changes: Any) -> ModelShape:
    """10 layers, 64 experts of 1 MiB, top 4; dense parts of 10 MB a layer."""
    shape = ModelShape(
        name="example",
        layers=10,
        moe_layers=10,
        experts=64,
        top_k=4,
        hidden=1024,
        expert_width=512,
        vocabulary=1000,
        heads=8,
        kv_heads=2,
        head_dim=64,
        attention_layers=10,
        plain_attention=0,
        record_bytes=1 << 20,
        expert_bytes=640 << 20,
        dense_bytes=110 * MB,
        total_bytes=(640 << 20) + 110 * MB,
        dense_layer_bytes=10.0 * MB,
        plain_layer_bytes=0.0,
        dense_layer_macs=20e6,
        head_bytes=10 * MB,
        head_macs=20_000_000,
    )
    return replace(shape, **changes)
