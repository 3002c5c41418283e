"""What the requests of one user cost the broker's memory, those of all of its sessions together.

All that a peer can have the broker keep is counted in one place: requests that wait for an answer, or for their turn,
and answers that their clients have not acknowledged. The bound is the user's, so that more sessions are not more
memory. A layout counts once, however many of the user's requests and answers have it: a thousand workers that attach
to one model, or that offer the same one, cost its layout once. What a session has is given back when it ends.
"""

from __future__ import annotations

from collections.abc import Generator
from weakref import WeakValueDictionary

from cubroker.protocol import layout as layouts
from cubroker.protocol.errors import InternalFailure, Invalid
from cubroker.protocol.layout import Outline
from cubroker.protocol.messages import Failed

MAX_BYTES = 64 << 20
"""Bytes that the requests and answers of one user may cost; some times the largest message."""

SHARE = 16 << 10
"""Bytes of these that each session may have whatever its user has, so that one session does not stop the others."""

OVERHEAD = 512
"""Bytes that a request or an answer counts beside its own, for what is known of it."""


class SharedLayout:
    """An encoded layout, and what came of checking it.

    Attributes:
        data: the layout as it travels.
        holders: how many requests and answers of the user have it.
    """

    __slots__ = ("_outcome", "data", "holders")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.holders = 0
        self._outcome: Outline | Failed | None = None

    def check(self) -> Generator[None, None, Outline | Failed]:
        """Check it in short steps, or say what was found before."""
        if self._outcome is None:
            try:
                self._outcome = yield from layouts.outline(self.data)
            except Invalid as error:
                self._outcome = Failed(error.code, error.message)
            except MemoryError:  # which passes, so that the same layout may be checked again
                reason = f"the broker has no memory to check a layout of {len(self.data)} bytes; make it smaller"
                return Failed(InternalFailure.code, reason)
        return self._outcome


class Account:
    """What one user's requests and answers cost.

    Attributes:
        nbytes: what they cost together, in bytes.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._layouts: dict[bytes, SharedLayout] = {}

    def has_room(self, nbytes: int, layout: bytes) -> bool:
        """Whether ``nbytes`` more may be kept, and a layout, which may be empty."""
        new = 0 if layout in self._layouts else len(layout)
        return self.nbytes + nbytes + new <= MAX_BYTES

    def add(self, nbytes: int, layout: bytes) -> None:
        """Count ``nbytes`` more, and one who has a layout."""
        self.nbytes += nbytes
        if layout:
            shared = self._layouts.get(layout)
            if shared is None:
                shared = self._layouts[layout] = SharedLayout(layout)
                self.nbytes += len(layout)
            shared.holders += 1

    def remove(self, nbytes: int, layout: bytes) -> None:
        """Count no more what was added."""
        self.nbytes -= nbytes
        if layout:
            shared = self._layouts[layout]
            shared.holders -= 1
            if not shared.holders:
                del self._layouts[layout]
                self.nbytes -= len(layout)

    def shared(self, layout: bytes) -> SharedLayout:
        """Return the one copy of a layout that was added; nobody shares an empty one."""
        return self._layouts.get(layout) or SharedLayout(layout)


class Accounts:
    """The accounts of all users that have sessions."""

    def __init__(self) -> None:
        self._accounts: WeakValueDictionary[int, Account] = WeakValueDictionary()

    def of(self, uid: int) -> Account:
        """Return a user's account, which stays as long as somebody refers to it."""
        account = self._accounts.get(uid)
        if account is None:
            account = self._accounts[uid] = Account()
        return account
