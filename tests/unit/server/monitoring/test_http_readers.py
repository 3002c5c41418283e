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
from cubroker.server.config.schema import Address, Metrics
from cubroker.server.ledger import Budget, Ledger
from cubroker.server.ledger import events as e
from cubroker.server.monitoring import http
from cubroker.server.monitoring.http import HttpThread, start
from cubroker.server.monitoring.metrics import BrokerCounters
from cubroker.server.monitoring.observer import LedgerObserver
from cubroker.server.transport.unix_sockets import Access
from tests.brokers import PATIENCE
from tests.unit.server.ledger.story import ALICE, MIB, asks, creates
from tests.unit.server.loops import run
from tests.unit.server.monitoring.windows import read

PORT = Address("127.0.0.1", 0)
TOKEN = "0123456789abcdef0123456789abcdef"


def opened(metrics: Metrics) -> HttpThread | None:
    """A window over a ledger with a pool that is Alice's alone."""
    ledger = Ledger([Budget(0, "GPU-0", "first", 16 * MIB, 10 * MIB)], os.getuid())
    for event in (
        e.SessionOpened(1, 101, ALICE, 100),
        creates(1, 1, "secret", MIB, mode=0o600),
        e.Allocated(1, (b"handle",)),
        asks(1, 2, m.Seal(1)),
    ):
        ledger.handle(event)
    counters = BrokerCounters()
    return start(metrics, LedgerObserver(ledger, counters), counters)


def looking(metrics: Metrics, look: Callable[[], Awaitable[None]]) -> None:
    async def test() -> None:
        window = opened(metrics)
        assert window
        try:
            await look()
        finally:
            await asyncio.to_thread(window.close)

    run(test())


def scrape(
    family: socket.AddressFamily, address: str | tuple[str, int], token: str = "", path: str = "/metrics"
) -> str:
    shown = f"Authorization: Bearer {token}\r\n" if token else ""
    with socket.socket(family) as connection:
        connection.settimeout(PATIENCE)
        connection.connect(address)
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{shown}\r\n".encode())
        return read(connection).decode()


def port(caplog: pytest.LogCaptureFixture) -> tuple[str, int]:
    """Where the log says that a port is."""
    said = re.search(r"a page to look at, are on http://127\.0\.0\.1:(\d+)/", caplog.text)
    assert said
    return "127.0.0.1", int(said[1])


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


def test_whoever_may_pass_the_socket_sees_everything(tmp_path: Path) -> None:
    path = tmp_path / "sight"

    async def look() -> None:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert 'pool="secret"' in await asyncio.to_thread(scrape, socket.AF_UNIX, str(path))

    looking(Metrics(path, Access(0o660, os.getgid())), look)


def test_a_socket_with_a_token_is_for_who_may_pass_it_and_has_the_token(tmp_path: Path, token: Path) -> None:
    path = tmp_path / "sight"

    async def look() -> None:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert "HTTP/1.1 401 " in await asyncio.to_thread(scrape, socket.AF_UNIX, str(path))
        assert 'pool="secret"' in await asyncio.to_thread(scrape, socket.AF_UNIX, str(path), TOKEN)

    looking(Metrics(path, token_file=token), look)


@pytest.mark.parametrize(
    ("with_token", "public", "told"),
    [
        (False, False, "for users whom mode 640 admits"),
        (False, True, "for users whom mode 640 admits"),
        (True, False, "for readers with the token, if mode 640 admits them"),
        (
            True,
            True,
            "for readers with the token and for everybody, limited to what strangers may know, if mode 640 admits them",
        ),
    ],
)
def test_the_log_says_who_of_those_that_may_pass_the_socket_sees_what(
    tmp_path: Path, token: Path, caplog: pytest.LogCaptureFixture, with_token: bool, public: bool, told: str
) -> None:
    path = tmp_path / "sight"

    async def look() -> None:
        text = await asyncio.to_thread(scrape, socket.AF_UNIX, str(path))
        assert ('pool="secret"' in text, 'pool="(private)"' in text) == (not with_token, with_token and public)

    caplog.set_level("INFO")
    looking(Metrics(path, Access(0o640, os.getgid()), token_file=token if with_token else None, public=public), look)
    assert f"are on {path}, {told}\n" in caplog.text


