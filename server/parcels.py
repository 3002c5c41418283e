"""The descriptors of a lease on their way to its holder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

from cubroker.protocol import wire
from cubroker.protocol.bounds import MAX_DESCRIPTORS
from cubroker.protocol.messages import Descriptors

Lend = Callable[[Sequence[int]], AbstractContextManager[Sequence[int]]]


class Parcel:
    """All descriptors of one lease, in packets, each as large as a notice may be.

    It holds numbers of tickets, and looks a descriptor up when it is to be sent: it keeps nothing open, not even where
    others than the broker's own are lent.

    Args:
        lease: whose they are.
        tickets: whose descriptors they are, in order; a team's number is as good as a ticket's.
        descriptors: those of every ticket; of these tickets for as long as the parcel is not thrown away.
        done: told, with the lease, that all of it was sent.
        rebound: whether they belong to the lease's ``Rebound``, and not to the answer that granted it.
        lend: has the descriptors that are sent in the place of these, for the length of a ``with`` block.
    """

    def __init__(
        self,
        lease: int,
        tickets: Iterable[int],
        descriptors: Mapping[int, tuple[int, ...]],
        done: Callable[[int], None] = lambda _: None,
        *,
        rebound: bool = False,
        lend: Lend = nullcontext,
    ) -> None:
        self.lease = lease
        self.lend = lend
        self._rebound = rebound
        self._descriptors = descriptors
        self._done = done
        self._first = 0
        self._places = ((ticket, place) for ticket in tickets for place in range(len(descriptors[ticket])))
        self._next = self._take()

    def packet(self) -> tuple[bytes, list[int]] | None:
        """Return the next notice and its descriptors, the same until it is :meth:`sent`; None after the last."""
        if not self._next:
            return None
        notice = Descriptors(self.lease, len(self._next), self._first, self._rebound)
        return wire.pack(notice), [self._descriptors[ticket][place] for ticket, place in self._next]

    def sent(self) -> None:
        """Go on to the next packet."""
        self._first += len(self._next)
        self._next = self._take()
        if not self._next:
            self._done(self.lease)

    def _take(self) -> list[tuple[int, int]]:
        return list(islice(self._places, MAX_DESCRIPTORS))
