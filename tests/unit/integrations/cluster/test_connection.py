"""Addresses of exporters, connections to what is none or lies, and certificates: their files, what a user may read."""

from __future__ import annotations

import os
import pwd
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cubroker.integrations.cluster import connection, messages
from cubroker.integrations.cluster.connection import (
    Account,
    PeerAddress,
    PeerConnection,
    can_read,
    find_folder,
    named_user,
    parse,
    resolve,
)
from cubroker.integrations.cluster.messages import PORT, Going, List, Offers, PeerHello, PeerWelcome
from cubroker.protocol.errors import CubrokerError, Denied, Invalid, NotFound, Unavailable
from tests.unit.integrations.cluster.hosts import HOST, Certificates, private_key
from tests.unit.integrations.cluster.liar import Liar, lying
from tests.unit.protocol.samples import INFO

making = pytest.importorskip("cubroker.integrations.cluster.certificates")

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
        (PeerAddress("gpu-1", 80, ("10.0.0.1",)), "gpu-1 (10.0.0.1):80"),
        (PeerAddress("gpu-1", 80, ("10.0.0.1", "fd00::1")), "gpu-1 (10.0.0.1, fd00::1):80"),
        (PeerAddress("10.0.0.1", 80, ("10.0.0.1",)), "10.0.0.1:80"),
        (PeerAddress("::1", 80), "[::1]:80"),
        (PeerAddress("::1", 80, ("::1",)), "[::1]:80"),
    ],
)
def test_an_address_is_shown_as_it_is_written(address: PeerAddress, text: str) -> None:
    assert str(address) == text


# -- connections -----------------------------------------------------------------------------------


@contextmanager
def plain(answer: Callable[[socket.socket], object], host: str = HOST, port: int = 0) -> Iterator[PeerAddress]:
    """Listen, and have a function deal with the connection that comes, which speaks no TLS."""
    with socket.create_server((host, port)) as server:

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


ELSEWHERE = "127.0.0.2"
"""Another address of this host, where no exporter listens."""


def test_a_host_is_tried_at_each_of_its_addresses(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, localhost: list[str]
) -> None:
    localhost += [ELSEWHERE, HOST]
    with lying(certificates.host) as liar:
        there = PeerAddress("localhost", liar.address.port)
        with PeerConnection(there, certificates.host) as this:
            assert this.user == "root"
        with plain(lambda peer: None, ELSEWHERE, there.port), PeerConnection(there, certificates.host) as this:
            assert this.user == "root"
        monkeypatch.setattr(connection, "CONNECT", 2.0)
        with (
            plain(lambda peer: peer.recv(10_000) and peer.recv(1), ELSEWHERE, there.port),  # it is silent
            PeerConnection(there, certificates.host) as this,
        ):
            assert this.user == "root"


@pytest.mark.parametrize("order", [(ELSEWHERE, HOST), (HOST, ELSEWHERE)], ids=["refused first", "distrusted first"])
def test_each_address_that_fails_is_named_with_its_reason(
    certificates: Certificates, tmp_path: Path, localhost: list[str], order: tuple[str, str]
) -> None:
    """The host is not refused: its exporter may be at the address where nothing listens now."""
    localhost += order
    with lying(Certificates(tmp_path).host) as stranger:
        there = PeerAddress("localhost", stranger.address.port)
        with pytest.raises(Unavailable) as caught:
            PeerConnection(there, certificates.host)
    refused, distrusted = sorted(caught.value.message.split("; "), key=lambda said: "no exporter" not in said)
    assert caught.value.message == "; ".join((refused, distrusted) if order[0] == ELSEWHERE else (distrusted, refused))
    assert refused == f"no exporter answers at {there._replace(ips=(ELSEWHERE,))}: Connection refused"
    assert distrusted.startswith(f"{there._replace(ips=(HOST,))} is not trusted as an exporter of this cluster: ")


