"""What the model says of a broker that is killed and started again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cubroker.protocol import messages as m
from cubroker.server.ledger import Budget, Limits
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import Policy
from tests.fuzz.simulation.records import MulticastGroup, Version

if TYPE_CHECKING:
    from tests.fuzz.simulation.model import Model


def restart(model: Model, devices: tuple[Budget, ...], limits: Limits, policy: Policy, store: int) -> None:
    """Forget whatever waits, comes or goes; there may be other rules."""
    model.devices, model.limits, model.policy, model.store = devices, limits, policy, store
    model.restarting = True
    model.requests.clear()
    model.awaited = None
    model.multicast_groups.clear()
    model.versions = [version for version in model.versions if version.state != "allocating"]
    for block in model.blocks:
        block.cells = [cell for cell in block.cells if model.having(cell)]
    model.blocks = [block for block in model.blocks if block.cells]
    model.lost = dict.fromkeys(model.lost, 0)
    for name in list(model.owners):
        if not model.of(name):
            model.disown(name)
    for name in list(model.past):
        if name not in model.last:  # nothing is recorded of it
            del model.past[name]


def vanished(model: Model, event: e.MemoryLost) -> None:
    block = next(block for block in model.blocks if block.ticket == event.ticket)
    for version in sorted(model.versions, key=lambda version: version.number):
        if version.state != "lost" and any(cell in block.cells for cell in model.cells_of(version)):
            lose(model, version, event)


def lose(model: Model, version: Version, event: e.MemoryLost) -> None:
    was, version.state, version.why = version.state, "lost", event.why
    if not model.restarting:
        tell(model, version)
    if was == "current":
        model.announce(version.name)
    if was == "draft":
        model.withdraw(version)
    if model.end_if_unused(version) and was != "current":
        model.announce(version.name)


def tell(model: Model, version: Version) -> None:
    """Everybody who holds a version hears that it is lost."""
    for session in model.sessions:
        if session.connected and any((lease.session, lease.version) == (session, version) for lease in model.leases):
            model.out.notices.append((session.id, m.PoolLost(version.name, version.number, version.why)))


def resumed(model: Model) -> None:
    """Go on. Who holds what is lost hears of it, perhaps not for the first time."""
    model.restarting = False
    for version in list(model.versions):
        model.end_if_unused(version)
    for version in sorted(model.versions, key=lambda version: (version.name, version.number)):
        if version.state == "lost":
            tell(model, version)
        elif model.several(version):
            model.multicast_groups.append(MulticastGroup(version))
            model.out.bound.append(model.multicast_groups[-1])
    for session, name in model.watches:
        if model.hears(session, name):
            model.notice(session, name)


def rebound(model: Model, group: MulticastGroup) -> None:
    """Everybody who writes all replicas is told how, and gets what that takes beside the own replica."""
    for lease in model.leases:
        if lease.version is group.version and lease.bound and lease.session.connected:
            own = group.version.homes if lease.writes else [lease.home]
            others = [home for home in group.version.homes if home not in own and group.how == "copies"]
            replicas, told = tuple(map(model.replica, others)), m.Team(group.how, group.why, group.sizes)
            model.out.notices.append((lease.session.id, m.Rebound(lease.id, replicas, told)))
            if others or group.sizes:
                model.out.handed.append((lease, others, group if group.sizes else None))
