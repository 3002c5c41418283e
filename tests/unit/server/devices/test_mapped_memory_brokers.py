"""Memory that clients keep mapped or open without a lease, as the broker sees it from outside; with real processes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.driver import load
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import Attach, Attached, Clients, Close, Create, Created, Done, Failed, ListClients
from tests.brokers import eventually
from tests.stores import storing
from tests.unit.server.clients import RawClient, session
from tests.unit.server.configured import Configured, configured
from tests.unit.server.visitor import visiting

ALICE, BOB = 4001, 4002
NBYTES = 64 << 20
LAYOUT = Layout.pack([("x", "U8", (NBYTES,))])
SMALL = Layout.pack([(name, "U8", (2 << 20,)) for name in "xy"], slab=2 << 20)
BLIND = ("setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace")
"""Runs a command that has all of root's capabilities but the one to look at processes of others."""

_SYS_PTRACE = 19


def _may_look() -> bool:
    status = Path("/proc/self/status").read_text()
    return bool(int(status.partition("\nCapEff:")[2].split()[0], 16) >> _SYS_PTRACE & 1)


needs_capability = pytest.mark.skipif(
    os.geteuid() != 0 or not _may_look(), reason="needs root and CAP_SYS_PTRACE, to look at processes of other users"
)


class Roomy(Configured):
    def command(self) -> list[str]:
        self.devices = "host:1@256MiB"
        return super().command()


class Blind(Configured):
    def command(self) -> list[str]:
        return [*BLIND, *super().command()]


Keep = Callable[[RawClient, int], AbstractContextManager[None]]


def beyond(client: RawClient) -> dict[int, int | None]:
    """What the broker says of each process that has a session."""
    return {each.pid: each.mapped_beyond_leases for each in client.ask_again(ListClients(), Clients).clients}


def mine(client: RawClient) -> int | None:
    return beyond(client)[os.getpid()]


@contextmanager
def mapping(client: RawClient, lease: int) -> Iterator[None]:
    (descriptor,) = client.descriptors(lease, 1)
    with mmap.mmap(descriptor, NBYTES):
        client.close_received()
        yield


@contextmanager
def descriptor(client: RawClient, lease: int) -> Iterator[None]:
    client.descriptors(lease, 1)
    yield
    client.close_received()


@pytest.mark.slow
@pytest.mark.parametrize("keep", [mapping, descriptor])
def test_a_client_that_keeps_the_memory_of_a_closed_lease_is_seen_and_refused_until_it_lets_go(keep: Keep) -> None:
    text = "[quota]\nmapped_beyond_leases = '63MiB'"
    with configured(text, Roomy) as broker, session(broker.directory) as client:
        lease = client.create("a", LAYOUT, "vmm").lease
        with keep(client, lease):
            eventually(lambda: mine(client) == 0, "the broker to look")
            client.ask(Close(lease), Done)
            eventually(lambda: mine(client) == NBYTES, "the broker to look again")
            assert client.devices()[0].allocated == 0, "the books say that it is free"
            create = Create("b", LAYOUT.encode(), (client.devices()[0].uuid,), "vmm", 0.0, None)
            refused = client.ask(create, Failed)
            assert refused.code == "over_quota"
            assert f"(process {os.getpid()} 64 MiB)" in refused.message
        eventually(lambda: isinstance(client.answer(client.send(create)), Created), "to be served again")
        assert mine(client) == 0


@pytest.mark.slow
def test_memory_that_is_opened_by_handle_is_seen_too() -> None:
    with configured("") as broker, session(broker.directory) as client:
        client.publish("a")
        attached = client.attach("a")
        driver = load(client.welcome.driver)
        try:
            context = driver.context(0)
            pointer = context.open(attached.replicas[0].handles[0])
            client.ask(Close(attached.lease), Done)
            eventually(lambda: mine(client) == 2 << 20, "the broker to look")
            context.close(pointer)  # a context lives on while another driver of this process has it
        finally:
            driver.close()
        client.ask(Close(client.attach("a").lease), Done)
        eventually(lambda: mine(client) == 0, "the broker to look again")


@pytest.mark.slow
def test_a_client_that_follows_the_order_never_has_anything_beyond() -> None:
    with configured("[quota]\nmapped_beyond_leases = 0") as broker, session(broker.directory) as client:
        client.publish("a")
        with Broker(broker.directory) as ours:
            eventually(lambda: mine(client) == 0, "the broker to look")
            for _ in range(100):
                with ours.attach("a", device=0):
                    assert not mine(client)


@pytest.mark.slow
def test_a_client_that_switches_never_has_anything_beyond() -> None:
    with (
        configured("[quota]\nmapped_beyond_leases = 0") as broker,
        session(broker.directory) as client,
        Broker(broker.directory) as ours,
    ):

        def put() -> int:
            with ours.create("a", SMALL, share="vmm") as draft:
                return draft.seal()

        put()
        with ours.attach("a") as pool:
            eventually(lambda: mine(client) == 0, "the broker to look")
            for _ in range(50):
                assert pool.switch(put()) == pool.version
                assert not mine(client)
            assert [(each.version, each.leases) for each in ours.pools()] == [(51, 1)]
            eventually(lambda: sum(each.allocated for each in ours.devices()) == 4 << 20, "the others to be freed")


