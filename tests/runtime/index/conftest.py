"""What the tests of indexes share."""

from __future__ import annotations

from tests.runtime.retrieval.conftest import one_thread

__all__ = ["one_thread"]
