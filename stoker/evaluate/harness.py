"""lm-evaluation-harness on a loaded model: its tasks, our logits and text. The harness comes with the `eval` extra.

Owns the adapter alone. Imported only when tasks are asked for; the harness's own names are in
https://github.com/EleutherAI/lm-evaluation-harness (MIT).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stoker.errors import StokerError

if TYPE_CHECKING:
    from stoker.generate.model import Model

ANSWER_TOKENS = 256  # of a generated answer, where the task names no length


def run_tasks(
    model: Model,
    tasks: Sequence[str],
    *,
    include: Path | None = None,
    limit: int | None = None,
    shots: int | None = None,
) -> dict[str, Any]:
    """Run tasks of the harness by name; include: a directory of further task files (yaml). The harness's results.

    Raises StokerError where the extra is not installed.
    """
    if find_spec("lm_eval") is None:
        raise StokerError(
            "lm-evaluation-harness is not installed",
            where="stoker eval tasks",
            remedy="install the eval extra: pip install 'stoker[eval]'",
        )
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if include is None else str(include))
    results: dict[str, Any] = lm_eval.simple_evaluate(
        model=_adapter(model), tasks=list(tasks), task_manager=manager, limit=limit, num_fewshot=shots
    )
    return results


def _adapter(model: Model) -> Any:
    from lm_eval.api.model import TemplateLM

    class StokerLM(TemplateLM):
        """The three things that tasks ask of a model."""

        def __init__(self) -> None:
            super().__init__()
            self.most_tokens = model.runtime.ctx_size

        @property
        def eot_token_id(self) -> int:
            ends = model.runtime.eos_token_ids
            return ends[0] if ends else 0

        def tok_encode(self, string: str, **_: Any) -> list[int]:
            return list(model.tokenizer.encode(string, add_special_tokens=False))

        def _loglikelihood_tokens(
            self, requests: Any, disable_tqdm: bool = False, **_: Any
        ) -> list[tuple[float, bool]]:
            return [self._continuation(list(context), list(wanted)) for _, context, wanted in requests]

        def _continuation(self, context: list[int], wanted: list[int]) -> tuple[float, bool]:
            """Log-probability of `wanted` after `context`, and whether it is what greedy decoding would say. A context
            that is too long loses its beginning."""
            ids = (context + wanted)[-self.most_tokens :]
            rows = torch.tensor(ids[-len(wanted) :])
            logits_TV = model.logits([ids[:-1]])[0][-len(wanted) :].double()
            chances = logits_TV.log_softmax(-1).gather(1, rows[:, None])
            return float(chances.sum()), bool(torch.equal(logits_TV.argmax(-1), rows))

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            """Of whole texts, in windows of the context that do not overlap."""
            found = []
            for request in requests:
                ids, total = [self.eot_token_id, *self.tok_encode(request.args[0])], 0.0
                for first in range(0, len(ids) - 1, self.most_tokens - 1):
                    window = ids[first : first + self.most_tokens]
                    total += self._continuation(window[:1], window[1:])[0]
                found.append(total)
            return found

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return [self._generate(*request.args) for request in requests]

        def _generate(self, context: str, options: dict[str, Any]) -> str:
            stop = options.get("until") or ()
            most = int(options.get("max_gen_toks", ANSWER_TOKENS))
            ids = self.tok_encode(context)[-(self.most_tokens - most) :]
            asked = {"max_tokens": most, "stop": (stop,) if isinstance(stop, str) else tuple(stop)}
            if options.get("do_sample"):
                asked |= {name: options[name] for name in ("temperature", "top_p", "top_k") if name in options}
            else:
                asked["temperature"] = 0.0
            return model.generate(ids, **asked).text  # type: ignore[arg-type]

    return StokerLM()
