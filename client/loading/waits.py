"""What a session waits for at the broker, told to its user while it does."""

from __future__ import annotations

from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event

from cubroker.client.broker import Broker
from cubroker.protocol.errors import CubrokerError

EVERY = 5.0
"""Seconds for which a wait is not told, and between two looks at what is waited for."""


@contextmanager
def telling_waits(broker: Broker, tell: Callable[[str], object]) -> Iterator[None]:
    """While the block runs, look every few seconds whether a request of this session waits, and tell for what.

    ``tell`` is called by another thread, at every look.
    """
    ended = Event()

    def watch() -> None:
        with suppress(CubrokerError):  # the block fails, too, and says why
            while not ended.wait(EVERY):
                waiters = broker.look().waiters if broker.requests.waiting() else ()
                for waiter in waiters:
                    if waiter.session == broker.session and not ended.is_set():
                        tell(f"{waiter.awaits}; see `cubroker top`")

    with suppress(RuntimeError):  # there are no threads: the user is told less, and by the block, if it needs some
        start_new_thread(watch, ())
    try:
        yield
    finally:
        ended.set()
