"""Teams: the replicas of a multicast version, bound together so that one store goes to all of them.

A team begins when all memory of a draft is there, and ends with the version: it is dissolved first, and only then
is the memory freed, whoever died before. Where multicast cannot be had, copies take its place, for all
members together; the version, its leases and its end are the same.
"""

from __future__ import annotations

from cubroker.protocol import messages
from cubroker.server.books import Books
from cubroker.server.events import Assemble, Assembled, Dissolve, Dissolved
from cubroker.server.records import MULTICAST, Allocation, Team, Version
from cubroker.server.room import free
from cubroker.server.states import Impossible, Turn

COPIES = "copies"
"""How a team does without multicast; with it, the word is the share kind's."""

ALONE = "it is on one device, so there is nothing to bind together"


def assemble(books: Books, version: Version) -> bool:
    """Have the replicas of a version bound together, all of whose memory is there; False if it needs no team."""
    if version.share != MULTICAST or len(version.replicas) == 1:
        return False
    allocations = tuple(version.replicas.values())
    version.team = team = Team(next(books.tickets), version)
    books.teams[team.id] = team
    members = tuple((allocation.account.device.uuid, allocation.ticket) for allocation in allocations)
    books.effects.append(Assemble(team.id, allocations[0].sizes, members))
    return True


def assembled(books: Books, event: Assembled) -> Version:
    """Note how a team was assembled, and return whose it is; raises ``Impossible`` if none is being assembled."""
    team = _known(books, event.team)
    team.move(Turn.ASSEMBLED)
    team.how, team.why, team.sizes = event.how, event.why, event.sizes
    return team.version


def give_up(books: Books, version: Version) -> None:
    """Have the team of a version that ended dissolved, if it has one, also while it is being assembled."""
    if version.team is not None:
        version.team.move(Turn.RELEASED)
        books.effects.append(Dissolve(version.team.id))


def dissolved(books: Books, event: Dissolved) -> None:
    """Have the memory of a team freed, to which nothing is bound any more."""
    team = _known(books, event.team)
    team.move(Turn.DISSOLVED)
    del books.teams[team.id]
    for allocation in team.version.replicas.values():
        free(books, allocation)


def _known(books: Books, number: int) -> Team:
    team = books.teams.get(number)
    if team is None:
        raise Impossible(f"an outcome of team {number}, which is not on the books")
    return team


def reached(version: Version, here: Allocation, device: str | None) -> tuple[tuple[Allocation, ...], Team | None]:
    """Return what a reader on ``device`` is handed, ``here`` first, and the team if it may store through that.

    Only who may write is handed more than one replica, and only on a device that has one: an object of multicast
    is of no use to others.
    """
    team = version.team
    if team is None or not version.writable or device not in version.replicas:
        return (here,), None
    if team.how == MULTICAST:
        return (here,), team
    return (here, *(other for other in version.replicas.values() if other is not here)), None


def message(version: Version, *, objects: bool) -> messages.Team | None:
    """Say how all replicas of a version are written at once, with the sizes of the ``objects`` for who gets them.

    None: it is no multicast version, or nothing is known yet.
    """
    team = version.team
    if team is None:
        alone = version.share == MULTICAST and len(version.replicas) == 1
        return messages.Team(COPIES, ALONE) if alone else None
    return messages.Team(team.how, team.why, team.sizes if objects else ())
