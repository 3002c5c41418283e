"""What an exporter says to peers of every kind, and what it has of them in the end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pwd
import signal
import socket
import ssl
import sys
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cubroker.client import Broker
from cubroker.integrations.cluster import exporter, messages, source_process
from cubroker.integrations.cluster.connection import HungUp, PeerAddress, PeerConnection, find_folder
from cubroker.integrations.cluster.messages import (
    CurrentVersion,
    ExportedVersion,
    Going,
    List,
    Offers,
    Open,
    PeerHello,
    PeerWelcome,
    Progress,
    Serve,
    WatchPool,
)
from cubroker.integrations.cluster.source_process import SourceProcess
from cubroker.protocol import Layout
from cubroker.protocol.errors import (
    CubrokerError,
    Denied,
    Invalid,
    NotFound,
    OverQuota,
    Unavailable,
    Unsupported,
)
from tests.brokers import BrokerProcess, eventually
from tests.brokers import serving as serving_broker
from tests.unit.integrations.cluster.hosts import (
    HOST,
    LAYOUT,
    Certificates,
    Recorder,
    Serving,
    exporting,
    leases,
    nobody,
    publish,
    sources,
)

making = pytest.importorskip("cubroker.integrations.cluster.certificates")
pytestmark = pytest.mark.usefixtures("plain")


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    """Log lines are kept."""
    caplog.set_level(logging.INFO, logger=exporter.log.name)


@pytest.fixture
def serving(usual: Serving, directory: Path) -> Iterator[Serving]:
    """An exporter with the usual rules, that has no peer when a test begins, and none when it ends."""
    usual.meter.__init__()  # type: ignore[misc]
    yield usual
    eventually(lambda: usual.meter.service.connections == 0, "connections to end")


def over(connection: PeerConnection) -> None:
    """The exporter ends a connection, whatever else it still says on it."""
    with pytest.raises(CubrokerError) as caught:
        hear_on(connection)
    assert isinstance(caught.value, HungUp), caught.value


def hear_on(connection: PeerConnection) -> None:
    """Hear what a watch tells, until something else comes."""
    while True:
        connection.hear(CurrentVersion)


def go_on(connection: PeerConnection, nbytes: int = 0) -> None:
    """Say that this side has read so much, until that is refused."""
    while True:
        connection.ask(Progress(nbytes), Going)


def told(connection: PeerConnection, version: int) -> None:
    """A watch comes to tell a version; it may say the last one again before that."""
    while connection.hear(CurrentVersion).version != version:
        pass


# -- before a word of ours -------------------------------------------------------------------------


@pytest.mark.slow
def test_garbage_instead_of_tls_is_answered_by_nothing_of_ours(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", messages.frame(PeerHello(1)), bytes(1000)):
        with socket.create_connection(serving.address[:2]) as peer:
            peer.sendall(garbage)
            assert _all(peer)[:1] in (b"", b"\x15")  # at most an alert of TLS
    eventually(lambda: caplog.text.count(" is refused: ") == 3, "lines of the log")
    assert serving.greet() == "root"


def test_a_peer_that_goes_during_the_handshake_leaves_nothing(serving: Serving) -> None:
    with socket.create_connection(serving.address[:2]) as peer:
        peer.sendall(b"\x16\x03\x01")
    eventually(lambda: serving.meter.service.connections == 0, "the connection to end")


def _buffers() -> int:
    """How many TLS connections of asyncio there are; each has a buffer of 256 KiB."""
    return sum(type(each) is SSLProtocol for each in gc.get_objects())


def test_a_failed_handshake_leaves_no_buffer_to_the_collector(serving: Serving, certificates: Certificates) -> None:
    context = ssl.create_default_context(cafile=str(certificates.host / "ca.pem"))
    gc.collect()
    gc.disable()
    try:
        before = _buffers()
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01"):
            with socket.create_connection(serving.address[:2]) as peer:
                peer.sendall(said)
        with (
            socket.create_connection(serving.address[:2]) as plain,
            context.wrap_socket(plain, server_hostname=HOST) as peer,
        ):
            _all(peer)  # it has no certificate
        assert serving.greet() == "root"  # after all of them
        eventually(lambda: serving.meter.service.connections == 0, "the connections to end")
        eventually(lambda: _buffers() == before, "their buffers to be freed", 10.0)
    finally:
        gc.enable()


def _all(peer: socket.socket) -> bytes:
    """Return what comes until the connection ends, in whatever way."""
    said = b""
    try:
        while more := peer.recv(1000):
            said += more
    except (ConnectionError, ssl.SSLError):
        pass
    return said


def test_a_peer_without_a_certificate_is_told_nothing(
    directory: Path, name: str, serving: Serving, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    publish(directory, name)
    context = ssl.create_default_context(cafile=str(certificates.host / "ca.pem"))
    with (
        socket.create_connection(serving.address[:2]) as plain,
        context.wrap_socket(plain, server_hostname=HOST) as peer,
    ):
        peer.sendall(messages.frame(PeerHello(1)) + messages.frame(List()))
        assert _all(peer) == b""
    eventually(lambda: "peer did not return a certificate" in caplog.text.lower().replace("_", " "), "the log line")


def test_certificates_that_do_not_do_are_refused_with_the_reason_in_the_log(
    serving: Serving, certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = making.make_authority(tmp_path / "other").parent
    stranger = making.issue(other, tmp_path / "stranger", "root").parent
    (stranger / "ca.pem").write_bytes((certificates.host / "ca.pem").read_bytes())
    for folder, why in (
        (certificates.of("root", days=-0.001), "certificate has expired"),
        (stranger, "unable to get local issuer certificate"),
        (_of_servers(certificates, tmp_path), "unsuitable certificate purpose"),
    ):
        with pytest.raises(Denied, match="after receiving this host's certificate"):
            serving.greet(folder)
        eventually(lambda why=why: why in caplog.text, why)
    eventually(lambda: serving.meter.service.connections == 0, "connections to end")


def _of_servers(certificates: Certificates, tmp_path: Path) -> Path:
    """Return a certificate that is for servers alone, as this project makes none."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509.oid import ExtendedKeyUsageOID

    folder = making.issue(certificates.authority, tmp_path / "server", "root").parent
    signer, issuer = making._authority(certificates.authority)
    key = ec.generate_private_key(making.CURVE)
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    certificate = making._begun("root", issuer, key, 1).add_extension(usage, critical=True)
    (folder / "cert.pem").write_bytes(certificate.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM))
    (folder / "key.pem").write_bytes(making._key_text(key))
    return folder


