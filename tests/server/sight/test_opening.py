"""Where a window can be, who may look in, and what keeps it shut."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cubroker.protocol import messages as m
from cubroker.server.config import Access
from cubroker.server.ledger import Budget, Ledger
from cubroker.server.ledger import events as e
from cubroker.server.sight.meters import Meters
from cubroker.server.sight.observer import Sight
from cubroker.server.sight.opening import open_window
from cubroker.server.sight.window import Window
from tests.brokers import PATIENCE
from tests.server.loops import run
from tests.server.sight.windows import read
from tests.server.story import ALICE, MIB, asks, creates

Where = Path | tuple[str, int]


def opened(where: Where, access: Access | None = None) -> Window | None:
    """A window over a ledger with a pool that is Alice's alone."""
    ledger = Ledger([Budget(0, "GPU-0", "first", 16 * MIB, 10 * MIB)], os.getuid())
    for event in (
        e.Joined(1, 101, ALICE, 100),
        creates(1, 1, "secret", MIB, mode=0o600),
        e.Allocated(1, (b"handle",)),
        asks(1, 2, m.Seal(1)),
    ):
        ledger.handle(event)
    meters = Meters()
    return open_window(where, access or Access(), ledger, Sight(ledger, meters), meters)


def looking(where: Where, look: Callable[[], Awaitable[None]], access: Access | None = None) -> None:
    async def test() -> None:
        window = opened(where, access)
        assert window
        try:
            await look()
        finally:
            await asyncio.to_thread(window.close)

    run(test())


def scrape(family: socket.AddressFamily, address: str | tuple[str, int]) -> str:
    with socket.socket(family) as connection:
        connection.settimeout(PATIENCE)
        connection.connect(address)
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return read(connection).decode()


def test_whoever_may_pass_the_socket_sees_everything(tmp_path: Path) -> None:
    path = tmp_path / "sight"

    async def look() -> None:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert 'pool="secret"' in await asyncio.to_thread(scrape, socket.AF_UNIX, str(path))

    looking(path, look, Access(0o660, os.getgid()))


def test_whoever_reaches_a_port_sees_what_a_stranger_may(caplog: pytest.LogCaptureFixture) -> None:
    async def look() -> None:
        said = re.search(r"a page to look at, are on http://127\.0\.0\.1:(\d+)/", caplog.text)
        assert said
        text = await asyncio.to_thread(scrape, socket.AF_INET, ("127.0.0.1", int(said[1])))
        assert "secret" not in text
        assert 'pool="(private)"' in text
        assert "cubroker_pool_bytes" in text

    caplog.set_level("INFO")
    looking(("127.0.0.1", 0), look)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
def test_a_port_can_be_one_of_ipv6(caplog: pytest.LogCaptureFixture) -> None:
    async def look() -> None:
        assert "http://[::1]:" in caplog.text

    caplog.set_level("INFO")
    looking(("::1", 0), look)


def test_the_socket_of_one_that_is_gone_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "sight"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))

    async def look() -> None:
        assert "cubroker_restarts_total" in await asyncio.to_thread(scrape, socket.AF_UNIX, str(path))

    looking(path, look)


def test_where_nobody_can_listen_the_log_says_so_and_the_broker_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("precious")

    async def test() -> None:
        with (
            socket.socket(socket.AF_UNIX) as other,
            socket.socket(socket.AF_UNIX) as waiting,
            socket.create_server(("127.0.0.1", 0)) as taken,
        ):
            other.bind(str(tmp_path / "other"))
            other.listen(0)
            waiting.connect(str(tmp_path / "other"))  # and is never accepted, so there is no room for another
            places = (tmp_path / "file", tmp_path / "other", tmp_path / "no" / "folder", taken.getsockname())
            for number, where in enumerate(places, 1):
                assert opened(where) is None
                assert caplog.text.count("there are no metrics, since nobody can listen on") == number

    run(test())
    assert (tmp_path / "file").read_text() == "precious"
