"""The runtime tests' tiny stores."""

from tests.runtime.conftest import packed

__all__ = ["packed"]
