"""Teams: the replicas of a multicast version, bound together so that one store goes to all of them.

A team begins when all memory of a draft is there, and ends with the version: it is dissolved first, and only then
is the memory freed, whoever died before. Where multicast cannot be had, copies take its place, for all
members together; the version, its leases and its end are the same.
"""

from __future__ import annotations

from cubroker.protocol import messages
from cubroker.server.ledger.books import Books, Kind
from cubroker.server.ledger.entries import MULTICAST, Allocation, Lease, Team, Version
from cubroker.server.ledger.events import Assemble, Assembled, Dissolve, Dissolved, HandOver, Notify
from cubroker.server.ledger.room import free
from cubroker.server.ledger.states import Impossible, State, Turn

COPIES = "copies"
"""How a team does without multicast; with it, the word is the share kind's."""

ALONE = "it is on one device, so there is nothing to bind together"


def assemble(books: Books, version: Version) -> bool:
    """Have the replicas of a version bound together, all of whose memory is there; False if it needs no team."""
    if not version.several:
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


def rebind(books: Books, version: Version) -> None:
    """Tell everybody who writes all replicas of a restored version how that is done from now on."""
    team = version.team
    assert team is not None
    for lease in version.holders.values():
        if lease.bound:
            _rebind(books, lease, team)


def _rebind(books: Books, lease: Lease, team: Team) -> None:
    """Hand over what a lease needs for the team as it is now, beside what it has of its own device, or as a draft's."""
    version, session, others = lease.version, lease.session, tuple[Allocation, ...]()
    if version.state is not State.DRAFT:
        lease.allocations = reached(version, lease.allocations[0])
        others = lease.allocations[1:]
        books.mark(Kind.LEASE, lease.id)
    if session.connected:
        replicas = tuple(messages.Replica(other.account.device.uuid, other.handles) for other in others)
        told = messages.Rebound(lease.id, replicas, messages.Team(team.how, team.why, team.sizes))
        books.effects.append(Notify(session.id, told))
        tickets = tuple((other.account.device.uuid, other.ticket) for other in others)
        if tickets or team.sizes:
            objects = team.id if team.sizes else 0
            books.effects.append(HandOver(session.id, lease.id, tickets, objects, rebound=True, writable=True))


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


def binds(version: Version, device: str | None) -> bool:
    """Say whether a reader on ``device`` may write all replicas at once.

    An object of multicast is of use only on a device that has a replica.
    """
    return version.several and version.writable and device in version.replicas


def reached(version: Version, here: Allocation) -> tuple[Allocation, ...]:
    """Return what is handed to whoever writes all replicas at once, ``here`` first: all of them if it is by copies."""
    if version.team is None or version.team.how != COPIES:
        return (here,)
    return (here, *(other for other in version.replicas.values() if other is not here))


def message(version: Version, *, objects: bool) -> messages.Team | None:
    """Say how all replicas of a version are written at once, with the sizes of the ``objects`` for who gets them.

    None: it is no multicast version. Nothing is known as long as the team is put together.
    """
    if version.share != MULTICAST:
        return None
    if not version.several:
        return messages.Team(COPIES, ALONE)
    team = version.team
    if team is None:
        return messages.Team("", "")
    return messages.Team(team.how, team.why, team.sizes if objects else ())
