"""A process of its own that decodes greedily: python greedy.py STORE MEMORY_MIB PATH CTX NEW_TOKENS < prompts.json

A batch of all prompts; their ends are ignored so that lengths agree. JSON out: tokens, ledger, stats and
peak_rss_bytes; exit code 3 and the refusal on stderr where the budget does not suffice.
"""

import json
import sys
from pathlib import Path

from stoker.errors import BudgetError
from stoker.runtime.model import Options, Runtime, load


def greedy(runtime: Runtime, prompts: list[str], new_tokens: int) -> list[list[int]]:
    sequences = [runtime.new_sequence() for _ in prompts]
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    rendered = [runtime.tokenizer.apply_chat_template(turn, add_generation_prompt=True) for turn in turns]
    first = [runtime.prefill(s, list(r["input_ids"])) for s, r in zip(sequences, rendered, strict=True)]
    tokens = [[int(logits.argmax())] for logits in first]
    for _ in range(new_tokens - 1):
        logits_BV = runtime.decode(sequences, [row[-1] for row in tokens])
        for row, following in zip(tokens, logits_BV.argmax(-1).tolist(), strict=True):
            row.append(following)
    return tokens


def peak_rss_bytes() -> int:
    """Of this program alone: getrusage's figure starts from what the parent held when it forked."""
    status = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    store, memory_mib, path, ctx, new_tokens = sys.argv[1:]
    options = Options(memory=int(memory_mib) << 20, path=path, ctx_size=int(ctx))  # type: ignore[arg-type]
    try:
        runtime = load(store, options)
    except BudgetError as refusal:
        print(refusal, file=sys.stderr)
        sys.exit(refusal.exit_code)
    with runtime:
        tokens = greedy(runtime, json.load(sys.stdin), int(new_tokens))
        report = {"tokens": tokens, "ledger": runtime.ledger(), "stats": runtime.stats()}
        print(json.dumps(report | {"peak_rss_bytes": peak_rss_bytes()}))


if __name__ == "__main__":
    main()
