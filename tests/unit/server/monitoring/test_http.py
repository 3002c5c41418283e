"""Readers that mean harm, or make mistakes: each gets an answer or is cut off, and the next one is served."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from threading import Event
from typing import Any
from unittest.mock import Mock

import h11
import pytest

from cubroker.protocol.messages import View
from cubroker.server.monitoring import http
from cubroker.server.monitoring.http import Site
from cubroker.server.monitoring.metrics import BrokerCounters
from tests.brokers import PATIENCE, eventually
from tests.unit.server.loops import run
from tests.unit.server.monitoring import scenes
from tests.unit.server.monitoring.windows import Looking, Pane, read, watching

WATCH = b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def pane() -> Iterator[Pane]:
    with watching(scenes.view(1, 5)) as pane:
        yield pane


def status(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer[:100]
    return int(answer.split()[1])


def serves(pane: Pane) -> bool:
    answer = pane.get("/metrics")
    return b"cubroker_device_total_bytes" in answer and answer.startswith(b"HTTP/1.1 200 ")


def test_metrics_the_page_and_what_it_shows_are_there(pane: Pane) -> None:
    assert serves(pane)
    head, _, body = pane.get("/view").partition(b"\r\n\r\n")
    assert b"application/json" in head
    assert [device["index"] for device in json.loads(body)["devices"]] == [0]
    page = pane.get("/")
    assert b"<!doctype html>" in page
    assert b"Content-Security-Policy: default-src 'none'" in page


def test_the_head_of_an_answer_can_be_had_alone(pane: Pane) -> None:
    head = pane.ask("HEAD /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert status(head) == 200
    assert head.endswith(b"\r\n\r\n")


def ask_for(pane: Pane, path: str, accepted: str) -> tuple[bytes, bytes]:
    """Return head and body of an answer to who takes an encoding."""
    text = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: {accepted}\r\n\r\n"
    head, _, body = pane.ask(text).partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize("accepted", ["gzip", "br, gzip;q=0.5", "GZIP ; q=1"])
def test_who_takes_gzip_gets_less(accepted: str) -> None:
    with watching(scenes.view(8, 200)) as pane:
        for path in ("/", "/metrics"):
            plain = pane.get(path).partition(b"\r\n\r\n")[2]
            head, body = ask_for(pane, path, accepted)
            assert b"Content-Encoding: gzip" in head
            assert len(body) < len(plain) / 2
            assert path == "/metrics" or gzip.decompress(body) == plain
        assert b"Content-Encoding" not in ask_for(pane, "/nothing", accepted)[0], "a line is not worth it"


@pytest.mark.parametrize("accepted", ["", "identity", "gzip;q=0", "br, gzip; q=0.0"])
def test_who_does_not_take_gzip_gets_none(accepted: str) -> None:
    with watching(scenes.view(8, 200)) as pane:
        head, body = ask_for(pane, "/view", accepted)
        assert b"Content-Encoding" not in head
        assert len(json.loads(body)["devices"]) == 8


def test_a_compressed_stream_has_each_picture_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "EVENT_INTERVAL", 0.01)
    monkeypatch.setattr(http, "MIN_AGE", 0.0)
    with watching(scenes.view(8, 200)) as pane, pane.connect() as connection:
        connection.sendall(WATCH.replace(b"\r\n\r\n", b"\r\nAccept-Encoding: gzip\r\n\r\n"))
        client, unpacker = h11.Connection(h11.CLIENT), zlib.decompressobj(zlib.MAX_WBITS | 16)
        client.send(h11.Request(method="GET", target="/events", headers=[("Host", "localhost")]))
        text, packed = b"", 0

        def picture() -> Any:
            nonlocal text, packed
            while b"\n\n" not in text:
                event = client.next_event()
                if event is h11.NEED_DATA:
                    client.receive_data(connection.recv(1 << 16))
                elif isinstance(event, h11.Data):
                    packed += len(event.data)
                    text += unpacker.decompress(event.data)
            line, _, text = text.partition(b"\n\n")
            return json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: ") else picture()

        assert len(picture()["pools"]) == len(pane.view.pools)
        assert packed < 20_000, "a picture of 200 pools is 150 kB"
        pane.view = scenes.view(2, 5)
        assert len(picture()["devices"]) == 2


@pytest.mark.parametrize(
    ("request_text", "expected"),
    [
        ("POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nhi", 405),
        ("DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        ("GET /etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        ("GET /../ HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        ("GET /metrics HTTP/1.1\r\n\r\n", 400),
        ("no HTTP at all\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: localhost\r\nX: " + "x" * 100_000, 431),
    ],
)
def test_what_nobody_can_have_is_refused_in_a_line(pane: Pane, request_text: str, expected: int) -> None:
    answer = pane.ask(request_text)
    # What was sent and not read may have the system drop the answer.
    assert answer == b"" or status(answer) == expected
    if expected != 431:
        assert answer
    assert serves(pane)


@pytest.mark.parametrize("host", ["localhost", "localhost:80", "127.0.0.1:9", "127.8.9.1", "[::1]", "[::1]:80"])
def test_names_of_this_host_are_answered(pane: Pane, host: str) -> None:
    assert status(pane.get("/view", host)) == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "10.0.0.1", "localhost.evil.example", ""])
def test_a_page_elsewhere_whose_name_leads_here_reads_nothing(pane: Pane, host: str) -> None:
    for path in ("/view", "/metrics", "/events", "/", "/nowhere"):
        assert status(pane.get(path, host)) == 421


PATHS = ("/", "/metrics", "/view", "/events", "/nowhere")


@pytest.mark.parametrize("site", ["cross-site", "same-site", "of a kind to come"])
def test_a_page_of_another_origin_starts_nothing_here(pane: Pane, site: str) -> None:
    sent = {"sec_fetch_site": site, "sec_fetch_mode": "cors", "sec_fetch_dest": "empty"}
    assert [status(pane.begin(path, **sent)) for path in PATHS] == [403] * len(PATHS)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_link_elsewhere_leads_to_the_page_alone_and_into_no_frame(pane: Pane, site: str) -> None:
    link = {"sec_fetch_site": site, "sec_fetch_mode": "navigate"}
    answers = [status(pane.begin(path, **link, sec_fetch_dest="document")) for path in PATHS]
    assert answers == [200, 403, 403, 403, 403]
    assert status(pane.begin("/", **link, sec_fetch_dest="iframe")) == 403


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_the_page_itself_and_the_address_bar_are_answered(pane: Pane, site: str) -> None:
    assert [status(pane.begin(path, sec_fetch_site=site)) for path in PATHS] == [200, 200, 200, 200, 404]


TOKEN = b"a token of 32 bytes, more or less".replace(b" ", b"-")


def basic(user: bytes, password: bytes) -> str:
    return "Basic " + base64.b64encode(user + b":" + password).decode()


@pytest.mark.parametrize(
    "shown",
    [
        "Bearer " + TOKEN.decode(),
        "bearer  " + TOKEN.decode() + " ",
        basic(b"", TOKEN),
        basic(b"anybody", TOKEN),
    ],
)
def test_who_shows_the_token_as_programs_or_as_browsers_do_is_answered(shown: str) -> None:
    with watching(scenes.view(1, 5), token=TOKEN) as pane:
        assert [status(pane.begin(path, authorization=shown)) for path in PATHS] == [200, 200, 200, 200, 404]


@pytest.mark.parametrize(
    "shown",
    [
        None,
        "",
        "Bearer",
        "Bearer " + TOKEN.decode()[:-1],
        "Bearer " + TOKEN.decode() + "x",
        TOKEN.decode(),
        "Digest " + TOKEN.decode(),
        basic(TOKEN, b""),
        basic(b"", TOKEN[1:]),
        "Basic " + TOKEN.decode(),
        "Basic a",
    ],
)
def test_who_shows_no_token_or_another_one_is_asked_for_it_and_told_nothing_else(shown: str | None) -> None:
    with watching(scenes.view(1, 5), token=TOKEN) as pane:
        header = "" if shown is None else f"Authorization: {shown}\r\n"
        answers = [pane.ask(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n") for path in PATHS]
        assert {status(answer) for answer in answers} == {401}
        assert {answer.partition(b"\r\n\r\n")[2] for answer in answers} == {answers[0].partition(b"\r\n\r\n")[2]}
        assert b'WWW-Authenticate: Basic realm="cubroker"' in answers[0]


def test_a_page_of_another_origin_starts_nothing_by_the_token_that_a_browser_keeps() -> None:
    with watching(scenes.view(1, 5), token=TOKEN) as pane:
        shown = basic(b"", TOKEN)
        answers = [pane.begin(path, sec_fetch_site="same-site", authorization=shown) for path in PATHS]
        assert [status(answer) for answer in answers] == [403] * len(PATHS)


def test_whoever_says_nothing_is_cut_off(pane: Pane, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as hasty:
        hasty.setattr(http, "TIMEOUT", 0.05)  # before the connection: that takes its own when it begins
        with pane.connect() as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n")
            assert read(connection) == b""
    assert serves(pane)


def test_whoever_hangs_up_in_the_middle_harms_nobody(pane: Pane) -> None:
    for text in ("", "GET", "GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        with pane.connect() as connection:
            connection.sendall(text.encode())
    assert serves(pane)


def test_whoever_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_STREAMS", 1)
    monkeypatch.setattr(http, "EVENT_INTERVAL", 0.01)
    monkeypatch.setattr(http, "MIN_AGE", 0.0)
    with watching(scenes.view(16, 500)) as pane, pane.connect() as idle:
        idle.sendall(WATCH)
        assert idle.recv(12) == b"HTTP/1.1 200"
        monkeypatch.setattr(http, "TIMEOUT", 0.1)

        def room_for_another() -> bool:
            pane.view = pane.view  # something new, for the one that does not read
            with pane.connect() as connection, suppress(ConnectionError):  # who is slow is cut off as well
                connection.sendall(WATCH)
                return connection.recv(12) == b"HTTP/1.1 200"
            return False

        eventually(room_for_another, "the idle one to be cut off")


def test_there_are_only_so_many_connections(pane: Pane) -> None:
    held = [pane.connect() for _ in range(http.MAX_CONNECTIONS)]
    try:
        eventually(lambda: pane.get("/view") == b"", "the door to be closed")
    finally:
        for connection in held:
            connection.close()
    eventually(lambda: serves(pane), "the next reader to be served")


def test_there_are_only_so_many_who_watch(pane: Pane) -> None:
    held = [pane.connect() for _ in range(http.MAX_STREAMS)]
    try:
        for connection in held:
            connection.sendall(WATCH)
            assert connection.recv(9) == b"HTTP/1.1 "
        assert status(pane.get("/events")) == 503
        assert serves(pane)
    finally:
        for connection in held:
            connection.close()


def test_who_comes_while_a_window_is_closed_keeps_nobody_waiting() -> None:
    async def test() -> None:
        service = http.HttpServer(http.TokenCheck(None, {}, {}))
        server = await asyncio.start_server(service.accept, "127.0.0.1", 0)
        async with server:  # which waits, from Python 3.12 on, for the end of all connections
            await service.close()
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            said = b""
            with suppress(ConnectionError):
                writer.write(WATCH)
                said = await reader.read()
            assert said == b""
            writer.transport.abort()

    run(test())


def test_a_broker_that_does_not_answer_is_told_from_a_window_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "VIEW_TIMEOUT", 0.05)
    view, over = scenes.view(1, 0), Event()

    def busy() -> View:
        over.wait(PATIENCE)  # the loop of the broker has something else to do
        return view

    with watching(view, busy) as pane:
        try:
            assert status(pane.get("/metrics")) == 503
        finally:
            over.set()


def test_a_mistake_in_looking_is_told_and_the_next_look_is_another(caplog: pytest.LogCaptureFixture) -> None:
    views = iter([None, scenes.view(1, 0)])

    def look() -> View:
        view = next(views)
        if view is None:
            raise ZeroDivisionError("a mistake")
        return view

    with watching(scenes.view(1, 0), look) as pane:
        assert status(pane.get("/metrics")) == 500
        assert serves(pane)
    assert "ZeroDivisionError: a mistake" in caplog.text


def test_whoever_watches_sees_what_is_new_and_hears_when_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "EVENT_INTERVAL", 0.01)
    monkeypatch.setattr(http, "MIN_AGE", 0.0)
    with watching(scenes.view(1, 0)) as pane, pane.connect() as connection:
        connection.sendall(WATCH)
        with connection.makefile("rb") as lines:
            pictures = (json.loads(line[6:]) for line in lines if line.startswith(b"data: "))
            assert len(next(pictures)["devices"]) == 1
            assert next(line for line in lines if line.startswith(b":")) == b": nothing new\n"
            pane.view = scenes.view(2, 0)
            assert len(next(pictures)["devices"]) == 2


def test_views_are_shared_by_those_who_ask_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def look() -> View:
        looks.append(1)
        return scenes.view(1, 0)

    monkeypatch.setattr(http, "MIN_AGE", 60.0)
    with watching(scenes.view(1, 0), look) as pane:
        for _ in range(5):
            assert serves(pane)
    assert len(looks) == 1


def test_looking_that_takes_long_is_done_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def look() -> View:
        looks.append(1)
        time.sleep(0.01)  # so that this view is good for a while
        return scenes.view(1, 0)

    monkeypatch.setattr(http, "MIN_AGE", 0.0)
    monkeypatch.setattr(http, "COST_FACTOR", 100 * PATIENCE)
    with watching(scenes.view(1, 0), look) as pane:
        for _ in range(3):
            assert serves(pane)
    assert len(looks) == 1


def test_whoever_watches_sees_what_is_new_since_somebody_else_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "EVENT_INTERVAL", 0.05)
    deadline = time.monotonic() + PATIENCE
    with watching(scenes.view(1, 0)) as pane, pane.connect() as connection:
        assert pane.get("/metrics")
        pane.view = scenes.view(2, 0)
        connection.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with connection.makefile("rb") as lines:
            for line in lines:
                if line.startswith(b"data: ") and len(json.loads(line[6:])["devices"]) == 2:
                    break
                assert time.monotonic() < deadline, "the picture stays as it was"


def test_all_who_ask_a_broker_that_does_not_answer_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "VIEW_TIMEOUT", 0.2)
    busy = Mock(spec=asyncio.AbstractEventLoop)

    async def test() -> None:
        site = Site(busy, Looking(Pane(0, scenes.view(1, 0))), BrokerCounters(), everything=True)
        answers = await asyncio.gather(*(site.take() for _ in range(50)), return_exceptions=True)
        assert {type(answer) for answer in answers} == {TimeoutError}

    run(test())
    assert busy.call_soon_threadsafe.call_count < 25, "each waited for the one before it to give up"