def test_who_has_the_token_of_a_port_sees_everything_and_others_nothing(
    caplog: pytest.LogCaptureFixture, token: Path
) -> None:
    async def look() -> None:
        where = port(caplog)
        assert 'pool="secret"' in await asyncio.to_thread(scrape, socket.AF_INET, where, TOKEN)
        for shown in ("", "another"):
            for path in ("/metrics", "/", "/view", "/events"):
                text = await asyncio.to_thread(scrape, socket.AF_INET, where, shown, path)
                assert text.startswith("HTTP/1.1 401 ")
                assert not [secret for secret in ("secret", "cubroker_", str(ALICE), "GPU-0") if secret in text]

    caplog.set_level("INFO")
    looking(Metrics(PORT, token_file=token), look)
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("with_token", [False, True])
def test_whoever_reaches_a_public_port_sees_what_a_stranger_may(
    caplog: pytest.LogCaptureFixture, token: Path, with_token: bool
) -> None:
    async def look() -> None:
        where = port(caplog)
        text = await asyncio.to_thread(scrape, socket.AF_INET, where)
        assert 'owner="(private)",pool="(private)"' in text
        assert "cubroker_sessions{" not in text
        for path in ("/metrics", "/view"):
            text = await asyncio.to_thread(scrape, socket.AF_INET, where, "", path)
            assert text.startswith("HTTP/1.1 200 ")
            assert not [secret for secret in ("secret", f'"{ALICE}"', ":101,") if secret in text]
        if with_token:
            assert 'pool="secret"' in await asyncio.to_thread(scrape, socket.AF_INET, where, TOKEN)
            assert "HTTP/1.1 401 " in await asyncio.to_thread(scrape, socket.AF_INET, where, "another")

    caplog.set_level("INFO")
    looking(Metrics(PORT, token_file=token if with_token else None, public=True), look)


def test_a_token_that_others_can_have_opens_nothing(
    tmp_path: Path, token: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(why: str, path: Path = token) -> None:
        caplog.clear()
        assert opened(Metrics(PORT, token_file=path)) is None
        assert "there are no metrics: " in caplog.text
        assert why in caplog.text

    async def test() -> None:
        for mode in (0o604, 0o602, 0o620, 0o644):
            token.chmod(mode)
            refused(f"has mode {mode:03o}, which is for others too; `chmod 600 {token}`")
        token.chmod(0o640)
        for text in ("", "short", "with a space, and long enough", "x" * 2000, "\N{BULLET}" * 32):
            token.write_text(text)
            refused("has no token of 16 to 1024 printable characters without spaces; write one with `head -c 24")
        refused("cannot read the token in", tmp_path / "absent")
        os.mkfifo(tmp_path / "fifo", 0o600)
        refused("is no regular file", tmp_path / "fifo")
        if os.geteuid() == 0:
            token.write_text(TOKEN)
            os.chown(token, 4001, -1)
            refused("belongs to user 4001; have root or the broker's user own it")

    run(test())


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
    looking(Metrics(Address("::1", 0), public=True), look)


def test_the_socket_of_one_that_is_gone_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "sight"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))

    async def look() -> None:
        assert "cubroker_restarts_total" in await asyncio.to_thread(scrape, socket.AF_UNIX, str(path))

    looking(Metrics(path), look)


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
            long = tmp_path / ("x" * 120)
            paths = (tmp_path / "file", tmp_path / "other", tmp_path / "no" / "folder", long)
            for number, where in enumerate((*paths, Address(*taken.getsockname())), 1):
                assert opened(Metrics(where, public=True)) is None
                assert caplog.text.count("there are no metrics, since this process cannot listen on") == number

    run(test())
    assert f"cannot listen on {tmp_path / ('x' * 120)}: AF_UNIX path too long" in caplog.text
    last = caplog.messages[-1]
    assert re.search(r"cannot listen on 127\.0\.0\.1:\d+: Address already in use; stop the process that", last)
    assert (tmp_path / "file").read_text() == "precious"


def test_the_page_is_that_of_the_start_though_its_file_was_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    http._page.cache_clear()

    async def look() -> None:
        monkeypatch.setattr(http, "files", lambda _: tmp_path)
        assert b"<!doctype html>" in http._page().body

    looking(Metrics(PORT), look)
