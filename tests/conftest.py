from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.brokers import BrokerProcess, serving


@pytest.fixture
def broker() -> Iterator[BrokerProcess]:
    """A broker process with two host devices of 64 MiB."""
    with serving() as process:
        yield process
