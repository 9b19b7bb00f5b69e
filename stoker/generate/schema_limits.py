"""Refuses JSON schemas that would cost too much before anything is compiled from them: they come from clients.

Counts depth, size and what the repetitions of patterns multiply to. Knows JSON schema's words; no grammars.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from stoker.errors import OptionError

MOST_BYTES = 256 * 1024
DEEPEST = 48
MOST_PROPERTIES = 512  # of one object: what may be left out costs by the square
_HEAVIEST_PATTERN = 20_000
_LONGEST_PATTERN = 4_000
_UNBOUNDED = 8  # what `*` and `+` weigh: they loop, and cost no copies


def check_schema(schema: Any, where: str) -> str:
    """The schema as compact JSON text. Raises OptionError, with `field`, where it is none or too large."""
    if not isinstance(schema, Mapping):
        raise _refused(where, "not a JSON schema", "an object", type(schema).__name__)
    try:
        text = json.dumps(schema, ensure_ascii=False)
        text.encode()
    except (RecursionError, ValueError, TypeError) as error:
        raise _refused(where, "not a JSON schema", "an object of plain JSON", str(error)) from error
    if len(text) > MOST_BYTES:
        raise _refused(where, "the schema is too large", f"at most {MOST_BYTES} bytes", f"{len(text)} bytes")
    for depth, key, value in _nodes(schema, 1):
        if depth > DEEPEST:
            raise _refused(where, "the schema is nested too deeply", f"at most {DEEPEST} levels", f"more, at {key}")
        if key == "properties" and isinstance(value, Mapping) and len(value) > MOST_PROPERTIES:
            raise _refused(where, "an object has too many properties", f"at most {MOST_PROPERTIES}", f"{len(value)}")
        patterns = [value] if key == "pattern" else list(value) if key == "patternProperties" else []
        for pattern in patterns:
            if isinstance(pattern, str):
                _check_pattern(pattern, where)
    return text


def _nodes(value: Any, depth: int) -> Iterator[tuple[int, str, Any]]:
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield depth, str(key), inner
        if depth <= DEEPEST:
            yield from _nodes(inner, depth + 1)


def _check_pattern(pattern: str, where: str) -> None:
    if len(pattern) > _LONGEST_PATTERN:
        raise _refused(
            where, "a pattern is too long", f"at most {_LONGEST_PATTERN} characters", f"{len(pattern)} characters"
        )
    weight = pattern_weight(pattern)
    if weight > _HEAVIEST_PATTERN:
        raise _refused(
            where,
            "the repetitions of a pattern multiply to too much",
            f"at most {_HEAVIEST_PATTERN}",
            f"about {weight}",
        )


def pattern_weight(pattern: str) -> int:
    """How many single characters a pattern stands for when its bounded repetitions are written out."""
    totals, last, at = [0], 0, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "(":
            totals += [0]
            at, last = at + 1, 0
            continue
        if char == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
            at += 1
            continue
        if char in "*+?":
            factor, at = (1 if char == "?" else _UNBOUNDED), at + 1
        elif char == "{" and (bounds := _bounds(pattern, at)) is not None:
            factor, at = bounds
        else:
            at = _class_end(pattern, at) if char == "[" else at + (2 if char == "\\" else 1)
            totals[-1] += 1
            last = 1
            continue
        totals[-1] += last * (factor - 1)
        last *= factor
    return sum(totals)


def _bounds(pattern: str, at: int) -> tuple[int, int] | None:
    """The larger bound of `{m,n}` at `at`, and where it ends; None for a plain brace."""
    end = pattern.find("}", at)
    numbers = pattern[at + 1 : end].split(",") if end > 0 else []
    if not numbers or len(numbers) > 2 or not all(number.isdigit() or not number for number in numbers):
        return None
    if not numbers[0] or len(max(numbers, key=len)) > 9:
        return (10**9, end + 1) if numbers[0] else None
    return max([1, *(int(number) for number in numbers if number)]), end + 1


def _class_end(pattern: str, at: int) -> int:
    """Behind the character class that begins at `at`."""
    at += 1
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at + 1


def _refused(where: str, what: str, expected: str, got: str) -> OptionError:
    error = OptionError(what, expected=expected, got=got)
    error.field = where
    return error
