from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import measuring


@pytest.fixture(scope="module", autouse=True)
def unmeasured() -> Iterator[None]:
    """Coverage is not measured here: unit tests cover all that is run."""
    with measuring.unmeasured():
        yield
