"""What peers of earlier protocol versions are sent, held against the arrays that their builds read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cubroker.protocol import messages as m
from cubroker.protocol import wire
from cubroker.protocol.authentication import Bearer
from cubroker.protocol.versions import ADDED, for_version

SECRET = bytes(range(16))
GPU = bytes(16)

FIRST: list[tuple[msgspec.Struct, list[Any]]] = [
    (m.Attach("a", 1, GPU, 2.5), ["Attach", "a", 1, GPU, 2.5, []]),
    (m.Attach("a", 0, None, 0, (GPU,)), ["Attach", "a", 0, None, 0.0, [GPU]]),
    (
        m.Create("a", b"layout", (GPU,), "vmm", 0, m.Where(None), durable=True),
        ["Create", "a", b"layout", [GPU], "vmm", 0.0, [None, []], None, None, False, True],
    ),
    (
        m.Create("a", b"layout", (GPU,), "ipc", 0, None, 0o600, (0,), True, False),
        ["Create", "a", b"layout", [GPU], "ipc", 0.0, None, 0o600, [0], True, False],
    ),
    (m.Close(7), ["Close", 7]),
    (m.Welcome(1, 7, SECRET, "cuda", 1000), ["Welcome", 1, 7, SECRET, "cuda"]),
    (m.Welcome(1, 7, SECRET, "cuda"), ["Welcome", 1, 7, SECRET, "cuda"]),
]
"""Messages, and the arrays that a build of version 1 reads: it refuses one with another number of elements."""


def as_sent(data: bytes) -> Any:
    return msgspec.msgpack.decode(data)


@pytest.mark.parametrize(("message", "array"), FIRST)
def test_a_peer_of_version_1_is_sent_the_fields_that_it_knows(message: msgspec.Struct, array: list[Any]) -> None:
    assert as_sent(wire.pack(for_version(message, 1))) == array


@pytest.mark.parametrize(("body", "array"), [pair for pair in FIRST if not isinstance(pair[0], m.Welcome)])
def test_so_it_is_in_a_request(body: Any, array: list[Any]) -> None:
    assert as_sent(Bearer(SECRET, 1).request(m.Envelope(SECRET, 3, 2, body, (1,)))) == [SECRET, 3, 2, array, [1]]


@pytest.mark.parametrize(("message", "array"), FIRST)
def test_a_peer_of_the_newest_version_is_sent_all_of_it(message: msgspec.Struct, array: list[Any]) -> None:
    assert for_version(message, m.VERSIONS[-1]) is message
    assert len(as_sent(wire.pack(message))) >= len(array)


@pytest.mark.parametrize("message", [m.Attach("a", 1, None, 0, (), (4901,)), m.Where(None, (), (4901,))])
def test_what_a_peer_would_have_to_heed_is_not_left_out(message: msgspec.Struct) -> None:
    assert for_version(message, m.OWNED) is message
    with pytest.raises(AssertionError, match="owners"):
        for_version(message, m.OWNED - 1)


@pytest.mark.parametrize("kind", ADDED)
def test_what_was_added_is_last_in_the_order_of_versions_and_has_a_default(kind: type[msgspec.Struct]) -> None:
    added = ADDED[kind]
    assert kind.__struct_fields__[-len(added) :] == tuple(name for name, _ in added)
    assert len(kind.__struct_defaults__) >= len(added)
    assert sorted(since for _, since in added) == [since for _, since in added]
