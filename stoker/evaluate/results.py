"""Measured sums as the figures that are shown and kept: perplexity with paired intervals, KL, agreement.

Definitions: docs/eval.md. Plain data in and out; knows no model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import OptionError
from stoker.evaluate.bootstrap import perplexity_ratio, ratio_interval
from stoker.evaluate.measure import Document, Measured
from stoker.evaluate.routes import Agreement

ALL = "all"
P99_TOKENS = 1000  # fewer have no 99th percentile to speak of
FORMAT = "stoker-eval"
VERSION = 1


def summarise(measured: Measured) -> dict[str, Any]:
    """Everything but what was run on what: see docs/eval.md for each figure."""
    documents = measured.documents
    figures: dict[str, Any] = {
        "tokens": sum(_count(one) for one in documents.values()),
        "perplexity": {name: _figure(_perplexity(group)) for name, group in _groups(documents).items()},
    }
    if any(document.reference for document in documents.values()):
        figures["against_reference"] = {name: _against(group) for name, group in _groups(documents).items()}
    for name, found in (
        ("routes_against_reference", measured.with_reference),
        ("routes_against_gate", measured.with_gate),
    ):
        if found:
            figures[name] = _agreement(found)
    figures["documents"] = [_document(number, document) for number, document in documents.items()]
    return figures


def _groups(documents: Mapping[int, Document]) -> dict[str, list[Document]]:
    groups: dict[str, list[Document]] = {}
    for document in documents.values():
        groups.setdefault(document.domain, []).append(document)
    return groups | {ALL: list(documents.values())}


def _count(document: Document) -> int:
    return sum(len(part) for part in document.losses)


def _sum(parts: Sequence[NDArray[Any]]) -> float:
    return float(sum(part.sum() for part in parts))


def _perplexity(group: Sequence[Document]) -> float:
    return math.exp(sum(_sum(one.losses) for one in group) / sum(_count(one) for one in group))


def _against(group: Sequence[Document]) -> dict[str, Any]:
    losses_N, base_N, kl_N = (
        np.array([_sum(parts) for parts in each])
        for each in zip(*((one.losses, one.reference, one.kl) for one in group), strict=True)
    )
    counts_N = np.array([_count(one) for one in group])
    ratio, low, high = perplexity_ratio(losses_N, base_N, counts_N)
    kl_low, kl_high = ratio_interval(kl_N, counts_N)
    same = sum(_sum(one.same_top1) for one in group)
    return {
        "perplexity": _figure(math.exp(base_N.sum() / counts_N.sum())),
        "ratio": _figure(ratio),
        "ratio_95": [_figure(low), _figure(high)],
        "kl_mean": _figure(kl_N.sum() / counts_N.sum()),
        "kl_mean_95": [_figure(kl_low), _figure(kl_high)],
        "kl_p99": percentile([part for one in group for part in one.kl], 0.99),
        "top1_agreement": _figure(same / counts_N.sum()),
    }


def percentile(parts: Sequence[NDArray[np.float64]], share: float) -> float | None:
    """By nearest rank; None where there are too few values for it to mean anything."""
    values = np.sort(np.concatenate(parts))
    if len(values) < P99_TOKENS:
        return None
    return _figure(values[math.ceil(share * len(values)) - 1])


def _agreement(found: Sequence[Agreement]) -> dict[str, float]:
    tokens = sum(one.tokens for one in found)
    return {
        "slot_agreement": _figure(sum(one.slots * one.tokens for one in found) / tokens),
        "weight_mass_kept": _figure(sum(one.mass * one.tokens for one in found) / tokens),
    }


def _document(number: int, document: Document) -> dict[str, Any]:
    line: dict[str, Any] = {"document": number, "domain": document.domain, "tokens": _count(document)}
    line["loss"] = _figure(_sum(document.losses))
    if document.reference:
        line |= {"reference_loss": _figure(_sum(document.reference)), "kl": _figure(_sum(document.kl))}
    return line


def _figure(value: float) -> float:
    """Six digits: more than any of these figures is sure of."""
    return float(f"{value:.6g}")


def compare(result: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """This result's perplexity over an earlier one's on the same text, paired by document, by domain and in all.

    Raises OptionError where they were not measured on the same tokens.
    """
    ours, theirs = result["documents"], earlier["documents"]
    if [(d["document"], d["tokens"]) for d in ours] != [(d["document"], d["tokens"]) for d in theirs] or (
        result["text"]["sha256"] != earlier["text"]["sha256"]
    ):
        raise OptionError(
            "the results are of different tokens",
            where="--against",
            expected=f"{result['text']}, {result['tokens']} tokens",
            got=f"{earlier['text']}, {earlier['tokens']} tokens",
            remedy="measure both with the same --text, --windows and --prompt-tokens",
        )
    names = [*dict.fromkeys(document["domain"] for document in ours), ALL]
    return {name: _compared([pair for pair in zip(ours, theirs, strict=True) if name in (ALL, pair[0]["domain"])])
            for name in names}  # fmt: skip


def _compared(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    ours_N, theirs_N = (np.array([pair[side]["loss"] for pair in pairs]) for side in (0, 1))
    ratio, low, high = perplexity_ratio(ours_N, theirs_N, np.array([pair[0]["tokens"] for pair in pairs]))
    return {"ratio": _figure(ratio), "ratio_95": [_figure(low), _figure(high)]}


def read_result(file: Path) -> dict[str, Any]:
    """A result that `stoker eval --json` wrote. Raises OptionError."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        if result["format"] != FORMAT or result["version"] != VERSION:
            raise ValueError(f"format {result['format']} {result['version']}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(
            "not a result of `stoker eval --json`", where=f"--against {file}", expected=f"{FORMAT} {VERSION}", got=error
        ) from error
    return dict(result)


def table(result: Mapping[str, Any]) -> list[str]:
    """The figures for people, one row a domain."""
    against = result.get("against_reference")
    rows = [f"{'':16}{'perplexity':>12}" + (f"{'reference':>12}{'ratio':>9}{'95%':>20}{'KL':>10}{'p99':>9}{'top-1':>8}"
                                             if against else "")]  # fmt: skip
    for name, perplexity in result["perplexity"].items():
        row = f"{name:16}{perplexity:12.3f}"
        if against:
            one = against[name]
            interval = f"({one['ratio_95'][0]:.4f} to {one['ratio_95'][1]:.4f})"
            p99 = "-" if one["kl_p99"] is None else f"{one['kl_p99']:.4f}"
            row += f"{one['perplexity']:12.3f}{one['ratio']:9.4f}{interval:>20}{one['kl_mean']:10.5f}{p99:>9}"
            row += f"{one['top1_agreement']:8.2%}"
        rows.append(row)
    for key, told in (("routes_against_reference", "the reference's experts"), ("routes_against_gate", "the gates'")):
        if key in result:
            one = result[key]
            rows.append(f"experts: {one['slot_agreement']:.2%} are {told}; weight kept {one['weight_mass_kept']:.2%}")
    for name, one in result.get("against_earlier", {}).items():
        rows.append(f"{name:16} x {one['ratio']:.4f} ({one['ratio_95'][0]:.4f} to {one['ratio_95'][1]:.4f}) of earlier")
    return rows
