"""Requests that wait at the broker while a thread waits here, until either gives up."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from cubroker.client.futures import Future
from cubroker.client.requests import Pending, expect
from cubroker.protocol.errors import CubrokerError
from cubroker.protocol.messages import AwaitEvent, Cancel, OpenEvent, Reply

if TYPE_CHECKING:
    from cubroker.client.session import Session

R = TypeVar("R", bound=Reply)


class Waits:
    """Those of one object, so that its end can end them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._under_way: dict[Pending, Future[Reply]] = {}
        self._over: CubrokerError | None = None

    def ask(self, body: OpenEvent | AwaitEvent, kind: type[R]) -> R:
        """Send a request and wait for its answer, a ``kind``. If the caller gives up, the broker is told."""
        self._session.owner.check()
        self._session.check_open()
        future: Future[Reply] = Future()
        answers: list[Reply | CubrokerError] = []

        def settle(answer: Reply | CubrokerError) -> None:
            answers.append(answer)
            future.settle(answer)

        request = Pending(settle)
        try:
            self._under_way[request] = future
            if self._over:  # looked at last: `give_up` either sees the request, or is seen here
                raise self._over.anew()
            self._session.requests.post(body, request)
            return expect(self._session.wait(future, type(body).__name__, body.wait), kind)
        except BaseException:
            if request.number and not answers:
                self._session.requests.submit(Cancel(request.number))
            raise
        finally:
            self._under_way.pop(request, None)

    def give_up(self, reason: CubrokerError, *, for_good: bool) -> None:
        """Have every thread that waits raise ``reason``; and if ``for_good``, every later one too."""
        if for_good:
            self._over = reason
        for future in tuple(self._under_way.values()):
            future.fail(reason)
