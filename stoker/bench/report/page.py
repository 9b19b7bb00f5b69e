"""The page: reads the files, puts a section under a heading for each, and inlines style and script.

The result asks nothing of any network: no link, font, image or script from elsewhere.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from stoker import __version__
from stoker.bench.report import bench_section, trace_data
from stoker.bench.report.trace_section import anchor, trace_section
from stoker.bench.report.training_section import is_metrics, training_section
from stoker.bench.results import read_result
from stoker.errors import TraceError
from stoker.trace.reader import Trace, is_trace

Say = Callable[[str], None]


def build_page(paths: Sequence[Path], title: str = "stoker report", say: Say = lambda _: None) -> str:
    """One HTML document of traces, results and training metrics. Raises TraceError naming a file that is none."""
    sections = []
    for path in paths:
        say(f"reading {path}")
        sections.append((path.name, section(path)))
    body = "".join(
        f'<section aria-labelledby="{anchor(name)}-{i}"><h2 id="{anchor(name)}-{i}">{escape(name)}</h2>{html}</section>'
        for i, (name, html) in enumerate(sections)
    )
    links = "".join(
        f'<li><a href="#{anchor(name)}-{i}">{escape(name)}</a></li>' for i, (name, _) in enumerate(sections)
    )
    nav = f'<nav aria-label="Files"><ul>{links}</ul></nav>' if len(sections) > 1 else ""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_asset('page.css')}</style></head><body>"
        f'<header><h1>{escape(title)}</h1><button type="button" id="theme" hidden>theme: auto</button></header>'
        f"<main>{nav}{body}</main><footer>Made by stoker {__version__}, {now}. Measures: docs/metrics.md.</footer>"
        f'<div id="tip" aria-hidden="true"></div><script>{_asset("page.js")}</script></body></html>'
    )


def section(path: Path) -> str:
    """What one file says, by what it is."""
    if path.suffix == ".json":
        return _result(path)
    if is_metrics(path):
        return training_section(path)
    if is_trace(path):
        trace = Trace(path)
        return f'<p class="what">{escape(_about(trace))}</p>' + trace_section(trace_data.view(trace))
    raise TraceError(
        "is neither a trace nor a benchmark result" if path.exists() else "no such file",
        where=str(path),
        expected="a file of `--trace`, JSON of `stoker bench --out`, or a metrics.jsonl of `stoker train`",
    )


def _result(path: Path) -> str:
    document = read_result(path)
    return bench_section.bench_section(bench_section.view(path.name, document))


def _about(trace: Trace) -> str:
    about = trace.about
    known = [f"{name} {about[name]}" for name in ("model", "path", "policy", "memory", "threads") if about.get(name)]
    return ", ".join(known) + ("" if trace.finished else " (the run did not end: these are the parts it left)")


def _asset(name: str) -> str:
    return files("stoker.bench.report").joinpath(name).read_text(encoding="utf-8")
