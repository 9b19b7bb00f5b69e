"""Stores of tiny random checkpoints, as the runtime's tests have them."""

from tests.runtime.conftest import packed

__all__ = ["packed"]
