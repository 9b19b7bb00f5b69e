"""Cache-aware routing's trade-off: misses against KL and perplexity, by lambda and J, on text of six domains.

    python benchmarks/cache_aware.py STORE... [--out benchmarks/results/cache_aware.json] [--write]

Each sequence has an LRU cache of its own that begins empty (`--own-slots`), so misses and routes follow from the text
alone; the first 64 tokens of a window are prompt and keep their gates' routes. Misses are those of answer tokens; the
base is the same cache under the gates' routes. `engine` repeats some points by real decode steps with so many slots.
Perplexity ratios are paired by document, with a 95% bootstrap interval. --write puts the table into docs/routing.md.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from stoker.bench.provenance import provenance
from stoker.bench.tables import put_table
from stoker.evaluate.measure import measure
from stoker.evaluate.models import Scored, StoreScorer
from stoker.evaluate.results import summarise
from stoker.evaluate.run import PROMPT_TOKENS, Text, tokenised
from stoker.evaluate.text import Window, bundled
from stoker.routing.cache_aware import CacheAwareOptions, CacheAwareRule, CacheAwareState
from stoker.routing.rule import Rows
from stoker.runtime.model import Options, Runtime, load
from stoker.runtime.plan import top_k

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs" / "routing.md"
SHARES = (0.25, 0.5)
LEADS = (0.02, 0.05, 0.1, 0.2, 0.4)
ENGINE = (0.0, 0.1)  # lambda of the points that are repeated by decode steps


class Counting(CacheAwareRule):
    """Knows the misses of all imagined caches, also of sequences that are over."""

    def __init__(self, options: CacheAwareOptions) -> None:
        super().__init__(options)
        self.misses: dict[CacheAwareState, int] = {}

    def after_step(self, rows: Rows) -> None:
        super().after_step(rows)
        for span in rows.spans:
            if span.state is not None:
                self.misses[span.state] = sum(lane.cache.misses for lane in span.state.lanes)

    def take_misses(self) -> int:
        total = sum(self.misses.values())
        self.misses.clear()
        return total


class Once:
    """A scorer that is asked again for windows it has scored."""

    def __init__(self, scorer: StoreScorer) -> None:
        self.scorer, self.known = scorer, dict[tuple[int, ...], Scored]()

    def score(self, window: Window, first: int) -> Scored:
        if window.ids not in self.known:
            self.known[window.ids] = self.scorer.score(window, first)
        return self.known[window.ids]

    def about(self) -> dict[str, Any]:
        return self.scorer.about()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stores", type=Path, nargs="+")
    parser.add_argument("--use", default="held-out", choices=("held-out", "calibrate"), help="half of the bundled text")
    parser.add_argument("--windows", type=int, help="of each domain; default: all")
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "cache_aware.json")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    result: dict[str, Any] = {"what": __doc__.splitlines()[0], "text": f"bundled:{options.use}", "stores": {}}
    for store in options.stores:
        result["stores"][store.name] = curve(store, options)
        result["provenance"] = provenance()
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    if options.write:
        put_table(DOCS, "trade-off", table(result))


def curve(store: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All points of one store, by share of its experts that have a slot."""
    text = Text(f"bundled:{options.use}", bundled(options.use), options.windows)
    loading = Options(memory=options.memory, ctx_size=512)
    with load(store, loading) as runtime:
        rule = Counting(CacheAwareOptions(slots=1))
        runtime.follow(rule)
        chosen, experts = top_k(runtime.config), rule._layers[0].experts
        reference = Once(StoreScorer(runtime, gate=True))
        windows = [one for one in tokenised(runtime, text) if len(one.ids) >= PROMPT_TOKENS + 2]
        found = {}
        for share in SHARES:
            slots = max(chosen, round(share * experts))
            base = misses_of_prompts(runtime, rule, windows, slots)
            grid = [(0.0, 1), *((lead, always) for always in range(1, min(chosen, 3)) for lead in LEADS)]
            rows = [point(runtime, rule, windows, reference, base, CacheAwareOptions(*one, slots)) for one in grid]
            for row in rows:
                row["misses_saved"] = 1 - row["misses_per_token"] / rows[0]["misses_per_token"]
            found[f"{share:.0%}"] = {"slots": slots, "experts": experts, "chosen": chosen, "points": rows}
    for part in found.values():
        part["engine"] = engine(store, loading, windows, part)
    return found


