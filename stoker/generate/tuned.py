"""What `stoker tune` found for this store, machine and budget, for those who leave path and policy to `auto`.

Reads one small file and the store's manifest; measures nothing and imports no torch.
"""

import json
from pathlib import Path
from typing import Any

from stoker.plan.profile import machine_key
from stoker.plan.tuner import choices_path, recall
from stoker.runtime import budget


def tuned_options(model: Path, budget_bytes: int, threads: int | None) -> dict[str, Any]:
    """Fields of the runtime's Options; empty where nothing was tuned for about this budget."""
    try:
        fingerprint = json.loads((model / "stoker.json").read_text())["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # what is wrong with the store is for its reader to say
    path = choices_path(fingerprint, machine_key(model, threads or budget.default_threads()))
    choice = recall(path, budget_bytes)
    return choice.options() if choice is not None else {}
