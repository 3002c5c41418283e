"""Addresses of exporters, and connections to what is none or lies."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cubroker.integrations.cluster import connection, identity, messages
from cubroker.integrations.cluster.connection import PeerAddress, PeerConnection, parse, resolve
from cubroker.integrations.cluster.messages import PORT, Going, List, Offers, PeerHello, PeerWelcome
from cubroker.protocol.errors import Denied, Invalid, Unavailable
from tests.unit.integrations.cluster.hosts import HOST, Certificates
from tests.unit.integrations.cluster.liar import Liar, lying

# -- addresses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("gpu-1", "gpu-1", PORT),
        ("gpu-1:80", "gpu-1", 80),
        ("gpu_1.example.", "gpu_1.example.", PORT),
        ("10.0.0.1:65535", "10.0.0.1", 65535),
        ("::1", "::1", PORT),
        ("fe80::1%eth0", "fe80::1%eth0", PORT),
        ("[::1]", "::1", PORT),
        ("[::1]:1", "::1", 1),
        ("münchen:80", "münchen", 80),
    ],
)
def test_an_address_is_a_host_and_perhaps_a_port(text: str, host: str, port: int) -> None:
    assert parse(text) == PeerAddress(host, port)


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", ":80", "gpu-1:", "gpu-1:http", "gpu-1:-1", "gpu-1:+1", "gpu-1:٣", "gpu 1", "gpu/1", "a\0b", "a\nb"),
        *("[]", "[]:80", "[::1", "[::1:80", "::1]", "gpu]", "[gpu", "[::1]80", "[::1]:", "[[::1]]"),
        *(".", "a..b", ".a", "a" * 64, f"{'a' * 64}.example:80"),
        *("1.2.3", "1.2.3:80", "10.0.0.256", "10.0.0.1.", "7:80"),
        *("\uff11.\uff12.\uff13", "1\u30022\u30023", "0x7f.1", "0X10:80"),  # other digits, other dots, hexadecimal
    ],
)
def test_what_names_no_exporter_says_how_one_is_written(text: str) -> None:
    with pytest.raises(Invalid, match=r"names no exporter; write HOST, HOST:PORT or \[ADDRESS\]:PORT"):
        parse(text)


@pytest.mark.parametrize("port", ["0", "65536", "9" * 5000])
def test_a_port_has_its_bounds(port: str) -> None:
    with pytest.raises(Invalid, match="has an invalid port; ports are 1 to 65535") as caught:
        parse(f"gpu-1:{port}")
    assert len(caught.value.message) < 200


def test_an_address_to_listen_at_may_have_port_0() -> None:
    assert parse("127.0.0.1:0", least=0) == PeerAddress("127.0.0.1", 0)


@pytest.mark.slow
@given(st.text(max_size=80) | st.from_regex(r"\[?[a-z0-9:.%-]{0,70}\]?(:[0-9]{0,6})?", fullmatch=True))
@example("a" * 63 + "." + "b" * 64)
def test_any_text_is_an_address_or_invalid_and_no_address_is_a_fault_of_the_resolver(text: str) -> None:
    try:
        address = parse(text)
    except Invalid:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", _encoded)
        assert resolve([text]) == [address]


def _encoded(host: str, *_: object, **__: object) -> list[object]:
    """Take a name as the system's resolver does, and know none."""
    host.encode("idna")
    assert "\0" not in host
    raise socket.gaierror(socket.EAI_NONAME, "no such host")


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (PeerAddress("gpu-1", 80), "gpu-1:80"),
        (PeerAddress("gpu-1", 80, "10.0.0.1"), "gpu-1 (10.0.0.1):80"),
        (PeerAddress("10.0.0.1", 80, "10.0.0.1"), "10.0.0.1:80"),
        (PeerAddress("::1", 80), "[::1]:80"),
        (PeerAddress("::1", 80, "::1"), "[::1]:80"),
    ],
)
def test_an_address_is_shown_as_it_is_written(address: PeerAddress, text: str) -> None:
    assert str(address) == text


# -- connections -----------------------------------------------------------------------------------