def misses_of_prompts(runtime: Runtime, rule: Counting, windows: list[Window], slots: int) -> int:
    """Of the imagined caches, by the prompts alone: the same for every lambda."""
    rule.options = CacheAwareOptions(0.0, 1, slots)
    scorer = StoreScorer(runtime, feed="answer", prompt_tokens=PROMPT_TOKENS, routes=False)
    for window in windows:
        scorer.score(Window(window.domain, window.document, window.ids[: PROMPT_TOKENS + 1]), 0)
    return rule.take_misses()


def point(
    runtime: Runtime, rule: Counting, windows: list[Window], reference: Once, base: int, options: CacheAwareOptions
) -> dict[str, Any]:
    """One lambda and J: misses a token, and what it costs, in all and by domain."""
    rule.options = options
    model = StoreScorer(runtime, feed="answer", prompt_tokens=PROMPT_TOKENS)
    figures = summarise(measure(model, windows, reference=reference, first=PROMPT_TOKENS))
    fed = sum(len(window.ids) - 1 - PROMPT_TOKENS for window in windows)
    against = figures["against_reference"]
    row = {
        "lambda": options.lead, "keep_best": options.always, "tokens": figures["tokens"],
        "misses_per_token": (rule.take_misses() - base) / fed,
        "perplexity_exact": against["all"]["perplexity"],
        "ratio": against["all"]["ratio"], "ratio_95": against["all"]["ratio_95"],
        "kl": against["all"]["kl_mean"], "kl_95": against["all"]["kl_mean_95"],
        "top1_agreement": against["all"]["top1_agreement"],
        "by_domain": {name: [one["ratio"], *one["ratio_95"], one["kl_mean"]]
                      for name, one in against.items() if name != "all"},
        **figures["routes_against_gate"],
    }  # fmt: skip
    print({name: value for name, value in row.items() if name != "by_domain"}, file=sys.stderr, flush=True)
    return row


def engine(store: Path, loading: Options, windows: list[Window], part: dict[str, Any]) -> list[dict[str, Any]]:
    """Misses of real decode steps with so many slots, on the first window of each domain."""
    first = list({window.domain: window for window in reversed(windows)}.values())
    rows = []
    for lead in ENGINE:
        more: dict[str, Any] = {"routing": "cache-aware", "cache_lambda": lead} if lead else {}
        slots = tuple([part["slots"]] * len(slots_of(store)))
        with load(store, Options(memory=loading.memory, ctx_size=512, slots=slots, **more)) as runtime:
            misses = fed = 0
            for window in first:
                sequence = runtime.new_sequence()
                sequence.prompt_tokens = PROMPT_TOKENS
                runtime.prefill(sequence, window.ids[:PROMPT_TOKENS])
                before = runtime.counters()["misses"]
                for token in window.ids[PROMPT_TOKENS:-1]:
                    runtime.decode([sequence], [token])
                misses += runtime.counters()["misses"] - before
                fed += len(window.ids) - 1 - PROMPT_TOKENS
                sequence.close()
        rows.append({"lambda": lead, "keep_best": 1, "tokens": fed, "misses_per_token": misses / fed})
        rows[-1]["misses_saved"] = 1 - rows[-1]["misses_per_token"] / rows[0]["misses_per_token"]
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def slots_of(store: Path) -> list[Any]:
    from stoker.store.reader import open_store

    return list(open_store(store).pools)


def table(result: dict[str, Any]) -> str:
    lines = [
        "| store, slots | lambda | J | misses a token | fewer | perplexity | 95% | worst domain | KL | experts kept |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, shares in result["stores"].items():
        for part in shares.values():
            for row in part["points"]:
                by_domain = row.get("by_domain", {})  # not of points that were taken from what a run had printed
                worst = max(by_domain.items(), key=lambda item: item[1][0], default=None)
                ends = [f"{100 * (end - 1):+.2f}" for end in (row["ratio"], *row["ratio_95"])]
                shown = "-" if worst is None else f"{worst[0]} {100 * (worst[1][0] - 1):+.2f}%"
                cells = [
                    f"{name}, {part['slots']} of {part['experts']}", f"{row['lambda']:g}", str(row["keep_best"]),
                    f"{row['misses_per_token']:.2f}", f"{row['misses_saved']:.0%}", f"{ends[0]}%",
                    f"{ends[1]} to {ends[2]}", shown, f"{row['kl']:.4f}",
                    f"{row['slot_agreement']:.1%}",
                ]  # fmt: skip
                if row["lambda"]:
                    lines.append("| " + " | ".join(cells) + " |")
                else:
                    lines.append("| " + " | ".join([*cells[:1], "0", "", cells[3], *[""] * 6]) + " |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
