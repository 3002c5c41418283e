from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stores import StoredBroker, storing


@pytest.fixture
def kept() -> Iterator[StoredBroker]:
    """A broker with a store, in whose log there is no traceback at the end."""
    with storing() as broker:
        yield broker
        assert "Traceback" not in broker.log()
