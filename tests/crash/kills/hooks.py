"""A client that says where it is: around every message, every driver call, and every copy.

``install(reach)`` changes the client of this process so that ``reach`` is called with a label, on the thread that
gets there. Labels of requests are, with the request's kind for ``X``:

``asking X``    before it is given to the connection's thread
``sending X``   before it is given to libzmq
``sent X``      after that
``received X``  its answer was read, and nothing done with it
``settled X``   whoever asked has the answer

Labels of the greeting: ``connecting``, ``connected``, ``greeted``, ``welcomed``. Of descriptors: ``listening`` before
anything is read from the session socket, ``heard Descriptors`` when they were read, ``delivered Descriptors`` when
whoever waits for them has them, or they are kept for him. Of the driver, counted from 1: ``opening n``, ``opened n``;
``reserving n``, ``reserved n``, ``mapping n``, ``mapped n``; ``protecting n``, ``protected n`` of a change of access;
``unmapping n``, ``unmapped n``, whichever way it was mapped; ``replacing n`` before and ``replaced n`` after memory is
mapped in the place of other memory; ``freeing n``, ``freed n`` of reserved addresses; ``opening window n``,
``opened window n`` of those that are reserved for multicast objects; ``writing`` and ``reading`` half-way through a
copy. Of :meth:`Broker.publish`: ``filling`` and ``filled`` around the copies into its draft.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import zmq

from cubroker.client.draft import Draft
from cubroker.client.publish import Sources
from cubroker.client.transport import handshake
from cubroker.client.transport.fd_receiver import FdReceiver
from cubroker.client.transport.requests import Pending, Requests
from cubroker.driver import Context
from cubroker.driver.vmm import Reservation
from cubroker.protocol.errors import CubrokerError
from cubroker.protocol.messages import Answer, Descriptors, Reply, Request

Reach = Callable[[str], None]


def install(reach: Reach) -> None:
    """Have ``reach`` called at every step from now on."""
    _greeting(reach)
    _messages(reach)
    _requests(reach)
    _descriptors(reach)
    _mappings(reach)
    _copies(reach)


def _replace(owner: object, name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _greeting(reach: Reach) -> None:
    class Channel(socket.socket):
        def connect(self, address: Any) -> None:
            reach("connecting")
            super().connect(address)
            reach("connected")

        def send(self, data: Any, flags: int = 0) -> int:
            sent = super().send(data, flags)
            reach("greeted")
            return sent

        def sendmsg(self, *args: Any) -> int:
            sent = super().sendmsg(*args)
            reach("greeted")
            return sent

        def recv(self, size: int, flags: int = 0) -> bytes:
            data = super().recv(size, flags)
            reach("welcomed")
            return data

    _replace(handshake, "socket", lambda module: SimpleNamespace(**{**vars(module), "socket": Channel}))


def _messages(reach: Reach) -> None:
    frames: dict[bytes, str] = {}
    kinds: dict[int, str] = {}

    class Dealer(zmq.Socket[bytes]):
        pass

    def hooked_pack(pack: Callable[[Requests, int, Request], bytes]) -> Callable[[Requests, int, Request], bytes]:
        def packing(requests: Requests, number: int, body: Request) -> bytes:
            data = pack(requests, number, body)
            frames[data] = kinds[number] = type(body).__name__
            return data

        return packing

    def hooked_send(send: Callable[..., None]) -> Callable[..., None]:
        def sending(dealer: Dealer, data: bytes, flags: int = 0) -> None:
            kind = frames[data]
            reach(f"sending {kind}")
            send(dealer, data, flags)
            reach(f"sent {kind}")

        return sending

    def hooked_read(read: Callable[[Requests, bytes], Answer | None]) -> Callable[[Requests, bytes], Answer | None]:
        def reading(requests: Requests, frame: bytes) -> Answer | None:
            answer = read(requests, frame)
            assert answer
            reach(f"received {kinds[answer.id]}")
            return answer

        return reading

    _replace(Requests, "_pack", hooked_pack)
    _replace(Requests, "read", hooked_read)
    _replace(Dealer, "send", hooked_send)
    _replace(zmq.Context, "_socket_class", lambda plain: Dealer)


def _requests(reach: Reach) -> None:
    def hooked(post: Callable[[Requests, Request, Pending], None]) -> Callable[[Requests, Request, Pending], None]:
        def asking(requests: Requests, body: Request, pending: Pending) -> None:
            settle = pending.settle

            def settled(reply: Reply | CubrokerError) -> None:
                settle(reply)
                reach(f"settled {type(body).__name__}")

            pending.settle = settled
            reach(f"asking {type(body).__name__}")
            post(requests, body, pending)

        return asking

    def hooked_cancel(cancel: Callable[[Requests, Pending], None]) -> Callable[[Requests, Pending], None]:
        def cancelling(requests: Requests, pending: Pending) -> None:
            reach("asking Cancel")
            cancel(requests, pending)

        return cancelling

    _replace(Requests, "post", hooked)
    _replace(Requests, "cancel", hooked_cancel)


def _descriptors(reach: Reach) -> None:
    def hooked_receive(receive: Callable[..., Any]) -> Callable[..., Any]:
        def listening(inbox: FdReceiver, channel: socket.socket) -> Any:
            reach("listening")
            return receive(inbox, channel)

        return listening

    def hooked_put(put: Callable[..., None]) -> Callable[..., None]:
        def delivering(inbox: FdReceiver, notice: Descriptors, descriptors: Sequence[int]) -> None:
            reach("heard Descriptors")
            put(inbox, notice, descriptors)
            reach("delivered Descriptors")

        return delivering

    _replace(FdReceiver, "receive", hooked_receive)
    _replace(FdReceiver, "put", hooked_put)


def _mappings(reach: Reach) -> None:
    def counted(before: str, after: str) -> Callable[[Any], Any]:
        def hooked(call: Callable[..., Any]) -> Callable[..., Any]:
            calls = 0

            def counting(*args: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                number = calls
                reach(f"{before} {number}")
                result = call(*args, **options)
                reach(f"{after} {number}")
                return result

            return counting

        return hooked

    _replace(Context, "open", counted("opening", "opened"))
    _replace(Context, "close", counted("unmapping", "unmapped"))
    _replace(Context, "reserve", counted("reserving", "reserved"))
    _replace(Context, "window", counted("opening window", "opened window"))
    _replace(Reservation, "map", counted("mapping", "mapped"))
    _replace(Reservation, "vacate", counted("unmapping", "unmapped"))
    _replace(Reservation, "fill", counted("replacing", "replaced"))
    _replace(Reservation, "protect", counted("protecting", "protected"))
    _replace(Reservation, "close", counted("freeing", "freed"))


def _copies(reach: Reach) -> None:
    def in_halves_out(read: Callable[[Context, int, int], bytes]) -> Callable[[Context, int, int], bytes]:
        def reading(context: Context, pointer: int, nbytes: int) -> bytes:
            half = read(context, pointer, nbytes // 2)
            reach("reading")
            return half + read(context, pointer + nbytes // 2, nbytes - nbytes // 2)

        return reading

    def in_halves_in(write: Callable[[Context, int, Any], None]) -> Callable[[Context, int, Any], None]:
        def writing(context: Context, pointer: int, data: Any) -> None:
            view = memoryview(data).cast("B")
            write(context, pointer, view[: view.nbytes // 2])
            reach("writing")
            write(context, pointer + view.nbytes // 2, view[view.nbytes // 2 :])

        return writing

    def between(fill: Callable[[Sources, Draft], None]) -> Callable[[Sources, Draft], None]:
        def filling(sources: Sources, draft: Draft) -> None:
            reach("filling")
            fill(sources, draft)
            reach("filled")

        return filling

    _replace(Sources, "fill", between)
    _replace(Context, "read", in_halves_out)
    _replace(Context, "write", in_halves_in)
