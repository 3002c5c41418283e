"""Interrupts one call of the client at every place where Python delivers a signal: ``… DIRECTORY WHAT``.

That is after a call into C returned, and at the beginning of a function, in the client's code and in what it calls;
for what shares its work among threads, also in what is called from there, and so on.
A place gets a SIGINT, the first time that it is come to; then nothing of what was begun may be left, neither at the
broker nor as threads here.

Places are tried that went wrong once, and others by chance: each day other ones, or those of ``$CUBROKER_SEED``. With
``$CUBROKER_HOSTILITY`` above 1, as ``make hostile`` sets it, it is every place.
"""

from __future__ import annotations

import ctypes
import datetime
import dis
import functools
import gc
import os
import random
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path, PurePath
from types import CodeType, FrameType
from typing import Any

import cubroker.client
from cubroker.client import Broker, Watch
from cubroker.client.loading.loader import load as load_files
from cubroker.client.loading.verify import verify as verify_files
from cubroker.protocol import Layout
from cubroker.protocol.errors import NotFound, TimedOut
from tests import checkpoints
from tests.brokers import eventually
from tests.unit.server.processes import descriptors

LAYOUT = Layout.pack([("a", "F32", (100,)), ("b", "BF16", (3,))])
PACKAGE = str(PurePath(cubroker.client.__file__ or "").parent)
UNSAFE = threading.Thread.start.__code__
"""Python's own: interrupted in the wrong place, it leaves a thread that never begins, or that waits for ever."""

EVERYWHERE = int(os.environ.get("CUBROKER_HOSTILITY", "1")) > 1
SEED = os.environ.get("CUBROKER_SEED", datetime.datetime.now(datetime.UTC).date().isoformat())

BY_CHANCE = 20
"""Places that are tried by chance."""

ALWAYS = (
    "Requests._put",
    "Waker.set",
    "ClientSession.obtain",
    "LeaseRequest.ask",
    "Pool.switch",
    "LeaseHandle.end",
    "LeasedMemory.end",
    "Broker._keep",
)
"""Functions whose places are all tried: what an interrupt leaves there was lost once."""

watches: list[Watch] = []
files: list[Path] = []
"""What the shared pool holds, as a checkpoint."""

# A trace function in C: after one in Python the signal's handler would run at once, inside of it.
_trip = ctypes.PYFUNCTYPE(None, *[ctypes.py_object] * 3)(("PyErr_SetInterrupt", ctypes.pythonapi))


