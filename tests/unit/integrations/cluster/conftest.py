from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cubroker.integrations.cluster import exporter
from tests.brokers import BrokerProcess
from tests.unit.client.conftest import given_back
from tests.unit.integrations.cluster.hosts import Certificates, Serving, exporting, here


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """An authority with a certificate for this host."""
    pytest.importorskip("cryptography")
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def localhost(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that the name ``localhost`` has, which a test adds."""
    real, ips = socket.getaddrinfo, list[str]()

    def getaddrinfo(host: str, port: int, *rest: Any, **options: Any) -> list[Any]:
        return [entry for ip in (ips if host == "localhost" else [host]) for entry in real(ip, port, *rest, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return ips


@pytest.fixture(scope="module")
def plain() -> Iterator[None]:
    """Source processes have an engine that moves nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "SOURCE", "plain_source")
        patch.setenv("PYTHONPATH", here())
        yield


@pytest.fixture(scope="module")
def usual(plain: None, shared: BrokerProcess, certificates: Certificates) -> Iterator[Serving]:
    """An exporter with the usual rules for all tests of a module, whose source processes are ``plain``."""
    with exporting(shared.directory, certificates.host) as found:
        yield found


@pytest.fixture
def directory(shared: BrokerProcess) -> Iterator[Path]:
    """Where a broker serves that has no pool when a test begins, and no lease when it ends."""
    yield shared.directory
    given_back(shared.directory)
