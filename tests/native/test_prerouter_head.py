"""A prerouter's head in one call: against the reference in torch, and against itself in other calls and threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tile16 import aligned, float_bits, to_tiles
from torch import Tensor

from stoker.adapter.heads import Head, features, random_head
from stoker.native import kernels
from stoker.native.attention import topk_softmax
from stoker.native.prerouter import PrerouterHead
from stoker.quant.formats import MatrixSpec, WeightFormat

# D, E, H: the second is ragged everywhere, the third wakes the other threads, the fourth is one tile
SHAPES = [(64, 8, 24), (77, 13, 37), (640, 128, 160), (16, 4, 3)]
TOKENS = [1, 2, 7, 9, 40, 70]


class Seen(NamedTuple):
    hidden: Tensor
    used: Tensor
    before: Tensor

    def rows(self, first: int, last: int) -> Seen:
        return Seen(*(part[first:last].contiguous() for part in self))


@pytest.fixture
def threads() -> Iterator[None]:
    before = kernels.threads()
    yield
    kernels.set_threads(before)


def some_head(shape: tuple[int, int, int], short: bool) -> Head:
    width, experts, inner = shape
    head = random_head(experts, width, inner, seed=width)
    parts = (head.fc1, head.fc2, head.linear_init)
    return Head(*(part.bfloat16().float() if short else part for part in parts))


def matrix_of(weight: Tensor, short: bool) -> kernels.Matrix:
    rows, cols = weight.shape
    spec = MatrixSpec(rows, cols, WeightFormat("bf16" if short else "f32"))
    values = weight.numpy()
    if short:
        words = np.zeros((rows, 2 * spec.format.words(cols)), dtype=np.uint16)
        words[:, :cols] = float_bits(values, "bf16")[0]
        values = words.view(np.uint32)
    return kernels.Matrix(spec, aligned(to_tiles(values)), None, None, activation_bits=16)


def native(head: Head, short: bool) -> PrerouterHead:
    joined = torch.cat([head.fc1, head.linear_init])
    table = joined[:, head.width :].T.contiguous()
    dense = matrix_of(joined[:, : head.width].contiguous(), short)
    return PrerouterHead(dense, matrix_of(head.fc2, short), table.bfloat16() if short else table)


def some_tokens(head: Head, tokens: int, k: int, seed: int = 3) -> Seen:
    """Distinct experts; the first token and some others have no predecessor."""
    torch.manual_seed(seed)
    hidden = torch.randn(tokens, head.width) * 2
    used, before = (torch.stack([torch.randperm(head.experts)[:k] for _ in range(tokens)]) for _ in range(2))
    before[torch.arange(tokens) % 5 == 0] = -1
    return Seen(hidden, used, before)


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_reference(shape: tuple[int, int, int], short: bool, isa: str) -> None:
    head = some_head(shape, short)
    exact = Head(head.fc1.double(), head.fc2.double(), head.linear_init.double())
    door = native(head, short)
    for tokens in TOKENS:
        for k in (1, min(8, head.experts)):
            seen = some_tokens(head, tokens, k)
            want = exact.logits(features(*seen, head.experts).double())
            got = door.logits(*seen)
            assert torch.linalg.norm(got.double() - want) < 1e-6 * torch.linalg.norm(want)


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_depends_on_nothing_else(shape: tuple[int, int, int], short: bool, isa: str, threads: None) -> None:
    head = some_head(shape, short)
    door, seen = native(head, short), some_tokens(head, 70, min(3, head.experts))
    kernels.set_threads(1)
    whole = door.logits(*seen)
    for count in (1, 2, 3):
        kernels.set_threads(count)
        assert torch.equal(door.logits(*seen), whole)
        for size in TOKENS:
            parts = [door.logits(*seen.rows(at, at + size)) for at in range(0, 70, size)]
            assert torch.equal(torch.cat(parts), whole), f"{size} tokens a call, {count} threads"


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_route_is_that_of_the_logits(shape: tuple[int, int, int], renormalise: bool, isa: str) -> None:
    head = some_head(shape, True)
    door = native(head, True)
    for tokens in (0, 1, 40, 70):
        seen = some_tokens(head, max(tokens, 1), 2).rows(0, tokens)
        for k in (1, head.experts):
            weights, experts = topk_softmax(door.logits(*seen), k, renormalise)
            got_experts, got_weights = door.route(*seen, k, renormalise)
            assert torch.equal(got_experts, experts) and torch.equal(got_weights, weights)


def test_what_is_not_finite_stays_in_its_row() -> None:
    head = some_head(SHAPES[0], True)
    door, seen = native(head, True), some_tokens(head, 6, 2)
    clean = door.logits(*seen)
    seen.hidden[2, 5] = torch.nan
    spoiled, others = door.logits(*seen), torch.arange(6) != 2
    assert spoiled[2].isnan().all() and torch.equal(spoiled[others], clean[others])
    assert door.route(*seen, 2, True)[1][2].isnan().all()


def test_what_does_not_fit_is_refused() -> None:
    head = some_head(SHAPES[0], True)
    door, seen = native(head, True), some_tokens(head, 4, 2)
    for wrong in (
        seen._replace(hidden=seen.hidden.double()),
        seen._replace(hidden=seen.hidden[:3]),
        seen._replace(hidden=seen.hidden[:, :-1].contiguous()),
        seen._replace(hidden=seen.hidden.T.contiguous().T),
        seen._replace(used=seen.used.int()),
        seen._replace(before=seen.before[:, :1].contiguous()),
        seen._replace(used=seen.used[0], before=seen.before[0]),
    ):
        with pytest.raises(ValueError):
            door.logits(*wrong)
    for outside in (-2, head.experts):
        for part in ("used", "before"):
            with pytest.raises(IndexError):
                door.route(*seen._replace(**{part: torch.full_like(seen.used, outside)}), 2, True)
    for top_k in (0, head.experts + 1):
        with pytest.raises(ValueError):
            door.route(*seen, top_k, True)
    dense, out, table = door._held
    for wrong_table in (table.half(), table[:-1], table.T.contiguous().T):
        with pytest.raises(ValueError):
            PrerouterHead(dense, out, wrong_table)
    with pytest.raises(ValueError):
        PrerouterHead(out, out, table)
