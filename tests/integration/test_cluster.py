"""Pools from host to host: brokers in network namespaces that slow links join, and what goes wrong there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from cubroker.client import Broker
from cubroker.integrations.cluster import certificates as making
from cubroker.integrations.cluster.striping import piece_size
from cubroker.protocol import Layout
from tests import sampling
from tests.brokers import eventually
from tests.cluster import Host, need_engine, network
from tests.namespaces import children

need_engine()
pytestmark = pytest.mark.slow

MIB = 1 << 20
SIZE = 24 * MIB
"""Bytes of a pool: at 100 Mbit/s about two seconds."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Four hosts, whose links carry 100 Mbit/s."""
    with network(4, tmp_path_factory.mktemp("cluster"), rate="100mbit", devices="host:2@128MiB") as found:
        yield found


@pytest.fixture(autouse=True)
def as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """At the end no host has a lease, and when its pools are retired no memory."""
    if request.node.name not in TODAY:
        pytest.skip("not in today's sample; `make cluster` tries all")
    yield
    if "hosts" not in request.fixturenames:
        return
    for host in request.getfixturevalue("hosts"):
        with Broker(host.broker.directory) as broker:
            eventually(lambda broker=broker: not any(each.leases for each in broker.pools()), "leases to end")
            for pool in broker.pools():
                broker.retire(pool.name, pool.version)
            eventually(lambda broker=broker: not any(each.allocated for each in broker.devices()), "memory to be free")


