"""Where the tests find public routing traces: STOKER_TRACES, or shared/data beside the repository."""

import os
from pathlib import Path

import pytest

DOMAINS = ("general", "code", "math", "medical")


@pytest.fixture(scope="session")
def traces() -> Path:
    beside = Path(__file__).parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("STOKER_TRACES", beside))
    if not (folder / "qwen3_general.npz").exists():
        pytest.skip(f"no public traces in {folder}; set STOKER_TRACES to a folder with qwen3_*.npz")
    return folder
