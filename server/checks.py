"""Layouts are checked on a thread, one after the other. Users take turns, so that nobody waits for another's flood."""

from __future__ import annotations

import asyncio
import logging
from asyncio import Future
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from cubroker.protocol.errors import InternalFailure, Invalid
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import Failed

log = logging.getLogger(__name__)

Outcome = Layout | Failed | None
Take = Callable[[Outcome], None]


class Checks:
    """Those that wait, and the thread that does them."""

    def __init__(self) -> None:
        self._lines: dict[int, deque[tuple[bytes | None, Take]]] = {}  # by user, whose turn is next first
        self._busy = False
        self._thread = ThreadPoolExecutor(1, "layouts")
        self._thread.submit(check, None)  # the thread is made now, or not at all: later there may be none to be had

    def put(self, uid: int, layout: bytes | None, take: Take) -> None:
        """Have a layout of a user checked after those that it has put before; ``take`` is called on the loop."""
        self._lines.setdefault(uid, deque()).append((layout, take))
        if not self._busy:
            self._begin()

    def close(self) -> None:
        """Check no more."""
        self._lines.clear()
        self._thread.shutdown(cancel_futures=True)

    def _begin(self) -> None:
        uid, line = next(iter(self._lines.items()))
        del self._lines[uid]
        layout, take = line.popleft()
        if line:
            self._lines[uid] = line
        self._busy = True
        checked = asyncio.get_running_loop().run_in_executor(self._thread, check, layout)
        checked.add_done_callback(partial(self._done, take))

    def _done(self, take: Take, checked: Future[Outcome]) -> None:
        self._busy = False
        if self._lines:
            self._begin()
        if not checked.cancelled():
            take(checked.result())


def check(data: bytes | None) -> Outcome:
    """Decode and check the layout of a create, or say what is wrong with it."""
    if data is None:
        return None
    try:
        return Layout.decode(data)
    except Invalid as error:
        return Failed(error.code, error.message)
    except MemoryError:
        reason = f"the broker has no memory to check a layout of {len(data)} bytes; make it smaller"
        return Failed(InternalFailure.code, reason)
    # Nobody would hear of it otherwise: the request would stay unanswered.
    except Exception as error:
        log.exception("checking a layout of %d bytes failed in an unexpected way", len(data))
        reason = f"the broker itself failed at checking this layout: {error!r}; its log says more"
        return Failed(InternalFailure.code, reason)
