"""What `stoker doctor` looks at: one file for each kind of check, each a function that returns Checks and never raises.

Knows no command line and no output format.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["PASS", "WARN", "FAIL"]


@dataclass(frozen=True)
class Check:
    """One finding. FAIL: stoker cannot run properly here; WARN: it can, but slower or tighter than it could.

    finding: plain words with the numbers; remedy: what to do, empty when there is nothing to do; data: for --json.
    """

    name: str
    verdict: Verdict
    finding: str
    remedy: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