def content(seed: int) -> bytes:
    return bytes([seed]) * 255 + bytes(range(256)) * (SIZE // 256 - 1) + b"\0"


def publish(
    host: Host, name: str = "m", seed: int = 1, *, data: bytes = b"", digest: Any = False, **options: Any
) -> int:
    """Publish a version with two allocations."""
    layout = Layout.pack([("a", "U8", (SIZE // 2,)), ("b", "U8", (SIZE // 2,))], slab=SIZE // 2)
    data = data or content(seed)
    with Broker(host.broker.directory) as broker, broker.create(name, layout, **options) as draft:
        draft["a"].copy_from_bytes(data[: SIZE // 2])
        draft["b"].copy_from_bytes(data[SIZE // 2 :])
        return draft.seal(digest=digest)


def held(host: Host, name: str = "m") -> bytes:
    with Broker(host.broker.directory) as broker, broker.attach(name, device=0) as pool:
        pool.check()
        return pool["a"].tobytes() + pool["b"].tobytes()


def pools(host: Host) -> list[tuple[str, int, str]]:
    with Broker(host.broker.directory) as broker:
        return [(pool.name, pool.version, pool.state) for pool in broker.pools()]


def leases(host: Host) -> int:
    with Broker(host.broker.directory) as broker:
        return sum(pool.leases for pool in broker.pools())


def ended(process: subprocess.Popen[str]) -> Any:
    """Return what a fetch said in the end, or its status and the text of its error."""
    out, err = process.communicate(timeout=120)
    return json.loads(out) if process.returncode == 0 else (process.returncode, err)


def reading(*exporters: Any) -> None:
    """Return when all of the exporters are read from."""
    for exporter in exporters:
        eventually(lambda exporter=exporter: " reads " in exporter.log(), "a reader")


# -- what goes right -------------------------------------------------------------------------------


def test_a_version_goes_from_host_to_host_and_each_can_export_it(hosts: list[Host]) -> None:
    one, two, three, _ = hosts
    publish(one)
    with one.exporting(), two.exporting():
        first = two.fetch("m", "--from", one.address)
        assert (first["fetched"], first["tensors"]) == (True, 2)
        second = three.fetch(f"m@{first['version']}", "--from", two.address, "--device", "0,1")
        assert second["sources"] == [f"{two.address}:7411"]
    assert held(two) == held(three) == content(1)


def test_two_sources_bring_it_together(hosts: list[Host]) -> None:
    one, two, three, _ = hosts
    publish(one)
    publish(two, seed=9)
    publish(two)
    with one.exporting() as first, two.exporting() as second:
        done = three.fetch("m", "--from", f"{one.address},{two.address}")
        assert sorted(done["sources"]) == [f"{one.address}:7411", f"{two.address}:7411"]
        for exporter in (first, second):  # both have brought a good part of it
            eventually(lambda exporter=exporter: "bytes in" in exporter.log(), "the end of a reader")
            brought = int(exporter.log().rpartition(" bytes in")[0].rpartition(" ")[2])
            assert SIZE // 10 < brought < SIZE
    assert held(three) == content(1)


def test_of_many_who_ask_one_fetches_and_the_next_takes_over_if_it_dies(hosts: list[Host]) -> None:
    one, two, *_ = hosts
    publish(one)
    with one.exporting() as exporter:
        processes = [two.fetching("m", "--from", one.address, "--if-absent") for _ in range(3)]
        reading(exporter)
        with Broker(two.broker.directory) as broker:

            def writers() -> list[int]:
                return [client.pid for client in broker.clients() if any(each.pool == "m" for each in client.leases)]

            eventually(writers, "a draft")
            (writer,) = writers()
        parent = int(Path(f"/proc/{writer}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
        outcomes = [ended(process) for process in processes]
    lost = [outcome for process, outcome in zip(processes, outcomes, strict=True) if process.pid == parent]
    assert lost[0][0] == -signal.SIGKILL
    others = [outcome for outcome in outcomes if outcome is not lost[0]]
    assert sorted(outcome["fetched"] for outcome in others) == [False, True]
    assert [state for _, _, state in pools(two)] == ["current"]
    assert held(two) == content(1)


def test_every_version_comes_over_as_it_is_published(hosts: list[Host]) -> None:
    one, two, *_ = hosts
    publish(one)
    with one.exporting(), two.fetching("m", "--follow", "--from", one.address) as follower:
        try:
            with Broker(two.broker.directory) as broker, broker.watch("m") as watch:
                first = next(version for version in watch if version)
                publish(one, seed=2)
                assert next(watch) == first + 1
            assert held(two) == content(2)
        finally:
            follower.send_signal(signal.SIGINT)


# -- parts -----------------------------------------------------------------------------------------

SLOW = "20mbit"
"""What the origin's link carries here: hosts that pass on what they have are faster by far."""

EVERYTHING = (1 << SIZE // piece_size(SIZE)) - 1
"""All pieces of a version, as bits."""

PARTS = """
import json, sys, time
from pathlib import Path
from cubroker.integrations.cluster import messages
from cubroker.integrations.cluster.connection import PeerConnection, parse
from cubroker.integrations.cluster.striping import piece_size

folder, size, addresses = Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
connections, have, count = {}, {}, size // piece_size(size)
everything = (1 << count) - 1

def learn(address, runs):
    found = messages.from_runs(runs, count)
    have[address] = everything if found is None else found
    print(json.dumps([have.get(each, 0) for each in addresses]), flush=True)

while any(have.get(address) != everything for address in addresses):
    for address in addresses - connections.keys():
        connection = PeerConnection(parse(address), folder)
        if offers := connection.ask(messages.List(), messages.Offers).offers:
            opened = connection.ask(messages.Open("m", offers[0].version), messages.ExportedVersion, 60.0)
            connections[address] = connection
            learn(address, opened.runs)
        else:
            connection.close()
    for address, connection in connections.items():
        while connection.pending():
            learn(address, connection.hear(messages.Available).runs)
    time.sleep(0.01)
"""
"""Prints, of hosts that fetch, which pieces each has, as bits, at every change until they have all."""


@contextmanager
def parts(watcher: Host, *hosts: Host) -> Iterator[Iterator[list[int]]]:
    """Yield the pieces that each of the hosts has, as bits, at every change, as one of them is told."""
    addresses = [host.address for host in hosts]
    with watcher.running(PARTS, watcher.certificates, SIZE, *addresses) as process:
        assert process.stdout is not None
        yield map(json.loads, process.stdout)
        process.kill()


PARTIAL = """
import sys
from cubroker.client import Broker
from cubroker.integrations.cluster.announcements import DraftAnnouncement
from cubroker.integrations.cluster.striping import piece_size
from cubroker.protocol import Layout

directory, size, mode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3], 8)
sums = [bytes.fromhex(each) for each in sys.argv[4:]]
layout = Layout.pack([("a", "U8", (size // 2,)), ("b", "U8", (size // 2,))], slab=size // 2)
with Broker(directory) as broker, broker.create("m", layout, mode=mode) as draft:
    everything = (1 << size // piece_size(size)) - 1
    announcement = DraftAnnouncement(broker, draft, sums, lambda: everything, mode)
    print(flush=True)
    sys.stdin.read()
    announcement.close()
"""
"""Says that it has all of a version which it is still fetching, and has nothing but zeros."""


def from_each_other(hosts: list[Host], *arguments: str) -> list[subprocess.Popen[str]]:
    """Start a fetch on all hosts but the first, from all of them, themselves included."""
    peers = ",".join(host.address for host in hosts)
    return [host.fetching("m", "--from", peers, "--wait", "60", *arguments) for host in hosts[1:]]


def test_hosts_that_fetch_at_once_pass_on_what_they_have(hosts: list[Host]) -> None:
    """The origin ends when each has something; the next one brings what none has."""
    one, *others = hosts
    publish(one, digest=True)
    with ExitStack() as undo:
        exporters = [undo.enter_context(host.exporting()) for host in others]
        with one.slowed(SLOW), one.exporting() as origin:
            processes = from_each_other(hosts, "--patience", "60")
            told = undo.enter_context(parts(one, *others))
            assert next(have for have in told if all(have)) != [EVERYTHING] * 3
            origin.kill()
        assert next(have for have in told if len({*have}) == 1)
        undo.enter_context(one.exporting())
        outcomes = [ended(process) for process in processes]
        assert all("is offered to other hosts while it is being fetched" in exporter.log() for exporter in exporters)
    assert any(outcome["from_parts"] for outcome in outcomes)
    for host, outcome in zip(others, outcomes, strict=True):
        assert f"{host.address}:7411" not in outcome["sources"]
        assert held(host) == content(1)


def test_hosts_that_together_have_all_need_the_origin_no_more(hosts: list[Host]) -> None:
    one, two, three, _ = hosts
    publish(one, digest=True)
    with one.slowed(SLOW), one.exporting() as origin, two.exporting(), three.exporting():
        processes = from_each_other([one, two, three])
        with parts(two, two, three) as told:
            assert next(have for have in told if have[0] | have[1] == EVERYTHING)
            origin.kill()
        outcomes = [ended(process) for process in processes]
    assert any(outcome["from_parts"] for outcome in outcomes)
    assert held(two) == held(three) == content(1)


def test_a_host_that_passes_on_what_it_has_and_is_killed_is_replaced(hosts: list[Host]) -> None:
    """Its exporter first, then the fetch of another host."""
    one, two, three, four = hosts
    publish(one, digest=True)
    with one.slowed("10mbit"), one.exporting(), two.exporting() as second, three.exporting() as third:
        first, other = from_each_other([one, two, three])
        last = four.fetching("m", "--from", f"{one.address},{two.address},{three.address}", "--wait", "60")
        reading(second, third)
        second.kill()
        other.kill()
        other.communicate()
        outcomes = ended(first), ended(last)
        assert all(isinstance(outcome, dict) and outcome["fetched"] for outcome in outcomes), (
            f"{outcomes} {third.log()}"
        )
        assert "has ended without publishing it" in third.log(), third.log()
    assert held(two) == held(four) == content(1)
    assert pools(three) == []


@pytest.fixture
def zeros(hosts: list[Host]) -> Iterator[Callable[[int], None]]:
    """Has the second host pass on zeros in place of what the first one has published, with this mode."""
    one, two, *_ = hosts
    publish(one, digest=True)
    with Broker(one.broker.directory) as broker:
        sums = broker.digests("m", broker.describe("m")[0].version).digests
    assert sums is not None
    with ExitStack() as undo:

        def begin(mode: int) -> None:
            process = two.running(PARTIAL, SIZE, f"{mode:o}", *(each.hex() for each in sums.replicas[0]))
            undo.enter_context(process)
            assert process.stdout
            assert process.stdin
            undo.callback(process.stdin.close)
            assert process.stdout.readline() == "\n"

        yield begin


def test_what_a_host_passes_on_wrong_is_read_again_from_one_that_has_published_it(
    hosts: list[Host], zeros: Callable[[int], None]
) -> None:
    one, two, three, _ = hosts
    with one.slowed(SLOW), one.exporting(), two.exporting() as second:
        zeros(0o644)
        eventually(lambda: "is offered to other hosts while it is being fetched" in second.log(), "the part")
        status, why = three.fetch("m", "--from", two.address, "--patience", "2")
        assert (status, "arrived with a wrong digest" in why) == (1, True), why
        assert pools(three) == []
        done = three.fetch("m", "--from", f"{one.address},{two.address}")
        assert (done["fetched"], done["from_parts"]) == (True, 0)  # none of these bytes is published
        assert any(two.address in each for each in done["sources"])
    assert held(three) == content(1)


def test_a_part_is_offered_to_those_alone_who_may_read_it(
    hosts: list[Host], zeros: Callable[[int], None], tmp_path: Path
) -> None:
    one, two, three, _ = hosts
    authority = one.certificates.parent / "authority"
    nobody = making.issue(authority, tmp_path / "nobody", "nobody").parent
    own = three.certificates
    with two.exporting() as exporter, two.exporting("x*", listen=f"{two.address}:7400"):
        zeros(0o600)
        eventually(lambda: "is offered to other hosts while it is being fetched" in exporter.log(), "the part")
        assert [pool["there"] for pool in three.peers(two.address)[0]["pools"]] == [SIZE]
        assert three.peers(f"{two.address}:7400")[0]["pools"] == []
        try:
            three.certificates = nobody
            assert three.peers(two.address)[0]["pools"] == []
            status, why = three.fetch("m@1", "--from", two.address)
            assert (status, "it has no m that this host may fetch" in why) == (1, True)
        finally:
            three.certificates = own


def test_a_host_does_not_read_from_itself(hosts: list[Host]) -> None:
    one, two, *_ = hosts
    publish(one)
    publish(two, seed=2)
    with one.exporting(), two.exporting():
        done = two.fetch("m", "--from", f"{two.address},{one.address}")
        assert done["sources"] == [f"{one.address}:7411"]
        for how in ((), ("--follow",)):
            status, why = two.fetch("m", *how, "--from", two.address)
            assert (status, f"{two.address}:7411 is this host itself" in why) == (1, True)
        with two.fetching("m", "--follow", "--from", f"{two.address},{one.address}") as follower:
            with Broker(two.broker.directory) as broker, broker.watch("m") as watch:
                first = next(version for version in watch if version)
                publish(one, seed=3)
                assert next(watch) == first + 1
            follower.send_signal(signal.SIGINT)
    assert held(two) == content(3)


def test_each_host_of_a_name_counts_once_though_it_has_addresses_of_both_families(hosts: list[Host]) -> None:
    one, two, three, _ = hosts
    publish(one)
    publish(two)
    with ExitStack() as undo:
        exporters = [undo.enter_context(host.exporting(listen=host.name)) for host in hosts]
        answers = three.peers("cluster")
        assert sorted(sorted(answer["addresses"]) for answer in answers) == [
            [host.address, host.second] for host in hosts
        ]
        done = three.fetch("m", "--from", "cluster", "--wait", "60")
        assert (done["fetched"], len(done["sources"])) == (True, 2)
        for exporter in exporters[:2]:
            eventually(lambda exporter=exporter: "bytes in" in exporter.log(), "the end of a reader")
            assert exporter.log().count(" reads ") == 1
    assert held(three) == content(1)


# -- what goes wrong -------------------------------------------------------------------------------

SERVICE = """
import socket, ssl, sys
from pathlib import Path
from cubroker.integrations.cluster.connection import serving_context
context = serving_context(Path(sys.argv[2]))
family = socket.AF_INET6 if ":" in sys.argv[3] else socket.AF_INET
with socket.create_server((sys.argv[3], 7411), family=family) as server:
    print(flush=True)
    while True:
        plain, _ = server.accept()
        try:
            context.wrap_socket(plain, server_side=True).close()
        except OSError:
            plain.close()
"""
"""A TLS service that is no exporter of this cluster."""


def test_another_service_at_one_address_of_a_host_excludes_that_address_alone(
    hosts: list[Host], tmp_path: Path
) -> None:
    one, two, *_ = hosts
    publish(one)
    other = making.make_authority(tmp_path / "other").parent
    certificate = making.issue(other, tmp_path / "service", "root", [one.name]).parent
    with one.running(SERVICE, certificate, one.address) as service:
        try:
            assert service.stdout
            assert service.stdout.readline() == "\n"
            waiting = two.fetching("m", "--from", one.name, "--wait", "60")
            assert waiting.stderr
            while "is not trusted as an exporter of this cluster" not in waiting.stderr.readline():
                assert waiting.poll() is None
            with one.exporting(listen=f"[{one.second}]"):
                assert ended(waiting)["fetched"]
            with one.running(SERVICE, certificate, one.second) as second:
                try:
                    assert second.stdout
                    assert second.stdout.readline() == "\n"
                    status, why = two.fetch("m", "--from", one.name, "--wait", "60")
                    assert (status, f"{one.name}:7411 has no address left: " in why) == (1, True)
                finally:
                    second.kill()
        finally:
            service.kill()
    assert held(two) == content(1)


def test_a_source_that_is_killed_is_replaced_in_the_middle(hosts: list[Host]) -> None:
    one, two, three, _ = hosts
    publish(one)
    publish(two)
    with one.exporting() as first, two.exporting() as second:
        process = three.fetching("m", "--from", f"{one.address},{two.address}", "--width", "1")
        eventually(lambda: " reads " in first.log() + second.log(), "a reader")
        (first if " reads " in first.log() else second).kill()
        done = ended(process)
    assert done["fetched"]
    assert held(three) == content(1)


def test_without_another_source_a_killed_one_is_an_error_and_nothing_is_left(hosts: list[Host]) -> None:
    one, two, *_ = hosts
    publish(one)
    with one.exporting() as exporter:
        process = two.fetching("m", "--from", one.address, "--patience", "2")
        reading(exporter)
        assert leases(one) == 1
        exporter.kill()  # with which its processes end
        status, why = ended(process)
    assert status == 3
    assert f"no exporter answers at {one.address}:7411" in why or "is over" in why
    assert pools(two) == []


def test_a_link_that_is_cut_is_an_error_when_the_patience_ends(hosts: list[Host]) -> None:
    one, two, *_ = hosts
    publish(one)
    with one.exporting():
        process = two.fetching("m", "--from", one.address, "--patience", "2")
        before = two.received()
        eventually(lambda: two.received() - before > SIZE // 10, "the first bytes")
        one.cut()
        try:
            status, why = ended(process)
        finally:
            one.mend()
    assert status == 3
    assert "did not answer" in why or "delivered nothing" in why or "could not be read" in why
    assert pools(two) == []


def test_a_version_that_is_retired_meanwhile_comes_whole(hosts: list[Host]) -> None:
    one, two, *_ = hosts
    publish(one)
    with one.exporting() as exporter:
        process = two.fetching("m", "--from", one.address)
        reading(exporter)
        with Broker(one.broker.directory) as broker:
            broker.retire("m")
        assert ended(process)["fetched"]
        assert held(two) == content(1)
        status, why = two.fetch("m", "--from", one.address)
    assert (status, f"{one.address}:7411: it has no m" in why) == (1, True)


def test_bytes_that_are_not_what_was_sealed_are_found_and_come_from_another_host(hosts: list[Host]) -> None:
    """The memory of the first source is not what was sealed: a byte has changed on the way to it."""
    one, two, three, _ = hosts
    publish(two, digest=True)
    with Broker(two.broker.directory) as broker:
        right = broker.digests("m", broker.describe("m")[0].version).digests
    changed = content(1)[:12345] + b"!" + content(1)[12346:]
    publish(one, data=changed, digest=right)
    with one.exporting(), two.exporting():
        status, why = three.fetch("m", "--from", one.address)
        assert status == 1
        assert "allocation 0 of m arrived with a wrong digest, twice" in why
        assert pools(three) == []
        assert three.fetch("m", "--from", f"{one.address},{two.address}")["fetched"]
    assert held(three) == content(1)


def test_no_room_is_an_error_at_once_and_with_time_is_waited_for(hosts: list[Host]) -> None:
    one, two, *_ = hosts
    publish(one)
    with one.exporting(), Broker(two.broker.directory) as broker:
        with broker.create("full", [("x", "U8", (100 * MIB,))]):
            status, why = two.fetch("m", "--from", one.address)
            assert status == 1
            assert "retire what is not needed, or wait" in why
            waiting = two.fetching("m", "--from", one.address, "--wait", "60")
            eventually(lambda: any(client.pid != os.getpid() for client in broker.clients()), "the fetch")
        assert ended(waiting)["fetched"]


def test_who_may_fetch_is_decided_by_certificate_and_mode(hosts: list[Host], tmp_path: Path) -> None:
    one, two, *_ = hosts
    publish(one, "private", mode=0o600)
    publish(one, "public", mode=0o644)
    authority = one.certificates.parent / "authority"
    nobody = making.issue(authority, tmp_path / "nobody", "nobody").parent
    stranger = making.issue(authority, tmp_path / "stranger", "no-such-user").parent
    expired = making.issue(authority, tmp_path / "expired", "root", days=-0.001).parent
    other = making.make_authority(tmp_path / "other").parent
    wrong = making.issue(other, tmp_path / "wrong", "root", [two.address]).parent
    own = two.certificates
    try:
        with one.exporting() as exporter:
            two.certificates = nobody
            assert two.fetch("public", "--from", one.address)["fetched"]
            status, why = two.fetch("private", "--from", one.address)
            assert (status, "it has no private that this host may fetch" in why) == (1, True)
            two.certificates = stranger
            status, why = two.fetch("public", "--from", one.address)
            assert (status, "'no-such-user', whom the exporting host does not have" in why) == (1, True)
            two.certificates = expired
            status, why = two.fetch("public", "--from", one.address)
            assert (status, "after receiving this host's certificate" in why) == (1, True)
            two.certificates = wrong
            status, why = two.fetch("public", "--from", one.address)
            assert (status, "is not trusted as an exporter of this cluster" in why) == (1, True)
            (wrong / "ca.pem").write_bytes((authority / "ca.pem").read_bytes())
            status, why = two.fetch("public", "--from", one.address)
            assert (status, "after receiving this host's certificate" in why) == (1, True)
            two.certificates = tmp_path / "none"
            status, why = two.fetch("public", "--from", one.address)
            assert (status, f"there is no {tmp_path / 'none'}/ca.pem" in why) == (1, True)
            assert "certificate has expired" in exporter.log()
            assert "unable to get local issuer certificate" in exporter.log()
    finally:
        two.certificates = own


def test_an_exporter_whose_certificate_has_another_name_is_not_read_from(hosts: list[Host], tmp_path: Path) -> None:
    one, two, *_ = hosts
    publish(one)
    authority = one.certificates.parent / "authority"
    own = one.certificates
    one.certificates = making.issue(authority, tmp_path / "elsewhere", "root", ["elsewhere"]).parent
    try:
        with one.exporting():
            status, why = two.fetch("m", "--from", one.address)
        assert (status, "IP address mismatch" in why) == (1, True)
    finally:
        one.certificates = own


def test_a_revoked_certificate_is_refused_after_a_reload(hosts: list[Host], tmp_path: Path) -> None:
    one, two, *_ = hosts
    publish(one)
    authority = one.certificates.parent / "authority"
    own, two.certificates = two.certificates, making.issue(authority, tmp_path / "lost", "root").parent
    try:
        with one.exporting() as exporter:
            assert two.fetch("m", "--from", one.address)["fetched"]
            revoked = making.revoke(authority, two.certificates)
            (one.certificates / "crl.pem").write_bytes(revoked.read_bytes())
            exporter.process.send_signal(signal.SIGHUP)
            eventually(lambda: "the certificates were read again" in exporter.log(), "the reload")
            status, why = two.fetch("m", "--from", one.address)
            assert (status, "was revoked" in why) == (1, True)
            assert "certificate revoked" in exporter.log()
    finally:
        (one.certificates / "crl.pem").unlink(missing_ok=True)
        two.certificates = own


def test_as_many_read_at_once_as_may(hosts: list[Host]) -> None:
    one, two, three, _ = hosts
    publish(one)
    with one.exporting("--readers", "1") as exporter:
        first = two.fetching("m", "--from", one.address)
        reading(exporter)
        (reader,) = children(first.pid)
        os.kill(reader, signal.SIGSTOP)  # it takes its time
        status, why = three.fetch("m", "--from", one.address)
        assert (status, "it has as many readers as it allows" in why) == (1, True)
        os.kill(reader, signal.SIGCONT)
        later = three.fetching("m", "--from", one.address, "--wait", "60")
        assert ended(first)["fetched"]
        assert ended(later)["fetched"]


def test_a_peer_that_is_gone_costs_no_lease(hosts: list[Host]) -> None:
    one, two, *_ = hosts
    publish(one)
    with one.exporting() as exporter:
        process = two.fetching("m", "--from", one.address)
        reading(exporter)
        process.kill()
        process.communicate()
        eventually(lambda: not leases(one), "the lease of the peer to end")
        eventually(lambda: not pools(two), "the draft to go")


TODAY = sampling.daily(
    [name for name in dir() if name.startswith("test_")],
    2,
    always=[test_a_version_goes_from_host_to_host_and_each_can_export_it.__name__],
)
"""The tests that a run tries: each takes many processes, which link an engine, and seconds of slow links."""
