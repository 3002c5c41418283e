"""A GPU does what every driver does: the host driver's own conformance tests, on real hardware."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubroker.driver import Driver, load
from tests.unit.driver.conformance import *  # noqa: F403
from tests.unit.driver.conformance_capture import *  # noqa: F403
from tests.unit.driver.conformance_devices import *  # noqa: F403
from tests.unit.driver.conformance_fabric import *  # noqa: F403
from tests.unit.driver.conformance_kernels import *  # noqa: F403
from tests.unit.driver.conformance_vmm import *  # noqa: F403
from tests.unit.driver.other_process import OtherProcess


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = load("cuda")
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def other_process() -> Iterator[OtherProcess]:
    with OtherProcess("cuda") as other_process:
        yield other_process
