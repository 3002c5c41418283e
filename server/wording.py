"""The ledger's refusals in words: what was asked, what stood in the way, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from heapq import nlargest
from itertools import islice

from cubroker.server.records import Account, Phase, Pool, Reader, Version, Waiter, Writer
from cubroker.server.states import PROMISED, Stage, State

NEAR_NAMES = 32
NEAR_LENGTH = 48
"""Names that are compared with one that was not found, and characters of the longest of them.

Comparing two names costs up to the product of their lengths, and any client may ask for what is not
there: with these limits the worst names cost some milliseconds, usual ones a third of one.
"""


def size(nbytes: int) -> str:
    """Return bytes for people, exact as long as they are whole units: ``2 MiB``, ``1.50 GiB``."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes // scale} {unit}" if nbytes % scale == 0 else f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} bytes"


def no_pool(name: str, pools: Iterable[Pool], last: int) -> str:
    """Say that there is no pool of this name, of which ``last`` versions were published before; or which is near."""
    if last:
        return f"no version of {name} is left: {last} was the last one, and it was retired; load it again"
    names = [pool.name for pool in islice(pools, NEAR_NAMES) if pool.versions and len(pool.name) <= NEAR_LENGTH]
    near = get_close_matches(name[:NEAR_LENGTH], names)
    hint = f"did you mean {' or '.join(near)}?" if near else "the list of pools has the names there are"
    return f"no pool is named {name!r}; {hint}"


def no_current(pool: Pool) -> str:
    """Say why a pool has no current version."""
    if pool.draft is not None:
        return (
            f"{pool.name} has no current version: {pool.draft.label} is being written by {pool.draft.writer};"
            f" wait for it to be sealed"
        )
    if pool.last:
        return f"{pool.name} has no current version: it was retired, and {pool.last} was the last one; load it again"
    return f"{pool.name} has no current version: nobody has published one yet; wait for it, or load it"


def no_version(pool: Pool, number: int) -> str:
    """Say that a version was not published yet."""
    if pool.draft is not None and pool.draft.number == number:
        return f"{pool.draft.label} is being written by {pool.draft.writer}; wait for it to be sealed"
    return (
        f"{pool.name} has no version {number}: the last published one is {pool.last}; wait for it, or ask for another"
    )


def retired(name: str, number: int, current: int) -> str:
    """Say that a version is out of service for good."""
    hint = f"the current one is {current}" if current else "no other one is current"
    return f"{name}@{number} was retired or replaced and is out of service; {hint}"


def not_here(version: Version, uuid: str) -> str:
    """Say that a version has no replica on a device."""
    return f"{version.label} is not on device {uuid}; it is on {', '.join(version.replicas)}"


def which_device(version: Version) -> str:
    """Say that a device has to be named."""
    return f"{version.label} is on several devices, {', '.join(version.replicas)}; say which one to attach to"


def no_device(uuid: str, known: Iterable[str]) -> str:
    """Say that the broker has no such device."""
    return f"this broker has no device {uuid}; it has {', '.join(known)}"


def no_lease(lease: int) -> str:
    """Say that a session holds no such lease, whether or not another one does."""
    return f"this session holds no lease {lease}; it was closed already, or was never its own"


def not_owner(uid: int, name: str, owner: int | None) -> str:
    """Say that a user may not change a pool."""
    return (
        f"user {uid} may not publish or retire versions of {name}, which belongs to user {owner};"
        f" attach to it, or use another name"
    )


def taken(pool: Pool) -> str:
    """Say who has the turn as the writer of a pool."""
    if pool.draft is not None:
        return (
            f"{pool.draft.label} is being written by {pool.draft.writer}; wait for its turn to end, or use another name"
        )
    assert pool.writer is not None
    return (
        f"the next version of {pool.name} is to be written by {pool.writer.session.label}, which waits for room;"
        f" wait as well, or use another name"
    )


def never_fits(name: str, nbytes: int, account: Account) -> str:
    """Say that a request is larger than a device's whole budget."""
    device = account.device
    return (
        f"{name} needs {size(nbytes)} on device {device.uuid}, whose whole budget is {size(device.budget)};"
        f" give the broker a larger budget, or spread the tensors over several pools and devices"
    )


def no_room(writer: Writer) -> str:
    """Say which device has no room for a create, and what takes it."""
    account = next((account for account in writer.accounts if account.room < writer.nbytes), None)
    if account is None:
        first = next(account for account in writer.accounts if account.line[0] is not writer)
        return (
            f"{writer.pool.name} needs {size(writer.nbytes)} on device {first.device.uuid}, where"
            f" {first.place(writer)} earlier requests wait for room; wait as well,"
            f" or retire what is not needed"
        )
    device = account.device
    return (
        f"{writer.pool.name} needs {size(writer.nbytes)} on device {device.uuid}: of its budget of"
        f" {size(device.budget)}, {size(account.allocated)} are allocated and {size(account.promised)} promised"
        f"{_holders(account)}; retire what is not needed, or wait"
    )


def _holders(account: Account) -> str:
    largest = nlargest(3, account.allocations.values(), key=lambda allocation: allocation.nbytes)
    words = []
    for allocation in largest:
        version = allocation.version
        state = allocation.stage.value if allocation.stage is Stage.FREEING else version.state.value
        if allocation.stage in PROMISED:
            state = allocation.stage.value
        words.append(
            f"{version.label} {size(allocation.nbytes)} ({state}, user {version.owner}, {version.leases} leases)"
        )
    return f"; the largest are {', '.join(words)}" if words else ""


def waited(waiter: Waiter) -> str:
    """Say what a request waited for in vain."""
    name, seconds = waiter.pool.name, f"waited {waiter.body.wait:g} s"
    if isinstance(waiter, Reader):
        return f"attach to {name} {seconds} for it to be published: {unpublished(waiter.pool, waiter.body.version)}"
    return f"create of {name} {seconds} for {waiter.phase.value}: {blocked(waiter)}"


def unpublished(pool: Pool, number: int) -> str:
    """Say why a version (0: the current one) is not there yet."""
    return no_version(pool, number) if number else no_current(pool)


def blocked(writer: Writer) -> str:
    """Say what keeps a create from its draft."""
    return taken(writer.pool) if writer.phase is Phase.TURN else no_room(writer)


def still_draft(version: Version) -> str:
    """Say that a draft cannot be retired."""
    assert version.state in (State.ALLOCATING, State.DRAFT)
    return f"{version.label} is a draft of {version.writer}; it ends when that session closes it, or ends itself"