def test_a_host_is_refused_when_none_of_its_addresses_is_its_exporter_s(
    certificates: Certificates, tmp_path: Path, localhost: list[str]
) -> None:
    localhost += [HOST, "::1"]
    other = Certificates(tmp_path).host
    with lying(other) as one, lying(other, at=("::1", one.address.port)):
        there = PeerAddress("localhost", one.address.port)
        with pytest.raises(Denied) as caught:
            PeerConnection(there, certificates.host)
    first, second = (f"{there._replace(ips=(ip,))} is not trusted as an exporter of this cluster: " for ip in localhost)
    assert caught.value.message.startswith(f"{there} has no address left: {first}")
    assert f"; {second}" in caught.value.message


def test_a_host_is_not_refused_while_an_address_is_untried(
    certificates: Certificates, localhost: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    localhost += [HOST, "::1"]
    clock = iter((0.0, 0.0, connection.CONNECT))

    def encrypted(address: PeerAddress, *_: object) -> None:
        raise Denied(f"{address} is not trusted")

    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(connection, "_encrypted", encrypted)
    with pytest.raises(Unavailable) as caught:
        PeerConnection(PeerAddress("localhost", 7411), certificates.host)
    assert caught.value.message == f"localhost ({HOST}):7411 is not trusted"


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
    with pytest.raises(NotFound):
        PeerConnection(parse("gpu-1"), tmp_path)


# -- the folder with certificates ------------------------------------------------------------------


@pytest.fixture
def folder(certificates: Certificates, tmp_path: Path) -> Path:
    """A folder with a certificate that a test may damage."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in certificates.host.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
        (copy / file.name).chmod(0o600)
    return copy


def test_the_folder_is_what_is_given_else_the_variable_s_else_the_host_s() -> None:
    variable = {"CUBROKER_CERTIFICATES": "/variable"}
    assert find_folder("/given", variable) == Path("/given")
    assert find_folder(None, variable) == find_folder("", variable) == Path("/variable")
    assert find_folder(None, {}) == find_folder(None, {"CUBROKER_CERTIFICATES": ""}) == connection.FOLDER


def test_both_sides_ask_for_a_certificate_and_for_tls_1_3(folder: Path) -> None:
    for context in (connection.serving_context(folder), connection.asking_context(folder)):
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert not context.verify_flags & ssl.VERIFY_CRL_CHECK_LEAF
    assert connection.asking_context(folder).check_hostname


def test_a_list_of_revoked_ones_is_heeded_if_there_is_one(
    certificates: Certificates, folder: Path, tmp_path: Path
) -> None:
    lost = making.issue(certificates.authority, tmp_path / "lost", "root")
    making.revoke(certificates.authority, lost).rename(folder / "crl.pem")
    assert connection.asking_context(folder).verify_flags & ssl.VERIFY_CRL_CHECK_LEAF


def unlink(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(text)


def mode(bits: int) -> Callable[[Path], object]:
    return lambda folder: (folder / "key.pem").chmod(bits)


def replace(name: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return make


def key(password: bytes = b"") -> Callable[[Path], object]:
    return lambda folder: (folder / "key.pem").write_bytes(private_key(password))


@pytest.mark.parametrize(
    ("damage", "error", "why"),
    [
        (unlink("ca.pem"), NotFound, r"there is no .*/ca\.pem; `cubroker certificates` makes them, and --certificates"),
        (unlink("cert.pem"), NotFound, r"there is no .*/cert\.pem"),
        (unlink("key.pem"), NotFound, r"there is no .*/key\.pem"),
        (write("ca.pem", b""), Invalid, "the certificates in .* cannot be used: .*; make them again"),
        (write("ca.pem", b"\xff\0"), Invalid, "cannot be used"),
        (
            write("cert.pem", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
            Invalid,
            "cannot be used",
        ),
        (write("cert.pem", b"none"), Invalid, "cannot be used"),
        (write("key.pem", b"none"), Invalid, "cannot be used"),
        (write("crl.pem", b"none"), Invalid, "cannot be used"),
        (key(), Invalid, "cannot be used: KEY_VALUES_MISMATCH"),
        (key(b"secret"), Invalid, "the key has a password, which a service cannot be asked for"),
        (mode(0o640), Denied, r"others than its owner may use .*/key\.pem \(mode 0640\); chmod 600 it"),
        (mode(0o604), Denied, r"\(mode 0604\)"),
        (mode(0o610), Denied, r"\(mode 0610\)"),
        (replace("ca.pem"), Invalid, r"/ca\.pem cannot be read: Is a directory"),
        (replace("crl.pem"), Invalid, r"/crl\.pem cannot be read: Is a directory"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    folder: Path, damage: Callable[[Path], object], error: type[CubrokerError], why: str
) -> None:
    damage(folder)
    for context in (connection.serving_context, connection.asking_context):
        with pytest.raises(error, match=why) as caught:
            context(folder)
        assert str(folder) in caught.value.message or "password" in caught.value.message


def test_a_key_that_its_owner_alone_may_use_will_do(folder: Path) -> None:
    for bits in (0o400, 0o600, 0o700):
        (folder / "key.pem").chmod(bits)
        connection.asking_context(folder)


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Invalid, match="cannot be read: Not a directory"):
        connection.asking_context(tmp_path / "file")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_files_that_this_user_may_not_read(folder: Path, tmp_path: Path) -> None:
    for each in (tmp_path, folder):
        each.chmod(0o755)
    (folder / "crl.pem").write_text("")
    for name in ("key.pem", "cert.pem", "crl.pem"):
        for file in folder.iterdir():
            file.chmod(0o000 if file.name == name else 0o644)
        os.seteuid(pwd.getpwnam("nobody").pw_uid)
        try:
            with pytest.raises(Denied, match=f"this user may not read {folder}/{name}"):
                connection.asking_context(folder)
        finally:
            os.seteuid(0)


# -- whom a certificate names ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subject", "user"),
    [
        (((("commonName", "alice"),),), "alice"),
        (((("countryName", "DE"),), (("commonName", "alice"),)), "alice"),
        (((("countryName", "DE"),),), ""),
        (((("commonName", "alice"),), (("commonName", "root"),)), ""),
        (((("commonName", "alice"), ("commonName", "root")),), ""),
        ((), ""),
    ],
)
def test_a_certificate_names_one_user(subject: object, user: str) -> None:
    assert named_user({"subject": subject}) == user


def test_a_certificate_without_a_subject_names_nobody() -> None:
    assert named_user({}) == ""


def test_an_account_is_one_of_this_host_with_all_of_its_groups() -> None:
    found = connection.find_account("root")
    assert (found.name, found.uid) == ("root", 0)
    assert pwd.getpwnam("root").pw_gid in found.groups
    for name in ("no-such-user", "", "a\0b", "x" * 5000):
        with pytest.raises(Denied, match="whom the exporting host does not have"):
            connection.find_account(name)


# -- what it may read ------------------------------------------------------------------------------

ROOT = Account("root", 0, frozenset({0}))
OWNER = Account("owner", 1000, frozenset({1000}))
MEMBER = Account("member", 1001, frozenset({1001, 50}))
OTHER = Account("other", 1002, frozenset({1002}))


@pytest.mark.parametrize(
    ("mode", "readers"),
    [
        (0o600, {ROOT, OWNER}),
        (0o640, {ROOT, OWNER, MEMBER}),
        (0o644, {ROOT, OWNER, MEMBER, OTHER}),
        (0o604, {ROOT, OWNER, OTHER}),  # of the classes one counts
        (0o000, {ROOT, OWNER}),
        (0o622, {ROOT, OWNER}),
        (0o611, {ROOT, OWNER}),
        (0o666, {ROOT, OWNER, MEMBER, OTHER}),
    ],
    ids=lambda value: f"{value:o}" if isinstance(value, int) else "",
)
def test_the_mode_of_a_pool_says_who_may_fetch_it(mode: int, readers: set[Account]) -> None:
    pool = msgspec.structs.replace(INFO, owner=1000, group=50, mode=mode)
    assert {each for each in (ROOT, OWNER, MEMBER, OTHER) if can_read(each, pool)} == readers
