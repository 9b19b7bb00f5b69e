"""stoker runs Mixture-of-Experts models whose experts stay on the SSD, inside a memory budget that holds.

Importing it is cheap: torch and transformers come with the first `stoker.load`.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Model", "Result", "StokerError", "__version__", "load"]

if TYPE_CHECKING:
    from stoker.errors import StokerError
    from stoker.generate.model import Model, Result, load

_HOMES = {
    "load": "stoker.generate.model",
    "Model": "stoker.generate.model",
    "Result": "stoker.generate.model",
    "StokerError": "stoker.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stoker' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
