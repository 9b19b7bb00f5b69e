"""A minute of scripts/load_server.py on a small model, and whether what it measures by would see a fault."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts import load_clients as asks
from scripts.load_server import KINDS, hold
from scripts.load_watch import MIB, Sample, by_minute, quarters, verdicts

STEADY = Sample(0.0, 500 * MIB, 20, 14, 4, 2, 1024, 1024, 0, 0, 0)


@pytest.mark.slow
def test_mixed_load_then_kill_and_the_same_again(long_store: Path) -> None:
    result = hold(str(long_store), 0.7, 6, "800MiB", KINDS)
    broken = {name: check for name, check in result["checks"].items() if not check["ok"]}
    assert not broken, broken
    seen = {name.split()[0] for name in result["verdicts"]}
    assert seen >= {"plain", "conversation", "tools", "schema", "vanishing", "rubbish"}, "all sorts were asked"
    assert result["statuses"]["200"] > 100 and result["statuses"]["400"] > 10 and result["statuses"]["429"] > 0


def rows(**last: Any) -> list[Sample]:
    """Half an hour, whose second half is `last`."""
    return [replace(STEADY, seconds=float(i), **(last if i > 900 else {})) for i in range(1800)]


@pytest.mark.parametrize(
    ("last", "broken"),
    [
        ({}, set()),
        ({"rss_bytes": 540 * MIB}, {"memory flat"}),
        ({"files": 40}, {"files and threads"}),
        ({"threads": 20}, {"files and threads"}),
        ({"dropped": 1}, {"no expert dropped"}),
        ({"ledger_off_bytes": 4096}, {"ledger adds up"}),
    ],
)
def test_what_is_wrong_is_seen(last: dict[str, Any], broken: set[str]) -> None:
    checks = verdicts(rows(**last), budget_bytes=1024 * MIB, peak_bytes=600 * MIB)
    assert {name for name, check in checks.items() if not check["ok"]} == broken
    assert not verdicts(rows(), budget_bytes=599 * MIB, peak_bytes=600 * MIB)["within the budget"]["ok"]


def test_figures_by_quarter_and_minute() -> None:
    table = by_minute(rows(rss_bytes=540 * MIB))
    assert len(table) == 30 and table[0]["rss_bytes"] == 500 * MIB and table[29]["most_rss_bytes"] == 540 * MIB
    first, *_, last = quarters(rows(rss_bytes=540 * MIB), "rss_bytes")
    assert (first, last) == (500 * MIB, 540 * MIB)


@pytest.mark.parametrize(
    ("status", "body", "headers", "verdict"),
    [
        (400, {"error": {"message": "no", "type": "invalid_request_error"}}, {}, "refused"),
        (429, {"error": {"message": "full", "type": "rate_limit"}}, {"retry-after": "2"}, "refused"),
        (429, {"error": {"message": "full", "type": "rate_limit"}}, {}, "bad"),
        (400, {"detail": "no"}, {}, "bad"),
        (503, {"error": {"message": "no", "type": "server_error"}}, {}, "bad"),
    ],
)
def test_refusals_are_judged(status: int, body: Any, headers: dict[str, str], verdict: str) -> None:
    assert asks.refusal(httpx.Response(status, json=body, headers=headers)).verdict == verdict


def test_streams_are_judged() -> None:
    request = asks.ask(asks.CHAT, [{"role": "user", "content": "x"}], 4, True)
    delta = 'data: {"choices": [{"delta": {"content": "ab"}, "finish_reason": null}]}'
    end = 'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}'
    whole = asks.read_stream(request, [delta, end, "data: [DONE]"])
    assert (whole.verdict, whole.text) == ("answered", "ab")
    assert asks.read_stream(request, [delta, end]).verdict == "bad", "it broke off"
    assert asks.read_stream(request, [delta, "data: [DONE]"]).verdict == "bad", "no reason for the end"
    assert asks.read_stream(request, [delta, 'data: {"error": {"message": "x"}}', "data: [DONE]"]).verdict == "bad"
    held = asks.with_schema(request, {"type": "object", "required": ["a"]})
    assert asks.read_stream(held, [delta, end, "data: [DONE]"]).verdict == "bad", "not the JSON that was asked for"