@contextmanager
def plain(answer: Callable[[socket.socket], object]) -> Iterator[PeerAddress]:
    """Listen, and have a function deal with the connection that comes, which speaks no TLS."""
    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                answer(peer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield PeerAddress(*server.getsockname())
        finally:
            thread.join()


def test_nothing_listens(certificates: Certificates) -> None:
    with socket.create_server((HOST, 0)) as server:
        address = PeerAddress(*server.getsockname())
    with pytest.raises(Unavailable, match=rf"no exporter answers at {address}: Connection refused"):
        PeerConnection(address, certificates.host)


def test_a_host_without_an_address(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", _encoded)
    with pytest.raises(Unavailable, match="no exporter answers at gpu-1:7411: no such host"):
        PeerConnection(parse("gpu-1"), certificates.host)


def test_what_listens_speaks_no_tls(certificates: Certificates) -> None:
    def web(peer: socket.socket) -> None:
        peer.recv(10)
        peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        peer.recv(1000)

    with (
        plain(web) as address,
        pytest.raises(Unavailable, match=r"does not speak TLS as an exporter does: .*; is it an"),
    ):
        PeerConnection(address, certificates.host)


def test_what_listens_says_nothing(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT", 0.2)
    with (
        plain(lambda peer: peer.recv(10_000) and peer.recv(1)) as address,
        pytest.raises(Unavailable, match="timed out"),
    ):
        PeerConnection(address, certificates.host)


def test_what_listens_closes_at_once(certificates: Certificates) -> None:
    with plain(lambda peer: None) as address, pytest.raises(Unavailable, match=f"the connection to {address} is over"):
        PeerConnection(address, certificates.host)


def test_an_exporter_of_another_cluster_is_not_told_anything(certificates: Certificates, tmp_path: Path) -> None:
    other = Certificates(tmp_path)
    with lying(other.host) as liar, pytest.raises(Denied, match="is not trusted as an exporter of this cluster"):
        PeerConnection(liar.address, certificates.host)
    assert liar.heard == []


def test_an_exporter_that_ends_as_it_is_greeted_is_not_taken_for_one_that_refuses(certificates: Certificates) -> None:
    """It may be stopped at that moment, and be back at once."""

    def once(liar: Liar, send: Callable[[bytes], None]) -> None:
        if liar.asked(PeerHello) == 1:
            raise ConnectionResetError
        send(messages.frame(PeerWelcome(1, "root")))

    with lying(certificates.host, {"PeerHello": once}) as liar:
        with PeerConnection(liar.address, certificates.host) as this:
            assert this.user == "root"
        liar.answers["PeerHello"] = _end
        with pytest.raises(Denied, match="after receiving this host's certificate"):
            PeerConnection(liar.address, certificates.host)
    assert liar.asked(PeerHello) == 4


def _end(*_: object) -> None:
    raise ConnectionResetError


def test_an_exporter_may_refuse_at_once(certificates: Certificates) -> None:
    refused = messages.PeerRefusal("denied", "not you")
    with lying(certificates.host, {"PeerHello": refused}) as liar, pytest.raises(Denied, match="not you"):
        PeerConnection(liar.address, certificates.host)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (Going(), "the exporter answered with Going instead of PeerWelcome"),
        (messages.LENGTH.pack(0), "received a frame of 0 bytes"),
        (messages.LENGTH.pack(messages.MAX_REPLY + 1), "the other side does not speak this protocol"),
        (messages.LENGTH.pack(1) + b"\xc1", "received a message that cannot be decoded"),
        (messages.frame(List()), "received a message that cannot be decoded"),
    ],
    ids=["another kind", "empty", "too long", "no msgpack", "a request"],
)
def test_an_exporter_that_says_what_is_no_answer(certificates: Certificates, said: object, why: str) -> None:
    with lying(certificates.host, {"PeerHello": said}) as liar, pytest.raises(Invalid, match=why):
        PeerConnection(liar.address, certificates.host)


def test_an_exporter_that_does_not_answer(certificates: Certificates) -> None:
    with (
        lying(certificates.host, {"List": None}) as liar,
        PeerConnection(liar.address, certificates.host) as this,
        pytest.raises(Unavailable, match=r"did not answer within 0\.1 s"),
    ):
        this.ask(List(), Offers, 0.1)


def test_the_time_for_an_answer_is_that_for_all_of_it(certificates: Certificates) -> None:
    """Not for each of its bytes: one that drips would never end."""

    def drip(liar: object, send: Callable[[bytes], None]) -> None:
        send(messages.LENGTH.pack(1 << 20))
        while True:
            send(b"x")

    with (
        lying(certificates.host, {"List": drip}, pause=0.02) as liar,
        PeerConnection(liar.address, certificates.host) as this,
        pytest.raises(Unavailable, match=r"did not answer within 0\.3 s"),
    ):
        this.ask(List(), Offers, 0.3)


def test_a_connection_that_another_thread_closes_ends_what_waits(certificates: Certificates) -> None:
    with lying(certificates.host, {"List": None}) as liar, PeerConnection(liar.address, certificates.host) as this:
        assert not this.pending()
        this.say(List())
        timer = threading.Timer(0.05, this.close)
        timer.start()
        with pytest.raises(Unavailable, match="is over"):
            this.hear(Offers)
        timer.join()


def test_certificates_that_cannot_be_used_are_told_before_anything_is_asked(tmp_path: Path) -> None:
    with pytest.raises(identity.NotFound):
        PeerConnection(parse("gpu-1"), tmp_path)