@functools.cache
def before_calls(code: CodeType) -> frozenset[int]:
    """Return the offsets of the instructions that are followed by a call."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    return frozenset(step.offset for step, following in pairwise(steps) if following.opname.startswith("CALL"))


def interrupted() -> None:
    raise KeyboardInterrupt


class Interrupt:
    """One SIGINT, at the place of that number that is come to in the code of a ``package``; its handler is ``act``."""

    def __init__(
        self, number: int, *, deep: bool = False, package: str = PACKAGE, act: Callable[[], None] = interrupted
    ) -> None:
        self._left = number
        self._deep = deep
        self._package = package
        self._act = act
        self.came = False
        #: The functions of the places that were come to.
        self.places: list[str] = []

    def __enter__(self) -> Interrupt:
        signal.signal(signal.SIGINT, self._handle)
        gc.disable()  # what it ends at a moment of its own, Python's old threads above all, is no place of the work's
        sys._getframe().f_trace_opcodes = True  # else Python 3.12 reports none to the first trace function
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        gc.enable()

    def _called(self, frame: FrameType, event: str, arg: object) -> Any:
        here = [each.f_code.co_filename.startswith(self._package) for each in (frame, frame.f_back) if each]
        within = self._deep and frame.f_back and frame.f_back.f_trace
        return self._step if (within or any(here)) and frame.f_code is not UNSAFE else None

    def _step(self, frame: FrameType, event: str, arg: object) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in before_calls(frame.f_code):
            self._left -= 1
            self.places.append(frame.f_code.co_qualname)
            if self._left == 0:
                return _trip
        return self._step

    def _handle(self, number: int, frame: FrameType | None) -> None:
        sys.settrace(None)
        while frame:
            frame.f_trace = None
            frame = frame.f_back
        if not self.came:
            self.came = True
            self._act()


def attach(broker: Broker, name: str) -> None:
    pool = broker.attach("shared")
    pool["a"].tobytes()
    pool["a"].numpy()
    pool.close()


def sleep(broker: Broker, name: str) -> None:
    with broker.attach("shared") as pool:
        pool.sleep()
        pool.wake()
        pool["a"].tobytes()
        pool.sleep()


def switch(broker: Broker, name: str) -> None:
    with broker.attach("shared") as pool:
        with broker.create("shared", LAYOUT, share="vmm") as draft:
            draft.seal()
        pool.switch()
        pool["a"].tobytes()
        pool.sleep()
        pool.switch()


def hand_over(broker: Broker, name: str) -> None:
    with broker.attach("shared") as pool, pool.event("ready") as event:
        event.record()
        event.wait()
        with suppress(TimedOut):
            event.wait(timeout=0.001)
        with suppress(NotFound):
            pool.open_event("other")


def publish(broker: Broker, name: str) -> None:
    with broker.create(name, LAYOUT) as draft:
        draft["a"].copy_from_bytes(bytes(400))
        draft["b"].__dlpack__()
        draft.seal()
    broker.retire(name)


def publish_arrays(broker: Broker, name: str) -> None:
    with broker.attach("shared") as pool:
        broker.publish(name, {"a": pool["a"], "tied": pool["a"], "b": memoryview(bytes(100))})
    broker.retire(name)


def digest(broker: Broker, name: str) -> None:
    with broker.create(name, LAYOUT) as draft:
        draft.seal(digest=True)
    broker.retire(name)


def discard(broker: Broker, name: str) -> None:
    with broker.create(name, LAYOUT):
        pass


def watch(broker: Broker, name: str) -> None:
    with broker.watch("shared") as changes:
        next(changes)


def follow(broker: Broker, name: str) -> None:
    """Begin a watch that outlives the interrupt."""
    watches.append(broker.watch("shared"))
    next(watches[-1])


def close(broker: Broker, name: str) -> None:
    pool, draft = broker.attach("shared"), broker.create(name, LAYOUT)
    array = pool["a"].numpy()
    broker.close()
    del array, draft


def begin(broker: Broker, name: str) -> None:
    with Broker(broker.directory):
        pass


def load(broker: Broker, name: str) -> None:
    load_files(broker, name, files)


def verify(broker: Broker, name: str) -> None:
    assert not verify_files(broker, "shared", files).differences


def attempt(directory: str, work: Callable[[Broker, str], None], number: int) -> Interrupt:
    """Interrupt ``work`` at that place; at none if it is 0."""
    with Broker(directory, timeout=60) as broker:
        interrupt = Interrupt(number, deep=work in (load, verify))
        try:
            with interrupt:
                work(broker, f"own-{number}")
        except KeyboardInterrupt:
            pass
        broker.close()
        watches.clear()
    return interrupt


def chosen(places: list[str]) -> list[int]:
    """Return the numbers of the places to be tried, of all that there are."""
    numbers = range(1, len(places) + 1)
    if EVERYWHERE:
        return [*numbers]
    by_chance = random.Random(SEED).sample(numbers, min(BY_CHANCE, len(places)))
    return sorted({*by_chance, *(number for number in numbers if places[number - 1] in ALWAYS)})


def left(observer: Broker, threads: int, open_before: int) -> list[object]:
    """Return what there is besides the shared pool and the observer itself; ``open_before`` counts descriptors."""
    pools = [pool for pool in observer.pools() if pool.leases or pool.state == "draft"]
    others = [client for client in observer.clients() if client.session != observer.session]
    opened = descriptors(os.getpid()) - open_before
    return [*pools, *others, *threading.enumerate()[threads:], *["a descriptor"] * opened]


def main(directory: str, what: str) -> None:
    """Interrupt everywhere, and say how many places there were."""
    work: Callable[[Broker, str], None] = globals()[what]
    # A socket that was made and that nobody has yet is closed by its death, with a warning.
    warnings.simplefilter("ignore", ResourceWarning)
    with Broker(directory) as observer, tempfile.TemporaryDirectory() as folder:
        zeros = {spec.name: (spec.dtype, spec.shape, bytes(spec.nbytes)) for spec in LAYOUT.tensors}
        files.append(checkpoints.write(Path(folder) / "model.safetensors", zeros))
        share = "vmm" if what in ("sleep", "switch") else "ipc"
        with observer.create("shared", LAYOUT, share=share, writable=what == "hand_over") as draft:
            draft.seal()
        work(observer if what != "close" else Broker(directory), "warm")  # imports and contexts are made by now
        threads = threading.active_count()
        # While a session begins, an interrupt may come to a descriptor before its owner does.
        open_before = sys.maxsize if what == "begin" else descriptors(os.getpid())
        places = attempt(directory, work, 0).places
        for number in [0, *chosen(places)]:
            if number:
                attempt(directory, work, number)
            where = f"place {number}, with CUBROKER_SEED={SEED}"
            eventually(lambda: not left(observer, threads, open_before), f"the end of what came before {where}")
            for pool in observer.pools():
                if pool.name != "shared":
                    observer.retire(pool.name)
        observer.retire("shared")
    print(len(places))


if __name__ == "__main__":
    main(*sys.argv[1:])
