"""A gateway that a peer has taken over can drop, delay and repeat what passes, and no more than that."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from cubroker.client import Broker
from cubroker.driver.host import shared_memory
from cubroker.protocol import wire
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import (
    Answer,
    Attach,
    Attached,
    Close,
    Create,
    Created,
    Done,
    Envelope,
    EventOpened,
    EventShared,
    Failed,
    ListDevices,
    ListPools,
    OpenEvent,
    Pools,
    Retire,
    Retirement,
    Seal,
    Sealed,
    ShareEvent,
)
from cubroker.protocol.wire import BESIDE, HIDDEN, WHOLE, Keyed
from tests.brokers import PATIENCE, BrokerProcess, eventually, serving
from tests.integration.hostile.man_in_the_middle import Middle, between, honest
from tests.unit.client.conftest import content, publish
from tests.unit.server.clients import HELLO, HELLO_OF_3, LAYOUT, RawClient, session

LARGE = Layout.pack([(f"layer.{number:0100d}.weight", "U8", (1,)) for number in range(10_000)])


@pytest.fixture
def process() -> Iterator[BrokerProcess]:
    with serving() as process:
        yield process


@pytest.fixture
def middle(process: BrokerProcess) -> Iterator[Middle]:
    with between(process.directory) as middle:
        yield middle


def flips(frame: bytes, step: int = 1) -> list[bytes]:
    """The frame with one bit turned over, for every byte or every so many."""
    return [frame[:at] + bytes([frame[at] ^ 1 << at % 8]) + frame[at + 1 :] for at in range(0, len(frame), step)]


def state(client: RawClient, name: str) -> str:
    return {info.name: info.state for info in client.ask(ListPools(), Pools).pools}[name]


def exchange(client: RawClient) -> list[bytes]:
    """Use what handles are needed for, and return them."""
    device = client.devices()[0].uuid
    request = Create("pool", LAYOUT.encode(), (device,), "ipc", 0.0, None, writable=True)
    created = client.ask(request, Created)
    client.ask(Seal(created.lease), Sealed)
    attached = client.attach("pool")
    event = os.urandom(64)
    client.ask(ShareEvent(attached.lease, "done", device, event), EventShared)
    assert client.ask(OpenEvent(attached.lease, "done", 0.0), EventOpened).handle == event
    return [*created.replicas[0].handles, *attached.replicas[0].handles, event]


@pytest.mark.parametrize(("hello", "sees"), [(HELLO_OF_3, True), (HELLO, False)], ids=["version 3", "version 4"])
def test_it_sees_neither_the_secret_of_a_session_nor_a_handle(
    process: BrokerProcess, middle: Middle, hello: bytes, sees: bool
) -> None:
    with session(process.directory, hello) as client:
        handles = exchange(client)
        *memory, event = handles
        secrets = [client.welcome.secret, *handles, *map(shared_memory.secret_of, memory), event[:16]]
    seen = b"".join((*middle.requests, *middle.replies))
    assert len(middle.requests) >= 6
    assert [secret in seen for secret in secrets] == [sees] * len(secrets)


def test_it_reads_a_lease_by_descriptor_and_can_make_nothing_of_it(process: BrokerProcess, middle: Middle) -> None:
    """What opens the memory never comes its way, so such a lease is not hidden; whose it is, is known all the same."""
    with session(process.directory) as writer, session(process.directory) as client:
        writer.publish("pool", share="vmm")
        frames, before = list[bytes](), len(middle.replies)

        def alter(frame: bytes) -> list[bytes]:
            frames.append(frame)
            return [*flips(frame), b"\xc1" + frame[1:17], frame]

        middle.on_reply = alter
        number = client.send(Attach("pool", 0, None, 0.0))
        read: list[Answer | None] = []
        while not any(read):
            read.append(client.authentication.read(client.dealer.recv()))
        (frame,), (*forged, answer) = frames, read
        assert answer
        assert answer.id == number
        assert isinstance(answer.body, Attached)
        assert forged == [None] * (len(frame) + 1)
        assert frame[:1] == WHOLE
        assert frame.endswith(wire.pack(answer))
        assert middle.replies[before:] == [frame]
        assert client.descriptors(answer.body.lease, 1)
        secrets = [client.welcome.secret, client.welcome.secret[:8]]
    seen = b"".join((*middle.requests, *middle.replies))
    assert not any(secret in seen for secret in secrets)


def test_a_request_that_it_alters_is_not_done(process: BrokerProcess, middle: Middle) -> None:
    with session(process.directory) as client:
        client.publish("pool")
        frame = client.frame(50, 1, Retire("pool", 0))
        altered = [*flips(frame), *(frame[:length] for length in range(len(frame))), frame + b"\0"]
        assert [answer and answer.id for answer in middle.send(client, 51, *altered)] == [51]
        assert state(client, "pool") == "current"
        assert middle.send(client, 52, frame)[0] == Answer(50, Retirement(1, 0))
    assert process.log().count("dropping forged requests") == 1


@pytest.mark.slow
def test_a_layout_that_it_alters_is_not_taken_and_the_writers_own_is(process: BrokerProcess, middle: Middle) -> None:
    data, altered = LARGE.encode(), iter((1 << 17, 1 << 19, len(LARGE.encode()) - 1))

    def alter(frame: bytes) -> list[bytes]:
        if len(frame) > len(data) and (at := next(altered, 0)):
            return [frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]]
        return [frame]

    middle.on_request = alter
    with Broker(process.directory, timeout=PATIENCE) as broker:
        broker.create("pool", LARGE, share="ipc").seal()
        with broker.attach("pool") as pool:
            assert pool.layout == LARGE
    assert next(altered, None) is None, "it was not tried"


def test_it_can_ask_nothing_in_the_name_of_a_user(process: BrokerProcess, middle: Middle) -> None:
    with session(process.directory) as owner, session(process.directory) as other:
        device = owner.devices()[0].uuid
        created = owner.ask(Create("own", LAYOUT.encode(), (device,), "ipc", 0.0, None, mode=0o600), Created)
        owner.ask(Seal(created.lease), Sealed)
        number, body = owner.welcome.session, Retire("own", 0)
        forgeries = [
            wire.pack(Envelope(b"", 90, 1, body)),
            wire.pack([number, 90, 1, ["Retire", "own", 0]]),
            wire.pack(Envelope(number.to_bytes(16), 90, 1, body)),
            wire.pack(Envelope(number.to_bytes(8), 90, 1, body)),
            wire.pack([number.to_bytes(8), 90, 1, ["Retire"]]),
            number.to_bytes(8) + WHOLE + bytes(16) + wire.pack(Envelope(b"", 90, 1, body)),
            *(Keyed(number, key).request(Envelope(b"", 90, 1, body)) for key in (bytes(16), other.welcome.secret)),
            number.to_bytes(8) + other.frame(90, 1, body)[8:],
            number.to_bytes(8) + middle.replies[-1],
        ]
        *answers, last = middle.send(owner, 91, *forgeries)
        assert last
        assert answers == [None] * 3, "those that are of another version are told that nobody has their secret"
        assert state(owner, "own") == "current"


def test_what_it_sends_again_is_not_done_again(process: BrokerProcess, middle: Middle) -> None:
    with session(process.directory) as observer, Broker(process.directory) as broker:
        publish(broker, "pool")
        broker.attach("pool").close()
        broker.retire("pool")
        kept = broker.create("kept", LAYOUT, share="ipc")
        for number in range(90, 93):
            old = list(middle.requests)
            middle.send(observer, number, *old, *reversed(old))
        leases = [len(info.leases) for info in broker.clients()]
        assert sorted(leases) == [0, 1]
        assert [(info.name, info.version, info.state) for info in broker.pools()] == [("kept", 1, "draft")]
        assert kept.seal() == 1


def test_what_a_client_asked_whose_answer_it_kept_back_is_done_once(process: BrokerProcess, middle: Middle) -> None:
    """And nothing is done when it brings the old request after the client had the answer to it, and is past that."""
    with session(process.directory) as client:
        client.publish("pool")
        before, frame = len(middle.replies), client.frame(20, 20, Attach("pool", 0, None, 0.0))
        middle.on_reply = lambda frame: []
        client.dealer.send(frame)
        eventually(lambda: len(middle.replies) > before, "the answer")
        middle.on_reply = honest
        client.dealer.send(frame)
        attached = client.answer(20)
        assert isinstance(attached, Attached)
        client.send(Close(attached.lease), 21, oldest=21)
        assert client.answer(21) == Done()
        client.send(ListDevices(), 22, oldest=22)
        client.answer(22)
        assert [answer and answer.id for answer in middle.send(client, 23, *[frame] * 3)] == [23]
        client.last = 23
        assert not client.clients()[0].leases


def forge(frame: bytes, before: list[bytes]) -> list[bytes]:
    """What a gateway may make of a reply, and all that it had before."""
    failed = wire.pack(Answer(1, Failed("not_found", "no")))
    marked = [mark + bytes(16) + failed for mark in (WHOLE, BESIDE, HIDDEN)]
    return [*flips(frame, 7), frame[:-1], frame + b"\0", failed, *marked, b"\xc1", b"\xc2" * 30, *before]


@pytest.mark.slow
def test_a_reply_that_it_forges_or_alters_is_never_taken(
    process: BrokerProcess, middle: Middle, caplog: pytest.LogCaptureFixture
) -> None:
    left, seen = 60, list[bytes]()

    def treat(frame: bytes) -> list[bytes]:
        nonlocal left
        seen.append(frame)
        left -= 1
        return forge(frame, seen[:-1]) if left > 0 and left % 3 else [frame]

    middle.on_reply = treat
    with caplog.at_level(logging.WARNING), Broker(process.directory, timeout=PATIENCE) as broker:
        assert publish(broker, "pool") == 1
        with broker.attach("pool") as pool:
            assert pool["weight"].tobytes() == content("weight", 128)
        assert [(info.name, info.state, info.leases) for info in broker.pools()] == [("pool", "current", 0)]
        broker.create("large", LARGE, share="ipc").seal()
        with broker.attach("large") as pool:
            assert pool.layout == LARGE
    assert caplog.text.count("the gateway alters or forges answers") == 1
