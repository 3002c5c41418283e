from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import AsyncIterator, Iterator
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
    link = await Link.over(ours, lambda frames: received.append(list(frames)))
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
            link.send([b"id", bytes(transport.MAX_READING + (1 << 20))])
            gateway.send(batches.encode(REQUESTS))
            for _ in range(10):
                await asyncio.sleep(0)
            assert received == []
            while not received:
                await taken(gateway)

    run(test())


def test_a_link_says_whether_the_gateway_is_behind_and_when_it_is_not_any_more_and_reads_on_meanwhile() -> None:
    async def test() -> None:
        async with linked() as (link, gateway, received):
            assert not link.send(REQUESTS)
            assert link.send([b"id", bytes(transport.HIGH_WATER + (1 << 20))])
            assert link.send(())
            gateway.send(batches.encode(REQUESTS))
            await until(lambda: received)
            assert received == [REQUESTS]
            reader, got = batches.Batches(), list[list[bytes]]()
            while len(received) < 2:
                got += reader.feed(await taken(gateway))
            assert received == [REQUESTS, []]
            assert not link.send(())
            while len(got) < 2:
                got += reader.feed(await taken(gateway))
            assert got[0] == REQUESTS
            assert not gateway_speaks(gateway)

    run(test())


def gateway_speaks(gateway: socket.socket) -> bool:
    """Whether there is anything more for the gateway to read."""
    return bool(select.select([gateway], [], [], 0)[0])


def test_requests_that_came_together_wait_for_one_another_while_their_answers_are_not_taken() -> None:
    answer = bytes(transport.MAX_READING // 4)

    async def test() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        served: list[bytes] = []

        def serve(frames: Iterator[bytes]) -> None:
            for routing, frame in batches.pairs(frames):
                served.append(frame)
                link.send((routing, answer))

        link = await Link.over(ours, serve)
        numbers = [b"%d" % number for number in range(30)]
        theirs.send(batches.encode([part for number in numbers for part in (b"id", number)]))
        await until(lambda: served)
        assert len(served) < 10
        reader, answers = batches.Batches(), 0
        while answers < len(numbers):
            answers += len(reader.feed(await taken(theirs)))
        assert served == numbers
        link.close()
        await link.ended
        theirs.close()

    run(test())


def test_a_mistake_at_requests_that_had_to_wait_ends_the_connection_to_the_gateway() -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)

        def serve(frames: Iterator[bytes]) -> None:
            if next(frames) == b"bad":
                raise ZeroDivisionError
            next(frames)
            link.send((b"id", bytes(transport.MAX_READING + (1 << 20))))
            assert list(frames) == []

        asyncio.get_running_loop().set_exception_handler(lambda _, context: mistakes.append(context["exception"]))
        mistakes: list[BaseException] = []
        link = await Link.over(ours, serve)
        theirs.send(batches.encode((*REQUESTS, b"bad", b"frame")))
        while not link.ended.done():
            await taken(theirs)
        assert [type(mistake) for mistake in mistakes] == [ZeroDivisionError]
        theirs.close()

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


def test_the_next_step_is_the_gateways_unless_the_broker_has_to_read_or_the_gateway_takes_answers() -> None:
    async def test() -> None:
        async with linked() as (link, gateway, received):
            assert link.waits()
            gateway.send(batches.encode(REQUESTS))
            assert not link.waits()  # the broker has to read that
            await until(lambda: received)
            assert link.waits()
            link.send([b"id", bytes(transport.MAX_READING + (1 << 20))])
            assert not link.waits()  # it took the first of this
            assert link.waits()
            gateway.send(batches.encode(REQUESTS))
            assert link.waits()  # nor is that read while it takes nothing
            assert await taken(gateway)
            await until(lambda: not link.waits())  # it took some
            assert link.waits()

    run(test())
