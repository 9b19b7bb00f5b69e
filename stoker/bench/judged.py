"""Verdicts on files: the evidence of a trace or a result, with what is known of this machine, explained.

The bridge between plan.explain (pure) and the machine's cached profile; `stoker explain` and the page share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.bench.results import read_result
from stoker.plan.evidence import Evidence, of_result, of_trace
from stoker.plan.explain import Explanation, explain
from stoker.plan.profile import Costs, cached
from stoker.runtime.budget import default_threads
from stoker.trace.reader import Trace


def judge_file(file: Path) -> list[Explanation]:
    """One verdict for a trace, one for each variant of a result. Raises TraceError for anything else."""
    return judge_result(read_result(file)) if file.suffix == ".json" else [judge_trace(Trace(file))]


def judge_trace(trace: Trace) -> Explanation:
    return explain(on_this_machine(of_trace(trace), trace.about.get("model"), trace.about.get("threads")))


def judge_result(document: Mapping[str, Any]) -> list[Explanation]:
    threads, model = (document.get("options") or {}).get("threads"), (document.get("model") or {}).get("path")
    return [explain(on_this_machine(evidence, model, threads)) for evidence in of_result(document)]


def on_this_machine(evidence: Evidence, model: str | None, threads: int | None) -> Evidence:
    """With the profile of `stoker probe` where the run's store lies on this machine and there is one; else as it is."""
    if model is None or not Path(model).is_dir():
        return evidence
    profile = cached(Path(model), threads or default_threads())
    if profile is None:
        return evidence
    return evidence.on(
        device_bytes_s=profile.sustained_bytes_s(evidence.record_bytes) if evidence.record_bytes else None,
        memory_bytes_s=profile.kernels.matvec_bytes_s,
        overhead_ms=expected_overhead_ms(evidence, profile.costs),
    )


def expected_overhead_ms(evidence: Evidence, costs: Costs) -> float | None:
    """What a step costs on this machine beside arithmetic and reads, by its profile."""
    if evidence.layers is None or evidence.misses is None:
        return None
    waits = min(evidence.misses, evidence.layers)
    a_layer = costs.layer_ms + costs.keep_ms
    return costs.step_ms + evidence.layers * a_layer + evidence.misses * costs.miss_ms + waits * costs.wait_ms
