"""The tiny stores of the runtime's tests."""

from tests.runtime.conftest import packed

__all__ = ["packed"]
