from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.systemd.installing import VERSIONS, install
from tests.systemd.lab import Lab, booted, obstacle
from tests.systemd.service import SETTINGS, STANDBY_DROP_IN, TEXT, Service
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
def service(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Service]:
    """The broker's service, started, with nothing stored; stopped at the end.

    A test that is marked :data:`~tests.systemd.service.EITHER` gets it once more, with the next broker standing by.
    """
    broker = Service(lab)
    lab.write(SETTINGS, TEXT)
    lab.run("rm", "--force", STANDBY_DROP_IN)
    broker.configure("")
    if getattr(request, "param", False):
        broker.stand_by()
    broker.start()
    try:
        yield broker
    finally:
        broker.stop()
