from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.systemd.installing import VERSIONS, install
from tests.systemd.lab import Lab, booted, obstacle
from tests.systemd.service import SETTINGS, TEXT, Service
from tests.wheels import wheel


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A systemd of its own, with this tree installed."""
    if reason := obstacle():
        pytest.skip(reason)
    built = wheel(tmp_path_factory.mktemp("wheels"), VERSIONS[0])
    with booted() as running:
        install(running, {VERSIONS[0]: built}, TEXT)
        yield running


@pytest.fixture
def service(lab: Lab) -> Iterator[Service]:
    """The broker's service, started, with nothing stored; stopped at the end."""
    broker = Service(lab)
    lab.write(SETTINGS, TEXT)
    broker.configure("")
    broker.start()
    try:
        yield broker
    finally:
        broker.stop()
