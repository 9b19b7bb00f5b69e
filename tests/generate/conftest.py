"""The packed demo model, where real tokens are needed."""

from tests.server.conftest import demo_store

__all__ = ["demo_store"]
