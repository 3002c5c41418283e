"""Skips everything in this folder where there is no GPU, and says why."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from cubroker.driver import DriverError, checked_calls, load

HERE = Path(__file__).parent


@functools.cache
def no_gpu() -> str | None:
    """Return why there is no GPU to test on, or None."""
    try:
        devices = load("cuda").devices
    except DriverError as error:
        return f"no GPU: {error}"
    return None if devices else "no GPU: the driver knows of none"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if reason := no_gpu():
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="module")
def no_multicast() -> Iterator[None]:
    """Say no to multicast for the tests and all processes that they start, whatever the site says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(checked_calls.OWN_SETTING, "0")
        yield
