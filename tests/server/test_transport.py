from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cubroker.server import batches, transport
from cubroker.server.transport import Link
from tests.server.loops import run, until

REQUESTS = [b"id", b"frame"]


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Link, socket.socket, list[list[bytes]]]]:
    """A link, the gateway's end of it, and the batches that came."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    received: list[list[bytes]] = []
    link = await Link.over(ours, received.append)
    try:
        yield link, theirs, received
    finally:
        link.close()
        await link.ended
        theirs.close()


async def taken(gateway: socket.socket) -> bytes:
    return await asyncio.get_running_loop().sock_recv(gateway, 1 << 20)


def test_a_gateway_listens_from_its_first_empty_batch_on() -> None:
    async def test() -> None:
        async with linked() as (link, gateway, received):
            for _ in range(2):
                gateway.send(batches.encode(()))
            gateway.send(batches.encode(REQUESTS))
            await until(lambda: received)
            assert link.listening.done()
            assert received == [REQUESTS]

    run(test())


def test_batches_that_come_together_are_handed_over_as_one() -> None:
    async def test() -> None:
        async with linked() as (link, gateway, received):
            others = [b"other", b"first", b"id", b"second"]
            gateway.send(b"".join(map(batches.encode, ((), REQUESTS, others))))
            await until(lambda: received)
            assert link.listening.done()
            assert received == [REQUESTS + others]

    run(test())


def test_answers_travel_in_one_batch_and_nowhere_once_the_gateway_is_gone() -> None:
    async def test() -> None:
        async with linked() as (link, gateway, _):
            link.send(REQUESTS)
            assert batches.Batches().feed(gateway.recv(1 << 16)) == [REQUESTS]
            gateway.shutdown(socket.SHUT_RDWR)
            await link.ended
            link.send(REQUESTS)
            assert link.listening.cancelled()

    run(test())


def test_a_gateway_that_sends_what_is_no_batch_is_cut_off() -> None:
    async def test() -> None:
        async with linked() as (link, gateway, received):
            gateway.send(b"\xff" * 100)
            await link.ended
            assert received == []

    run(test())


def test_no_request_is_read_while_the_answers_before_it_are_not_taken() -> None:
    async def test() -> None:
        async with linked() as (link, gateway, received):
            link.send([b"id", bytes(transport.HIGH_WATER + (1 << 20))])
            gateway.send(batches.encode(REQUESTS))
            for _ in range(10):
                await asyncio.sleep(0)
            assert received == []
            while not received:
                await taken(gateway)

    run(test())


def test_answers_past_the_bound_are_dropped_for_their_clients_to_ask_again() -> None:
    async def test() -> None:
        async with linked() as (link, gateway, _):
            for _ in range(2):
                link.send([b"id", bytes(transport.MAX_UNSENT // 2 + (1 << 20))])
            link.send([b"id", b"dropped"])
            reader, got = batches.Batches(), 0
            while got < 2:
                got += len(reader.feed(await taken(gateway)))
            link.send([b"id", b"next"])
            assert reader.feed(await taken(gateway)) == [[b"id", b"next"]]

    run(test())
