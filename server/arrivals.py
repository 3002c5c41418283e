"""Sessions on their way in: each is in the store, if there is one, before its client hears that it is open."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from cubroker.protocol.errors import CubrokerError, Unavailable
from cubroker.server.sessions import Session, label

if TYPE_CHECKING:
    from cubroker.server.store.store import Store


class Arrivals:
    """Follows sessions from their greeting to their welcome, which waits for the store, and for the journal.

    Args:
        store: has to have them, if there is one.
        again: called when it has one more that waited for it.
        refused: called when one that waited will not be stored, with the reason.
    """

    def __init__(
        self, store: Store | None, again: Callable[[], None], refused: Callable[[Session, CubrokerError], None]
    ) -> None:
        self._store = store
        self._again = again
        self._refused = refused
        self._unstored: set[Session] = set()
        self._unwelcomed: dict[Session, None] = {}

    def store(self, session: Session) -> None:
        """Store a session, now or soon.

        Raises:
            Unavailable: the store does not take it.
            OSError: there are no descriptors left for that.
        """
        try:
            if self._store and not self._store.hold_soon(
                label(session.number), session.descriptors, partial(self._done, session)
            ):
                self._unstored.add(session)
        except Unavailable as error:
            raise _mortal(error) from error

    def expect(self, session: Session) -> None:
        """Have a session welcomed."""
        self._unwelcomed[session] = None

    def arrived(self) -> list[Session]:
        """Return who is to be welcomed now, and forget them."""
        ready = [session for session in self._unwelcomed if session not in self._unstored]
        for session in ready:
            del self._unwelcomed[session]
        return ready

    def ended(self, session: Session) -> None:
        """Welcome a session no more."""
        self._unwelcomed.pop(session, None)

    def drop(self, session: Session) -> None:
        """Have a session that has ended in the store no longer."""
        self._unstored.discard(session)
        if self._store:
            self._store.drop_soon(label(session.number))

    def _done(self, session: Session, error: Unavailable | None) -> None:
        self._unstored.discard(session)
        if error is None:
            self._again()
        elif session in self._unwelcomed:  # it has not ended since
            self._refused(session, _mortal(error))


def _mortal(error: Unavailable) -> Unavailable:
    return Unavailable(
        f"this session would not outlive the broker: {error.message}; try again later, or have whoever runs the"
        f" broker see to what keeps it, systemd or cubroker keep"
    )