@pytest.mark.slow
@needs_capability
def test_of_two_users_the_one_that_keeps_memory_is_refused_and_the_other_is_served() -> None:
    text = "mode = 0o644\n[sockets]\nmode = 0o666\n[quota]\nmapped_beyond_leases = '1MiB'"
    with (
        configured(text) as broker,
        session(broker.directory) as admin,
        visiting(broker.directory, ALICE, ALICE) as alice,
        visiting(broker.directory, BOB, BOB) as bob,
    ):
        assert bob("publish", "llama") == 1
        kept = alice("keep", "llama")
        eventually(lambda: beyond(admin)[alice.pid] == 2 << 20, "the broker to look")
        code, message = alice.refused("attach", "llama")
        assert code == "over_quota"
        assert f"(process {alice.pid} 2 MiB)" in message
        assert f"(kill {alice.pid})" in message
        assert alice.refused("publish", "another")[0] == "over_quota"
        assert bob("attach", "llama") == [1, BOB % 251]
        assert broker.log().count(f"user {ALICE} gets no leases") == 1
        alice("let go", kept)
        eventually(lambda: alice("attach", "llama") == [1, BOB % 251], "to be served again")
        eventually(lambda: broker.log().count(f"user {ALICE} gets leases again") == 1, "the log to say so")


@pytest.mark.slow
@needs_capability
def test_nothing_is_hidden_by_another_process_or_by_hanging_up() -> None:
    text = "mode = 0o644\n[sockets]\nmode = 0o666\n[quota]\nmapped_beyond_leases = '1MiB'"
    with (
        configured(text) as broker,
        visiting(broker.directory, ALICE, ALICE) as alice,
        visiting(broker.directory, ALICE, ALICE) as again,
    ):
        alice("publish", "llama")
        child = alice("fork", "llama")
        eventually(lambda: "code" in again("attach", "llama"), "the broker to look")
        assert f"(process {child} 2 MiB)" in again.refused("attach", "llama")[1]
        alice("end", child)
        eventually(lambda: again("attach", "llama") == [1, ALICE % 251], "to be served again")


@pytest.mark.slow
@needs_capability
def test_what_the_kernel_does_not_let_the_broker_see_is_unknown() -> None:
    text = "mode = 0o644\nadmins = [0]\n[sockets]\nmode = 0o666\n[quota]\nmapped_beyond_leases = 0"
    with (
        configured(text, Blind) as broker,
        session(broker.directory) as admin,
        visiting(broker.directory, ALICE, ALICE) as other,
        visiting(broker.directory, 0, 0, before=BLIND) as seen,
        visiting(broker.directory, 0, 0, before=BLIND) as hidden,
    ):
        seen("publish", "llama")
        hidden("hide")
        for visitor in (other, hidden):
            visitor("keep", "llama")
        eventually(lambda: beyond(admin)[seen.pid] == 0, "the broker to look")
        seen("attach", "llama")
        assert beyond(admin) == {os.getpid(): None, other.pid: None, seen.pid: 0, hidden.pid: None}
        assert other("attach", "llama") == [1, 0]


def test_another_quota_and_another_pace_hold_from_the_reload_on() -> None:
    with configured("") as broker, session(broker.directory) as client:
        client.publish("a")
        lease = client.create("b", share="vmm").lease
        client.descriptors(lease, 1)
        client.ask(Close(lease), Done)
        eventually(lambda: mine(client) == 2 << 20, "the broker to look")
        attach = Attach("a", 0, None, 0.0)
        client.ask(attach, Attached)
        broker.reload("[quota]\nmapped_beyond_leases = '1MiB'")
        eventually(lambda: isinstance(client.answer(client.send(attach)), Failed), "the new quota to hold")
        broker.reload("[quota]\nmapped_beyond_leases = '1MiB'\n[limits]\nmapped_check_seconds = 0")
        eventually(lambda: mine(client) is None, "the broker to look no more")
        client.ask(attach, Attached)
        broker.reload("")
        eventually(lambda: mine(client) == 2 << 20, "the broker to look again")


@pytest.mark.slow
def test_a_broker_that_was_killed_knows_durable_memory_again() -> None:
    uid, gid = os.getuid(), os.getgid()
    with storing() as broker, session(broker.directory) as client, visiting(broker.directory, uid, gid) as liar:
        liar("publish", "llama")
        broker.restart()
        liar("keep", "llama")
        eventually(lambda: beyond(client)[liar.pid] == 2 << 20, "the broker to look")
        assert client.devices()[0].allocated == 2 << 20
        liar("retire", "llama")
        eventually(lambda: client.devices()[0].allocated == 0, "the memory to be freed")
        eventually(lambda: beyond(client)[liar.pid] == 2 << 20, "the broker to look again")