def test_a_certificate_that_no_peer_takes_does_not_serve(
    directory: Path, certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec

    new = partial(making.issue, certificates.authority, user="root", hosts=[HOST])
    lost = new(folder=tmp_path / "lost").parent
    making.revoke(certificates.authority, lost).rename(lost / "crl.pem")
    foreign = new(folder=tmp_path / "foreign").parent
    (foreign / "ca.pem").write_bytes(making.make_authority(tmp_path / "other").read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(making, "EARLY", timedelta(days=-1))
        early = new(folder=tmp_path / "early", days=2).parent
    with monkeypatch.context() as patch:
        patch.setattr(making, "CURVE", ec.SECP256K1())
        odd = new(folder=tmp_path / "odd").parent
    for folder, why in (
        (certificates.of("root", HOST, days=-0.001), "certificate has expired"),
        (early, "certificate is not yet valid"),
        (foreign, "unable to get local issuer certificate"),
        (certificates.of("root"), "unsuitable certificate purpose"),
        (lost, "certificate revoked"),
        (odd, "UNSUPPORTED_PROTOCOL"),  # TLS 1.3 has no signatures on that curve
    ):
        with pytest.raises(Invalid, match=f"refuse an exporter that has .*cert.pem: .*{why}; issue another"):
            exporter.Exporter(directory, folder)
    exporter.Exporter(directory, _of_servers(certificates, tmp_path))  # one that fetches nothing


def test_the_list_of_another_authority_is_named_where_it_has_a_certificate_refused(
    directory: Path, certificates: Certificates, tmp_path: Path
) -> None:
    folder = making.issue(certificates.authority, tmp_path / "own", "root", [HOST]).parent
    other = making.make_authority(tmp_path / "other").parent
    lost = making.issue(other, tmp_path / "lost", "root")
    making.revoke(other, lost).rename(folder / "crl.pem")
    with pytest.raises(Invalid, match=r"CRL signature failure; .*, or put the right ca\.pem and crl\.pem there"):
        exporter.Exporter(directory, folder)


def test_revoked_ones_are_refused_after_a_reload_also_where_the_own_one_is_revoked(
    directory: Path, certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = making.issue(certificates.authority, tmp_path / "own", "root", [HOST]).parent
    peer = making.issue(certificates.authority, tmp_path / "peer", "root").parent
    with exporting(directory, folder) as serving:
        serving.greet(peer)
        for each in (folder, peer):
            revoked = making.revoke(certificates.authority, each)
        revoked.rename(folder / "crl.pem")
        serving.call(serving.service.reload)
        assert "refuse an exporter that has " in caplog.text
        with pytest.raises(Denied, match="was revoked"):
            serving.greet(peer)


def test_a_certificate_is_for_the_names_that_it_has(directory: Path, certificates: Certificates) -> None:
    with exporting(directory, certificates.host) as serving:
        for name in ("localhost", HOST):
            with PeerConnection(serving.address._replace(host=name, ips=(HOST,)), certificates.host) as connection:
                assert connection.user == "root"
        with pytest.raises(Denied, match=r"[Hh]ostname mismatch"):
            PeerConnection(serving.address._replace(host="elsewhere", ips=(HOST,)), certificates.host)


def test_a_user_whom_the_host_does_not_have_is_told_so_and_cut_off(
    serving: Serving, certificates: Certificates
) -> None:
    with pytest.raises(Denied, match="names user 'no-such-user', whom the exporting host does not have"):
        serving.greet(certificates.of("no-such-user"))
    assert serving.meter.refusals == ["denied"]


def test_after_a_reload_what_the_folder_had_before_counts_no_more(
    directory: Path, certificates: Certificates, tmp_path: Path
) -> None:
    """An authority that was replaced is not trusted any longer, nor is a certificate that was revoked."""
    folder = making.issue(certificates.authority, tmp_path / "own", "root", [HOST]).parent
    peer, lost = (making.issue(certificates.authority, tmp_path / name, "root").parent for name in ("peer", "lost"))
    with exporting(directory, folder) as serving:
        revoked = making.revoke(certificates.authority, lost)
        revoked.rename(folder / "crl.pem")
        serving.greet(lost)
        serving.call(serving.service.reload)
        with pytest.raises(Denied, match="was revoked"):
            serving.greet(lost)
        serving.greet(peer)

        (folder / "ca.pem").write_text("damaged")
        with pytest.raises(Invalid, match="cannot be used"):
            serving.call(serving.service.reload)
        serving.greet(peer)

        other = making.make_authority(tmp_path / "other").parent
        new = making.issue(other, tmp_path / "new", "root", [HOST]).parent
        (folder / "crl.pem").unlink()
        for name in ("ca.pem", "cert.pem", "key.pem"):
            (folder / name).write_bytes((new / name).read_bytes())
        serving.call(serving.service.reload)
        serving.greet(new)
        (peer / "ca.pem").write_bytes((new / "ca.pem").read_bytes())
        with pytest.raises(Denied, match="after receiving this host's certificate"):
            serving.greet(peer)


# -- what it says ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (messages.LENGTH.pack(messages.MAX_REQUEST + 1), "received a frame of 65537 bytes; 1 to 65536 are accepted"),
        (messages.LENGTH.pack(0), "received a frame of 0 bytes"),
        (messages.LENGTH.pack(3) + b"\xc1\xc1\xc1", "received a message that cannot be decoded"),
        (messages.frame(Going()), "received a message that cannot be decoded"),
        (messages.frame(Open("m", -1)), "received a message that cannot be decoded"),
    ],
    ids=["too long", "empty", "no msgpack", "an answer", "out of bounds"],
)
def test_a_frame_that_is_none_ends_the_connection(
    serving: Serving, data: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving.connect() as connection:
        connection._socket.sendall(data)
        over(connection)
    eventually(lambda: "is cut off: " in caplog.text, "the line in the log")
    assert why in caplog.text


def test_a_connection_that_the_peer_does_not_end_counts_until_it_is_closed(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "HANG_UP", 0.1)
    with serving.connect() as connection:
        eventually(lambda: serving.service.connections == 1, "the connection to be the only one")
        peer = connection._socket
        began = time.monotonic()
        peer.sendall(messages.LENGTH.pack(0))
        with socket.socket(fileno=peer.detach()) as raw:  # says nothing more: TLS does not answer the end
            eventually(lambda: not serving.service.connections, "the connection to count no more")
            assert time.monotonic() - began < 20.0, "asyncio ended it, which waits for 30 s"
            raw.setblocking(False)
            while raw.recv(1000):  # raises BlockingIOError as long as it is open
                pass


@pytest.mark.parametrize(
    "first", [List(), Open("m"), WatchPool("m"), Progress(0)], ids=lambda each: type(each).__name__
)
def test_a_connection_begins_with_a_hello(
    serving: Serving, first: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(messages, "PeerHello", lambda _: first)
    with pytest.raises(Denied):
        serving.greet()
    eventually(lambda: "is cut off: it did not begin with a hello" in caplog.text, "the line in the log")


@pytest.mark.slow
def test_what_comes_at_the_wrong_time_is_refused_and_the_connection_goes_on(
    serving: Serving, directory: Path, name: str
) -> None:
    publish(directory, name)
    with serving.connect() as connection:
        with pytest.raises(Invalid, match="a connection has one hello"):
            connection.ask(PeerHello(1), PeerWelcome)
        with pytest.raises(Invalid, match="nothing was opened on this connection"):
            connection.ask(Progress(0), Going)
        connection.ask(Open(name), ExportedVersion)
        with pytest.raises(Invalid, match="a connection opens one version"):
            connection.ask(Open(name), ExportedVersion)
        assert connection.ask(Progress(1), Going) == Going()
        assert connection.ask(WatchPool(name), CurrentVersion) == CurrentVersion(1)
        connection.say(WatchPool(name))
        with pytest.raises(Invalid, match="a connection watches one pool"):
            hear_on(connection)
    assert serving.meter.refusals == ["invalid"] * 4


def test_a_newer_peer_is_told_what_this_side_speaks(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    ask = PeerConnection.ask
    monkeypatch.setattr(PeerConnection, "ask", lambda *arguments: told.append(ask(*arguments)) or told[-1])
    monkeypatch.setattr(messages, "PeerHello", lambda _: PeerHello(7))
    serving.greet()
    assert [(each.version, each.user) for each in told] == [(messages.VERSION, "root")]


# -- what it offers --------------------------------------------------------------------------------


@pytest.mark.slow
def test_only_what_a_user_may_read_is_offered_and_the_rest_is_as_if_it_was_not_there(
    directory: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "WATCH_BEAT", 0.1)
    publish(directory, "public", mode=0o644)
    publish(directory, "private", mode=0o600)
    publish(directory, "hidden", mode=0o644)
    publish(directory, "old", mode=0o644)
    with Broker(directory) as broker, broker.create("draft", LAYOUT, mode=0o644), broker.attach("old", version=1):
        publish(directory, "old", mode=0o644)
        broker.retire("old", 1)
        with (
            exporting(directory, certificates.host, pools=("p*", "old", "draft")) as serving,
            serving.connect(certificates.of(nobody())) as connection,
            serving.connect() as root,
        ):
            offers = connection.ask(List(), Offers).offers
            assert [(each.name, each.version, each.current) for each in offers] == [
                ("old", 2, True),
                ("public", 1, True),
            ]
            assert {each.name for each in root.ask(List(), Offers).offers} == {"old", "public", "private"}
            assert connection.ask(Open("public"), ExportedVersion).name == "public"

            def refused(name: str, version: int = 0) -> str:
                with serving.connect(certificates.of(nobody())) as other, pytest.raises(NotFound) as caught:
                    other.ask(Open(name, version), ExportedVersion)
                return caught.value.message.replace(name, "NAME").replace(f"@{version}", "@VERSION")

            absent = "the exporting host has no {} that its user nobody may fetch"
            assert {refused(name) for name in ("private", "hidden", "draft", "none")} == {
                absent.format("current version of NAME")
            }
            assert {refused("private", 1), refused("none", 1), refused("old", 1), refused("old", 9)} == {
                absent.format("NAME@VERSION")
            }
            for name in ("private", "hidden", "draft", "none"):
                with serving.connect(certificates.of(nobody())) as other:
                    assert other.ask(WatchPool(name), CurrentVersion) == CurrentVersion(0)
                    assert other.hear(CurrentVersion) == CurrentVersion(0)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_a_pool_that_the_exporter_itself_may_not_read_is_as_if_it_was_not_there(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "WATCH_BEAT", 0.1)
    monkeypatch.setenv("CUBROKER_SOCKETS_MODE", "0o666")
    with serving_broker() as process:
        directory = process.directory
        directory.parent.chmod(0o755)
        publish(directory, "private", mode=0o600)
        publish(directory, "public", mode=0o644)
        broker = _as_nobody(directory)
        with (
            exporting(directory, certificates.host, connect=lambda _: broker) as serving,
            serving.connect() as connection,
        ):
            assert [each.name for each in connection.ask(List(), Offers).offers] == ["public"]
            with pytest.raises(NotFound, match="has no current version of private that its user root may fetch"):
                connection.ask(Open("private"), ExportedVersion)
            assert connection.ask(WatchPool("private"), CurrentVersion) == CurrentVersion(0)
            assert connection.hear(CurrentVersion) == CurrentVersion(0)


def _as_nobody(directory: Path) -> Broker:
    """Open a session of another user's: the broker asks the system whose connection it is."""
    user = pwd.getpwnam(nobody())
    os.setegid(user.pw_gid)
    os.seteuid(user.pw_uid)
    try:
        return Broker(directory)
    finally:
        os.seteuid(0)
        os.setegid(0)


def test_what_is_opened_is_leased_by_a_process_until_the_connection_ends(
    serving: Serving, directory: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    publish(directory, name, digest=True)
    with serving.connect() as connection:
        opened = connection.ask(Open(name), ExportedVersion)
        assert (opened.name, opened.version, opened.metadata) == (name, 1, b"metadata")
        assert Layout.decode(opened.layout) == LAYOUT
        assert tuple(place.nbytes for place in opened.places) == LAYOUT.allocations
        with Broker(directory) as broker:
            sealed = broker.digests(name, 1).digests
        assert sealed is not None
        assert tuple(place.digest for place in opened.places) == sealed.replicas[0]
        assert (leases(directory), serving.meter.service.readers) == (1, 1)
        assert connection.ask(List(), Offers).readers == 1
        connection.ask(Progress(1000), Going)
        connection.ask(Progress(LAYOUT.nbytes), Going)
    eventually(lambda: serving.meter.service.connections == 0, "the connection to end")
    eventually(lambda: not leases(directory), "the lease to end")
    assert serving.meter.service.readers == 0
    assert (serving.meter.nbytes, serving.meter.whole) == ({name: LAYOUT.nbytes}, [name])
    assert f" reads {name}@1, {LAYOUT.nbytes} bytes" in caplog.text
    assert f"has read {name}@1: {LAYOUT.nbytes} bytes in " in caplog.text


@pytest.mark.slow
def test_shards_come_in_the_order_of_the_allocations(serving: Serving, directory: Path, name: str) -> None:
    with Broker(directory) as broker, broker.create(name, LAYOUT, devices=[0, 1], plan={"a": 1, "b": 0}) as draft:
        draft.seal()
    with serving.connect() as connection:
        opened = connection.ask(Open(name), ExportedVersion)
    assert tuple(place.nbytes for place in opened.places) == LAYOUT.allocations


@pytest.mark.slow
def test_an_engine_that_this_host_has_not_is_refused_and_takes_no_place(
    directory: Path, certificates: Certificates, name: str
) -> None:
    publish(directory, name)
    with exporting(directory, certificates.host, readers=1) as serving, serving.connect() as connection:
        for _ in range(2):
            with pytest.raises(Unsupported, match="one side of the transfer has 'pigeons', and the other one 'nixl'"):
                connection.ask(Open(name, engine="pigeons"), ExportedVersion)
        assert serving.meter.service.readers == 0
        connection.ask(Open(name), ExportedVersion)


# -- limits ----------------------------------------------------------------------------------------


def test_as_many_connections_as_may(
    directory: Path, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    with exporting(directory, certificates.host, connections=1) as serving:
        with serving.connect():
            with pytest.raises(Unavailable):
                serving.greet()
            assert "is closed: 1 others are open already" in caplog.text
        eventually(lambda: serving.meter.service.connections == 0, "the connection to end")
        serving.greet()


@pytest.mark.slow
def test_as_many_readers_as_may(directory: Path, certificates: Certificates, name: str) -> None:
    publish(directory, name)
    with exporting(directory, certificates.host, readers=1) as serving, serving.connect() as second:
        with serving.connect() as first:
            first.ask(Open(name), ExportedVersion)
            with pytest.raises(OverQuota, match="1 peers read from this host, which is its limit"):
                second.ask(Open(name), ExportedVersion)
            assert second.ask(List(), Offers).limit == 1
        eventually(lambda: serving.meter.service.readers == 0, "the reader to end")
        second.ask(Open(name), ExportedVersion)


@pytest.mark.slow
def test_no_peer_takes_the_last_places_of_readers_from_others(
    directory: Path, certificates: Certificates, name: str
) -> None:
    publish(directory, name, mode=0o644)
    with exporting(directory, certificates.host, readers=4) as serving, ExitStack() as undo:
        first, again, third = (undo.enter_context(serving.connect()) for _ in range(3))
        first.ask(Open(name), ExportedVersion, 60.0)
        assert again.ask(Open(name), ExportedVersion, 60.0).slot == 1
        with pytest.raises(
            OverQuota,
            match="user root at this address reads 2 versions already, and the 2 free places are kept for others",
        ):
            third.ask(Open(name), ExportedVersion)
        other = undo.enter_context(serving.connect(certificates.of(nobody())))
        opened = other.ask(Open(name), ExportedVersion, 60.0)
        assert (opened.slot, opened.slots, opened.runs) == (2, 4, None)
        first.close()
        eventually(lambda: serving.meter.service.readers == 2, "its place to be free")
        assert third.ask(Open(name), ExportedVersion, 60.0).slot == 0


@pytest.mark.slow
def test_the_digests_of_a_version_that_was_sealed_without_are_computed_once(
    serving: Serving, directory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(directory, name)
    asked: list[Serve] = []
    ask = SourceProcess.ask

    async def recorded(self: SourceProcess, request: Serve) -> Any:
        asked.append(request)
        return await ask(self, request)

    monkeypatch.setattr(SourceProcess, "ask", recorded)
    found = []
    for known in (False, True):
        with serving.connect() as connection:
            (offer,) = connection.ask(List(), Offers).offers
            assert (offer.content is not None) == known
            found.append(connection.ask(Open(name), ExportedVersion, 60.0))
            assert bool(asked.pop().digests) == known
    assert found[0].places[0].digest == found[1].places[0].digest
    with Broker(directory) as broker:
        broker.retire(name)
    eventually(lambda: not leases(directory), "the leases to end")
    with serving.connect() as connection:
        assert connection.ask(List(), Offers).offers == ()
    assert serving.service._digests == {}


@pytest.mark.slow
def test_two_peers_that_open_at_once_get_processes_of_their_own(serving: Serving, directory: Path, name: str) -> None:
    publish(directory, name)
    with serving.connect() as first, serving.connect() as second, ThreadPoolExecutor() as threads:
        opened = [threads.submit(each.ask, Open(name), ExportedVersion, 60.0) for each in (first, second)]
        assert [each.result().version for each in opened] == [1, 1]
        assert leases(directory) == 2


def test_a_peer_that_says_nothing_before_it_opens_is_cut_off(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "GREETING", 0.2)
    with serving.connect() as connection:
        over(connection)
    with socket.create_connection(serving.address[:2]) as peer:
        assert _all(peer) == b""


@pytest.mark.slow
def test_a_peer_that_says_nothing_is_cut_off_and_its_lease_ends(
    directory: Path, certificates: Certificates, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    publish(directory, name)
    with exporting(directory, certificates.host, silence=0.2) as serving, serving.connect() as connection:
        connection.ask(Open(name), ExportedVersion)
        over(connection)
        eventually(lambda: not leases(directory), "the lease to end")
        assert "is gone: it sends nothing" in caplog.text
        assert f"has left {name}@1: 0 bytes" in caplog.text
        assert (serving.meter.service.readers, serving.meter.whole) == (0, [])


@pytest.mark.slow
def test_a_peer_that_comes_no_further_is_cut_off_whatever_it_says(
    directory: Path, certificates: Certificates, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    publish(directory, name)
    with exporting(directory, certificates.host, stall=0.2) as serving, serving.connect() as connection:
        connection.ask(Open(name), ExportedVersion)
        with pytest.raises(Unavailable, match=r"it has read nothing for 0\.2 s"):
            go_on(connection, 5)
        over(connection)
        eventually(lambda: not leases(directory), "the lease to end")
        assert "is cut off: it has read nothing for 0.2 s" in caplog.text


def boast(connection: PeerConnection) -> None:
    """Say again and again that this side has read more, of a version that it has read whole long since."""
    for nbytes in range(LAYOUT.nbytes, 50 * LAYOUT.nbytes):
        connection.ask(Progress(nbytes if nbytes % 2 else LAYOUT.nbytes), Going)


def crawl(connection: PeerConnection) -> None:
    """Say again and again that this side has read one byte more."""
    for nbytes in range(LAYOUT.nbytes):
        connection.ask(Progress(nbytes), Going)
        time.sleep(0.02)


@pytest.mark.slow
def test_a_peer_that_says_it_has_read_more_than_there_is_comes_no_further_by_that(
    directory: Path, certificates: Certificates, name: str
) -> None:
    publish(directory, name)
    with exporting(directory, certificates.host, stall=0.2) as serving, serving.connect() as connection:
        connection.ask(Open(name), ExportedVersion)
        with pytest.raises(Unavailable, match=r"it has read nothing for 0\.2 s"):
            boast(connection)
        over(connection)


def test_a_peer_that_says_what_cannot_be_is_cut_off(serving: Serving, directory: Path, name: str) -> None:
    publish(directory, name)
    with serving.connect() as connection:
        connection.ask(Open(name), ExportedVersion)
        with pytest.raises(Unavailable, match=f"of a version that has {LAYOUT.nbytes}"):
            connection.ask(Progress(1 << 60), Going)
        over(connection)
    eventually(lambda: serving.meter.service.connections == 0, "the connection to end")
    assert serving.meter.nbytes == {}


@pytest.mark.slow
def test_a_peer_that_reads_too_slowly_is_cut_off_though_it_comes_further(
    directory: Path, certificates: Certificates, name: str
) -> None:
    """It says one byte more each time: its lease would last for ever."""
    publish(directory, name)
    with exporting(directory, certificates.host, stall=1.0, rate=1000.0) as serving, serving.connect() as connection:
        connection.ask(Open(name), ExportedVersion)
        with pytest.raises(Unavailable, match=r"it reads more slowly than .*; it may open the version again"):
            crawl(connection)
        over(connection)
        eventually(lambda: not leases(directory), "the lease to end")


@pytest.mark.slow
def test_a_peer_that_takes_no_answers_is_cut_off_and_its_lease_ends(
    directory: Path, certificates: Certificates, name: str
) -> None:
    publish(directory, name)
    for number in range(8):  # so that there is much to say
        publish(directory, f"{name}-{number}-{'x' * 230}")
    with exporting(directory, certificates.host, silence=0.3) as serving:
        _narrow(serving.address.port)
        with serving.connect() as connection:
            connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.ask(Open(name), ExportedVersion)
            with pytest.raises(HungUp):
                _ask_only(connection)
            eventually(lambda: not leases(directory), "the lease to end")


def _ask_only(connection: PeerConnection) -> None:
    while True:
        connection.say(List())


def _narrow(port: int) -> None:
    """Have the socket that listens at a port, one of this process, accept such as buffer little."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue
        with found:
            if found.family == socket.AF_INET and found.getsockname()[1:2] == (port,):
                found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


# -- processes -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_that_dies_while_a_peer_reads_ends_its_connection(
    directory: Path, certificates: Certificates, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    publish(directory, name)
    with exporting(directory, certificates.host, readers=1) as serving:
        with serving.connect() as connection:
            connection.ask(Open(name), ExportedVersion)
            with Broker(directory) as broker:
                (reader,) = [client.pid for client in broker.clients() if client.leases]
            os.kill(reader, signal.SIGKILL)
            with pytest.raises(Unavailable, match="the process that it was read from has ended"):
                go_on(connection)
            over(connection)
        eventually(lambda: serving.meter.service.readers == 0, "its end")
        assert not leases(directory)
        with serving.connect() as connection:
            connection.ask(Open(name), ExportedVersion)


def killed(spare: int, _: pytest.MonkeyPatch) -> None:
    """Kill a process in reserve."""
    os.kill(spare, signal.SIGKILL)
    eventually(lambda: spare not in sources(), "its end")


def outdated(_: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have another release on disk than when a process in reserve was started."""
    monkeypatch.setattr(source_process, "code_on_disk", lambda: "another release")


@pytest.mark.slow
@pytest.mark.parametrize(("spoil", "why"), [(killed, ""), (outdated, "cubroker was upgraded")])
def test_a_process_in_reserve_that_is_of_no_use_is_replaced(
    directory: Path,
    certificates: Certificates,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    spoil: Callable[[int, pytest.MonkeyPatch], None],
    why: str,
) -> None:
    publish(directory, name)
    before = {*sources()}
    with exporting(directory, certificates.host, readers=1) as serving, serving.connect() as connection:
        eventually(lambda: {*sources()} - before, "the process")
        (spare,) = {*sources()} - before
        spoil(spare, monkeypatch)
        assert connection.ask(Open(name), ExportedVersion, 60.0).version == 1
        assert spare not in sources()
    assert f"in advance is replaced: {why}" in caplog.text


@pytest.mark.slow
def test_a_process_in_reserve_that_did_not_start_is_replaced(
    directory: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    publish(directory, name)
    (tmp_path / "fails").write_text("x")
    monkeypatch.setenv("FAILS", str(tmp_path / "fails"))
    with exporting(directory, certificates.host) as serving, serving.connect() as connection:
        eventually(lambda: not (tmp_path / "fails").read_text(), "the first to fail")
        assert connection.ask(Open(name), ExportedVersion, 60.0).version == 1


@pytest.mark.slow
def test_processes_that_do_not_start_are_an_error_and_take_no_place(
    directory: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    publish(directory, name)
    fails = tmp_path / "fails"
    fails.write_text("x" * 100)
    monkeypatch.setenv("FAILS", str(fails))
    with exporting(directory, certificates.host, readers=1) as serving, serving.connect() as connection:
        for _ in range(2):
            with pytest.raises(Unavailable, match="the process of the transfer ended with status 3"):
                connection.ask(Open(name), ExportedVersion, 60.0)
        assert serving.meter.service.readers == 0
        fails.write_text("")
        assert connection.ask(Open(name), ExportedVersion, 60.0).version == 1


@pytest.mark.slow
def test_processes_that_the_system_does_not_start_are_an_error_until_it_does(
    directory: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    publish(directory, name)
    with ExitStack() as undo:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(tmp_path / "none"))
            serving = undo.enter_context(exporting(directory, certificates.host, readers=1))
            connection = undo.enter_context(serving.connect())
            for _ in range(2):
                with pytest.raises(Unavailable, match="a process for the transfer cannot be started: No such file"):
                    connection.ask(Open(name), ExportedVersion, 60.0)
        assert connection.ask(Open(name), ExportedVersion, 60.0).version == 1


# -- news ------------------------------------------------------------------------------------------


def test_a_watch_tells_the_current_version_now_and_after_every_change(
    serving: Serving, directory: Path, name: str
) -> None:
    with serving.connect() as connection:
        assert connection.ask(WatchPool(name), CurrentVersion) == CurrentVersion(0)
        publish(directory, name)
        told(connection, 1)
        publish(directory, name)
        told(connection, 2)
        with Broker(directory) as broker:
            broker.retire(name, 2)
        told(connection, 0)


def test_a_watch_repeats_the_current_version(
    serving: Serving, directory: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(messages, "WATCH_BEAT", 0.05)
    publish(directory, name)
    with serving.connect() as connection:
        assert connection.ask(WatchPool(name), CurrentVersion) == CurrentVersion(1)
        assert [connection.hear(CurrentVersion) for _ in range(3)] == [CurrentVersion(1)] * 3


def test_a_watch_goes_on_when_a_version_cannot_be_opened(
    directory: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with exporting(directory, certificates.host) as serving, serving.connect() as connection:
        assert connection.ask(WatchPool(name), CurrentVersion) == CurrentVersion(0)
        connection.say(Open("none"))
        with pytest.raises(NotFound):
            hear_on(connection)
        publish(directory, name)
        told(connection, 1)
        connection.say(Open(name, engine="pigeons"))
        with pytest.raises(Unsupported):
            hear_on(connection)
        publish(directory, name)
        told(connection, 2)


# -- the broker ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_broker_that_comes_back_is_found_again(
    broker: BrokerProcess, certificates: Certificates, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    with exporting(broker.directory, certificates.host) as serving, serving.connect() as connection:
        with serving.connect() as watching:
            assert watching.ask(WatchPool(name), CurrentVersion) == CurrentVersion(0)
            broker.kill()
            over(watching)
        assert f"cannot watch {name} any longer" in caplog.text
        with pytest.raises(Unavailable):
            connection.ask(List(), Offers)
        with pytest.raises(Unavailable):
            connection.ask(Open(name), ExportedVersion)
        broker.start()
        publish(broker.directory, name)
        eventually(lambda: connection.ask(List(), Offers).offers, "the pools of the next one")
        assert connection.ask(Open(name), ExportedVersion).version == 1
        with serving.connect() as watching:
            assert watching.ask(WatchPool(name), CurrentVersion) == CurrentVersion(1)


@pytest.mark.slow
def test_an_exporter_ends_in_order_while_its_broker_hangs_and_a_peer_has_gone(
    broker: BrokerProcess, certificates: Certificates
) -> None:
    try:
        with exporting(broker.directory, certificates.host) as serving:
            os.kill(broker.pid, signal.SIGSTOP)
            with serving.connect() as connection:
                connection.say(List())
            serving.greet()  # by then the exporter has read what came before
    finally:
        os.kill(broker.pid, signal.SIGCONT)


def test_an_exporter_that_ends_waits_for_no_peer(
    directory: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "HANG_UP", 20.0)
    service = exporter.Exporter(directory, certificates.host, exporter.Rules(), Recorder(), Broker)

    async def serve(undo: ExitStack) -> float:
        async with service.serving(HOST, 0) as address:
            connect = partial(PeerConnection, PeerAddress(*address), certificates.host)
            undo.enter_context(await asyncio.to_thread(connect))  # reads nothing, so does not answer the end
        return time.monotonic()

    with ExitStack() as undo:
        began = asyncio.run(serve(undo))
        assert time.monotonic() - began < exporter.HANG_UP


def test_without_a_broker_or_an_address_it_does_not_serve(
    directory: Path, certificates: Certificates, tmp_path: Path, name: str
) -> None:
    with pytest.raises(Unavailable), exporting(tmp_path / "none", certificates.host):
        pass
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        with pytest.raises(Unavailable, match=r"listening at 127\.0\.0\.1 port \d+: .*name another --listen"):
            _serve_at(directory, certificates.host, taken.getsockname()[1])


def test_an_error_without_a_number_says_why_it_does_not_listen(
    directory: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*_: object, **__: object) -> None:
        raise OSError("could not bind on any address")  # as asyncio raises it: without `errno` and `strerror`

    monkeypatch.setattr("asyncio.start_server", failing)
    with pytest.raises(Unavailable, match=r"port 7411: could not bind on any address; name another --listen"):
        _serve_at(directory, certificates.host, 7411)


def _serve_at(directory: Path, folder: Path, port: int) -> None:
    import asyncio

    async def serve() -> None:
        async with exporter.Exporter(directory, folder).serving(HOST, port):
            pass

    asyncio.run(serve())


def test_it_needs_its_certificate(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"there is no .*ca\.pem"):
        exporter.Exporter(directory, tmp_path)
    assert find_folder(tmp_path) == tmp_path
