"""The memory on the books: allocations, the bytes that they take of a device's budget, and their end."""

from __future__ import annotations

from cubroker.protocol.layout import round_up
from cubroker.server.ledger.books import Books
from cubroker.server.ledger.entries import Account, Allocation, User, Version
from cubroker.server.ledger.events import Allocate, Free
from cubroker.server.ledger.states import ALLOCATED, PROMISED, Impossible, Report, Stage

GRANULARITY = 2 << 20
"""Bytes. Smaller pieces of device memory would share a block, and opening one would expose its neighbours."""


def rounded(nbytes: int) -> int:
    """Return the bytes that an allocation takes of its device."""
    return round_up(nbytes, GRANULARITY)


def allocate(books: Books, version: Version, account: Account, sizes: tuple[int, ...]) -> None:
    """Promise a version its memory on one device, and have it allocated; its user's quota has it set aside already."""
    allocation = Allocation(next(books.tickets), account, version, sizes, sum(sizes))
    version.replicas[account.device.uuid] = allocation
    books.allocations[allocation.ticket] = account.allocations[allocation.ticket] = allocation
    version.user.allocations[allocation.ticket] = allocation
    account.promised += allocation.nbytes
    books.effects.append(Allocate(allocation.ticket, account.device.uuid, sizes, version.share, version.durable))


def under_way(books: Books, ticket: int) -> Allocation:
    """Return the allocation whose outcome is reported; raises ``Impossible`` if none is under way."""
    allocation = books.allocations.get(ticket)
    if allocation is None:
        raise Impossible(f"an outcome of ticket {ticket}, which is not on the books")
    return allocation


def shift(allocation: Allocation, report: Report) -> None:
    """Move an allocation one step, and its bytes from one column of its account to the other."""
    before = allocation.stage
    allocation.move(report)
    _count(allocation, before, -allocation.nbytes)
    _count(allocation, allocation.stage, allocation.nbytes)


def _count(allocation: Allocation, stage: Stage, nbytes: int) -> None:
    if stage in PROMISED:
        allocation.account.promised += nbytes
    elif stage in ALLOCATED:
        allocation.account.allocated += nbytes


def give_up(books: Books, allocation: Allocation) -> None:
    """Have memory freed that nobody needs any more, or that nobody will once it is allocated.

    Memory of a team is freed once that is dissolved.
    """
    shift(allocation, Report.RELEASED)
    if allocation.version.team is None:
        free(books, allocation)


def free(books: Books, allocation: Allocation) -> None:
    """Have memory freed that was given up, and to which nothing is bound."""
    books.effects.append(Free(allocation.ticket, allocation.account.device.uuid))


def take_off(books: Books, allocation: Allocation, report: Report) -> None:
    """Take an allocation off the books: its device has the bytes, so somebody may have room now."""
    shift(allocation, report)
    user = allocation.version.user
    del books.allocations[allocation.ticket]
    del allocation.account.allocations[allocation.ticket]
    del user.allocations[allocation.ticket]
    books.stirred_accounts[allocation.account] = None
    if not allocation.account.allocations:
        books.absent.pop(allocation.account.device.uuid, None)
    user.pieces -= allocation.descriptors
    books.stored -= allocation.stored
    spare(books, user, allocation.nbytes)
    books.part(user)


def lose(account: Account, nbytes: int) -> None:
    """Count bytes of an allocation that failed and that the device kept: they are nobody's, and stay."""
    account.allocated += nbytes
    account.lost += nbytes


def spare(books: Books, user: User, nbytes: int) -> None:
    """Count bytes to a user's quota no longer; whoever is first in its line may have room now."""
    user.memory -= nbytes
    stir(books, user)


def stir(books: Books, user: User) -> None:
    """Look again at whoever waits first for room in a user's quota."""
    if user.line:
        books.stirred_users[user] = None
