"""What there is not enough of, in words: quotas and the store, how much of them is used, and what takes most of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import nlargest
from itertools import islice

from cubroker.server.ledger.books import Books
from cubroker.server.ledger.entries import SESSION, Allocation, Footprint, Session, User
from cubroker.server.ledger.states import Stage
from cubroker.server.ledger.waiters import Writer

SURVEY = 1000
"""Sessions or allocations of one user that are looked at for its largest."""


def size(nbytes: int) -> str:
    """Return bytes for people, exact as long as they are whole units: ``2 MiB``, ``1.50 GiB``."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes // scale} {unit}" if nbytes % scale == 0 else f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} bytes"


def state(allocation: Allocation) -> str:
    """The state of a version, or of its memory as long as that comes or goes."""
    return allocation.version.state.value if allocation.stage is Stage.HELD else allocation.stage.value


def store_is_full(books: Books, more: int, reserve: int) -> str:
    """Say that the store has no room for so many more descriptors, where ``reserve`` are not for everybody."""
    sessions = SESSION * len(books.sessions)
    kept = f", {reserve} of them held back for root, administrators and the broker's own user" if reserve else ""
    return (
        f"this takes {more} places of the broker's store, which has {books.store}{kept}: {sessions} are taken by"
        f" {len(books.sessions)} sessions, and {books.stored - sessions} by durable memory; end some sessions, retire"
        f" durable versions, or give it a larger store"
    )


def never_affords(user: User, name: str, nbytes: int) -> str:
    """Say that a create is larger than its user's whole quota."""
    assert user.quota.memory is not None
    return (
        f"{name} needs {size(nbytes)}, devices taken together, and the quota of user {user.uid} is"
        f" {size(user.quota.memory)}; ask for a larger quota, or make it smaller"
    )


def too_much_memory(writer: Writer) -> str:
    """Say that a create has no room in its user's quota, and what takes it."""
    user = writer.session.user
    assert user.quota.memory is not None
    ahead = user.place(writer)
    line = f", and {ahead} earlier creates of this user wait for room in it" if ahead else ""
    return (
        f"{writer.pool.name} needs {size(writer.total)} of the quota of user {user.uid}: of"
        f" {size(user.quota.memory)}, {size(user.memory)} are used or set aside{_hoard(user)}{line};"
        f" retire what is not needed, or wait"
    )


def too_many_leases(user: User) -> str:
    """Say that a user has all the leases that it may have."""
    most = _most(user, lambda session: len(session.leases))
    return f"user {user.uid} holds {user.leases} leases of a quota of {user.quota.leases}{most}; close some of them"


def too_many_requests(user: User) -> str:
    """Say that a user has all the requests waiting that it may have."""
    most = _most(user, lambda session: len(session.unfinished))
    return (
        f"user {user.uid} has {user.unfinished} unfinished requests of a quota of {user.quota.requests}{most};"
        f" cancel some of them"
    )


def too_many_watches(user: User) -> str:
    """Say that a user has all the watches that it may have."""
    most = _most(user, lambda session: len(session.watches))
    return f"user {user.uid} has {user.watches} watches of a quota of {user.quota.watches}{most}; end some of them"


def too_many_events(user: User) -> str:
    """Say that a user has all the events that it may have."""
    most = _most(user, lambda session: len(session.signals))
    return f"user {user.uid} has {user.events} events of a quota of {user.quota.events}{most}; close some of them"


def too_many_sessions(uid: int, limit: int | None, user: User | None) -> str:
    """Say that a user has all the sessions that it may have."""
    used = len(user.sessions) if user else 0
    most = f" ({_processes(user)})" if user and used else ""
    return f"user {uid} has {used} sessions of a quota of {limit}{most}; end some of them"


def too_many_layouts(user: User, nbytes: int) -> str:
    """Say that the broker keeps all the layouts for a user that it does."""
    assert user.quota.layouts is not None
    return (
        f"this layout takes {size(nbytes)}, and those of user {user.uid} take {size(user.layouts)} of a quota of"
        f" {size(user.quota.layouts)}; retire what is not needed, or describe fewer tensors"
    )


def too_many_descriptors(uid: int, more: int, limit: int | None, user: User | None) -> str:
    """Say that a user has all of the broker's descriptors that it may have."""
    used, takers = (user.descriptors, _takers(user)) if user else (0, "")
    return (
        f"this takes {more} of the broker's descriptors, and user {uid} has {used} of a quota of {limit}{takers};"
        f" end some sessions, or retire memory that is not needed"
    )


def too_much_beyond(uid: int, footprint: Footprint, limit: int) -> str:
    """Say that a user has more memory beyond its leases than it may, and which processes have it."""
    sizes = ((sum((memory or {}).values()), pid) for pid, memory in footprint.processes.items())
    largest = nlargest(3, (pair for pair in sizes if pair[0]))
    who = ", ".join(f"process {pid} {size(nbytes)}" for nbytes, pid in largest)
    pids = " ".join(str(pid) for _, pid in largest)
    return (
        f"processes of user {uid} have {size(footprint.nbytes)} of the broker's memory mapped or open that no lease of"
        f" this user covers, of a quota of {size(limit)} ({who}); unmap it and close its descriptors there, or end"
        f" these processes (kill {pids})"
    )


def _processes(user: User) -> str:
    pids = Counter(session.pid for session in islice(user.sessions.values(), SURVEY))
    return ", ".join(f"{number} of process {pid}" for pid, number in pids.most_common(3))


def _takers(user: User) -> str:
    """What takes most of a user's descriptors."""
    largest = nlargest(3, islice(user.allocations.values(), SURVEY), key=lambda allocation: allocation.descriptors)
    memory = (f"{each.version.label} {each.descriptors} ({state(each)})" for each in largest if each.descriptors)
    kinds = ((f"{len(user.sessions)} sessions", _processes(user)), ("memory", ", ".join(memory)))
    words = "; ".join(f"{kind}, {which}" for kind, which in kinds if which)
    return f" ({words})" if words else ""


def _most(user: User, count: Callable[[Session], int]) -> str:
    counts = ((count(session), session) for session in islice(user.sessions.values(), SURVEY))
    largest = nlargest(3, (pair for pair in counts if pair[0]), key=lambda pair: pair[0])
    words = ", ".join(f"session {session.id} (pid {session.pid}) {number}" for number, session in largest)
    return f" ({words})" if words else ""


def _hoard(user: User) -> str:
    largest = nlargest(3, islice(user.allocations.values(), SURVEY), key=lambda allocation: allocation.nbytes)
    words = ", ".join(f"{each.version.label} {size(each.nbytes)} ({state(each)})" for each in largest)
    return f"; the largest are {words}" if words else ""
