"""The tiny stores of the runtime tests."""

from tests.runtime.conftest import packed

__all__ = ["packed"]
