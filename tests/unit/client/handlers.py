"""Runs a signal handler that uses the same Broker at every STEP-th place of one call, from place FIRST on.

Its arguments are ``DIRECTORY WHAT FIRST STEP``.

Places are those of :mod:`tests.unit.client.interrupts`, here also in the driver and in the protocol. The handler
attaches to
a pool and closes it, and another that was open. Each time it gets what it wants or is refused at once: it never waits
for what its own thread has to go on with first. The call that it came into ends as if nothing had happened.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import PurePath

from cubroker.client import Broker, devices
from cubroker.protocol.errors import Unavailable
from tests.brokers import eventually
from tests.unit.client import interrupts
from tests.unit.client.interrupts import LAYOUT, PACKAGE, Interrupt

EVERYTHING = str(PurePath(PACKAGE).parent)

LIMIT = 60.0
"""Seconds that a call waits for its answer: longer than a busy machine takes, and less than a test may."""


def attempt(directory: str, what: str, number: int) -> str:
    """Come into a call at that place; return how the handler fared, or an empty text if there is no such place."""
    devices._drivers.clear()  # to come into the loading of a driver and the making of a context as well
    with Broker(directory, timeout=LIMIT) as broker:
        opened = broker.attach("shared")
        fared: list[str] = []

        def handle() -> None:
            opened.close()
            try:
                with broker.attach("shared") as pool:
                    assert pool["a"].tobytes() == bytes(400)
                fared.append("done")
            except Unavailable as error:
                fared.append("refused" if "inside a driver call or a fork" in error.message else error.message)

        with Interrupt(number, package=EVERYTHING, act=handle):
            getattr(interrupts, what)(broker, f"own-{number}")
        assert broker.pools()
    return "".join(fared)


def main(directory: str, what: str, first: str, step: str) -> None:
    """Come into it everywhere, and say in how many places the handler got what it wanted, and in how many not."""
    fared: Counter[str] = Counter()
    with Broker(directory) as observer:
        with observer.create("shared", LAYOUT, share="vmm", writable=what == "hand_over") as draft:
            draft.seal()
        getattr(interrupts, what)(observer, "warm")  # imports are made by now
        number = int(first)
        while outcome := attempt(directory, what, number):
            fared[outcome] += 1
            number += int(step)
        eventually(lambda: len(observer.clients()) == 1, "the sessions to end")
        eventually(lambda: {pool.leases for pool in observer.pools()} == {0}, "the leases to end")
        for pool in observer.pools():
            observer.retire(pool.name)
    assert fared.keys() <= {"done", "refused"}, fared
    print(fared["done"], fared["refused"])


if __name__ == "__main__":
    main(*sys.argv[1:])
