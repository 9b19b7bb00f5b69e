"""Makes the questions of `stoker_next_passage` from the text that comes with stoker: which of four passages goes on?

    python -m recipes.tasks.make

The beginning of a passage, and four continuations of its domain, one of them its own. Writes next_passage.jsonl.
"""

import json
import random
from pathlib import Path

from stoker.evaluate.text import Passage, bundled

FILE = Path(__file__).parent / "next_passage.jsonl"
BEGINNING, CONTINUATION, CHOICES = 700, 200, 4


def main() -> None:
    draw = random.Random(0)
    passages = bundled()
    lines = [json.dumps(question(passage, passages, draw), ensure_ascii=False) + "\n" for passage in passages]
    FILE.write_text("".join(lines), encoding="utf-8")


def question(passage: Passage, passages: list[Passage], draw: random.Random) -> dict:
    others = [one for one in passages if one.domain == passage.domain and one is not passage]
    choices = [continuation(one) for one in draw.sample(others, CHOICES - 1)]
    answer = draw.randrange(CHOICES)
    choices.insert(answer, continuation(passage))
    return {
        "domain": passage.domain,
        "context": passage.text[: cut(passage.text)],
        "choices": choices,
        "answer": answer,
    }


def continuation(passage: Passage) -> str:
    start = cut(passage.text)
    return passage.text[start : start + CONTINUATION]


def cut(text: str) -> int:
    """Before a space, so that the continuation is whole words."""
    return text.index(" ", BEGINNING)


if __name__ == "__main__":
    main()
