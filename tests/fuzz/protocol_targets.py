"""The targets: all code that reads bytes from outside before anything has checked them."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

from cubroker.integrations.cluster import messages as cluster_messages
from cubroker.protocol import wire
from cubroker.protocol.errors import CubrokerError, Invalid
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import VERSIONS, Answer, Envelope, Greeting, Hello, Notice
from cubroker.protocol.wire import MAX_REQUEST, NUMBER, Digest, Keyed, complete, session_of
from cubroker.server.transport import admission
from cubroker.server.transport.framing import encode, pairs
from cubroker.server.transport.gateway_process import RequestDecoder
from tests.fuzz import checkpoint_targets, journal_targets, ledger_target
from tests.fuzz.target import Target
from tests.unit.integrations.cluster.samples import LOCALS, REPLIES, REQUESTS
from tests.unit.protocol.samples import GREETINGS, LAYOUT, NOTICES, SAMPLES

MSGPACK = (
    b"\xc0",
    b"\xc2",
    b"\xca\x7f\xc0\x00\x00",  # a float that is none
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + bytes(7),
    b"\xdd" + struct.pack(">I", 1 << 31),
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\x01\x00\x00\x00",
    b"\xa3\xed\xa0\x80",  # a surrogate
    b"\xd6\xff" + bytes(4),  # a timestamp
    b"\xc7\x01\x05x",
    b"\x91" * 40,
    b"\x81\xa1x" * 40,
    *(wire.pack(type(value).__name__) for value, _ in SAMPLES),
)


def session(data: bytes) -> None:
    """A packet on the session socket: as a greeting at the broker, as its answer and as a notice at the client."""
    for read in (admission._read, lambda packet: wire.unpack(packet, Greeting)):
        with suppress(CubrokerError):
            read(data)
    again(data, Notice)


def messages(data: bytes) -> None:
    """A frame on the request socket, either way, and a layout within one."""
    for shape in (Envelope, Answer):
        with suppress(CubrokerError):
            again(data, shape)
    layout = Layout.decode(data)
    assert Layout.decode(layout.encode()) == layout


def frames(data: bytes) -> None:
    """A frame of a session since version 4, either way: what its keys did not make is nobody's, and else it is read.

    A tag cannot be guessed by changing bytes, so what has one is changed behind it, too.
    """
    assert KEYED.opened(data) is None or data[NUMBER:] in WRITTEN  # what comes before it only says whose keys to take
    assert KEYED.read(data) is None or data in WRITTEN
    session_of(data)
    opened = KEYED.opened(KEYED._requests.sign(data))
    assert opened == (data, b"") or len(data) > MAX_REQUEST
    with suppress(Invalid):
        body = complete(wire.unpack(data, Envelope).body, data, Digest(data).done())
        assert body is None


def cluster(data: bytes) -> None:
    """What is in a frame between hosts, either way, and how long the frame says it is."""
    for read in (cluster_messages.request, cluster_messages.reply, cluster_messages.local):
        with suppress(Invalid):
            message: Any = read(data)
            frame = cluster_messages.frame(message)
            assert read(frame[cluster_messages.LENGTH.size :]) == message
    assert 0 < cluster_messages.length(data[:4].ljust(4), 1000) <= 1000


def again(data: bytes, shape: object) -> None:
    """What is read as a message is one: it travels again, and is the same."""
    value = wire.unpack(data, shape)
    assert wire.unpack(wire.pack(value), shape) == value


def batches(data: bytes) -> None:
    """The stream between broker and gateway. However it is cut, the same batches come of it, or the same refusal."""
    whole = _read([data])
    assert _read([data[at : at + 97] for at in range(0, len(data), 97)]) == whole
    for batch in whole or ():
        if len(batch) % 2 == 0:
            assert encode([part for pair in pairs(batch) for part in pair]) == encode(batch)


def _read(parts: list[bytes]) -> list[list[bytes]] | None:
    """Return the batches of a stream; None if it is none, which ends the gateway that wrote it."""
    stream = RequestDecoder()
    try:
        return [batch for part in parts for batch in stream.feed(part)]
    except ValueError:
        return None


KEYED = Keyed(1, bytes(range(16)))
FRAMES = tuple(
    [KEYED.request(value) for value, _ in SAMPLES if isinstance(value, Envelope)]
    + [KEYED.reply(value) for value, _ in SAMPLES if isinstance(value, Answer)]
)
WRITTEN = {*(frame[NUMBER:] for frame in FRAMES), *FRAMES}

TARGETS = {
    target.name: target
    for target in (
        Target(
            "session",
            session,
            (
                *(wire.pack(Hello("cubroker", versions)) for versions in (VERSIONS, (7, 1), (3,))),
                *map(wire.pack, (*GREETINGS, *NOTICES)),
            ),
            MSGPACK,
        ),
        Target("messages", messages, (*(wire.pack(value) for value, _ in SAMPLES), LAYOUT.encode()), MSGPACK),
        Target("frames", frames, (*FRAMES, *(wire.pack(value) for value, _ in SAMPLES)), MSGPACK),
        Target(
            "cluster",
            cluster,
            (struct.pack(">I", 9), *(cluster_messages.frame(each)[4:] for each in (*REQUESTS, *REPLIES, *LOCALS))),
            (*MSGPACK, *(wire.pack(type(each).__name__) for each in (*REQUESTS, *REPLIES, *LOCALS))),
        ),
        Target("requests", ledger_target.play, ledger_target.SEEDS, (*MSGPACK, *ledger_target.TOKENS)),
        Target(
            "batches",
            batches,
            (*map(encode, ([], [b"id", b"frame"], [b"", bytes(300)] * 9, [b"id", bytes(5000)])), b"\x90" * 9),
            MSGPACK,
            measured=False,  # whoever writes it is ours, and msgpack makes room for what an array promises
        ),
        Target("journal", journal_targets.journal, journal_targets.JOURNALS, (bytes(8), b"cubroker")),
        Target("record", journal_targets.record, journal_targets.RECORDS, (*MSGPACK, *journal_targets.TOKENS)),
        Target("header", checkpoint_targets.header, checkpoint_targets.HEADERS, checkpoint_targets.TOKENS),
        Target("checkpoint", checkpoint_targets.checkpoint, checkpoint_targets.CHECKPOINTS, checkpoint_targets.TOKENS),
    )
}
