"""Driver calls that may never return, each on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread

from cubroker.client.futures import Future
from cubroker.driver import DriverError
from cubroker.protocol.errors import Unavailable

GIVEN_UP = Unavailable("nobody waits for it any more")


class Errand:
    """One call, to a driver. Whoever waits for it can be told that there is no use in it."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._over: Future[DriverError | ValueError | None] = Future()
        self._returned = Event()

    def run(self) -> bool:
        """Make the call, and return True once it has returned; False if it was given up: it may go on, or for ever.

        Raises:
            DriverError, ValueError: the call did.
        """
        thread = Thread(target=self._run, name="cubroker-errand", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # threads have run out
            self._run()
        try:
            error = self._over.result()
        except Unavailable:
            return False
        self._over.abandon()  # an error's traceback refers to this frame, so nothing here may refer to the error
        try:
            if error:
                raise error
        finally:
            del error
        return True

    def give_up(self) -> None:
        """Have :meth:`run` return. In any thread, at any time."""
        self._over.fail(GIVEN_UP)

    def returns(self, timeout: float) -> bool:
        """Whether the call has returned, though nobody waited for it, or does within so many seconds."""
        return self._returned.wait(timeout)

    def _run(self) -> None:
        try:
            if not self._over.done():
                self._call()
        except (DriverError, ValueError) as error:
            self._over.set(error)
        else:
            self._over.set(None)
        finally:
            self._returned.set()
