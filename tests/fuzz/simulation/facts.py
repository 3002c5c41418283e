"""What is so, as far as the model knows."""

from __future__ import annotations

from cubroker.protocol import messages as m
from cubroker.protocol import status
from cubroker.protocol.layout import Outline
from cubroker.server.ledger import Budget, Limits
from cubroker.server.ledger.policy import Policy, Quota
from tests.fuzz.simulation.records import (
    Block,
    Cell,
    Home,
    Lease,
    Lock,
    MulticastGroup,
    Request,
    Session,
    Signal,
    Version,
)


class Facts:
    """All that the model knows, in lists, and ways to look it up."""

    def __init__(self, devices: tuple[Budget, ...], uid: int, limits: Limits, policy: Policy) -> None:
        self.devices, self.uid, self.limits, self.policy = devices, uid, limits, policy
        self.sessions: list[Session] = []
        self.versions: list[Version] = []
        self.blocks: list[Block] = []
        self.multicast_groups: list[MulticastGroup] = []
        self.leases: list[Lease] = []
        self.signals: list[Signal] = []
        self.locks: list[Lock] = []
        self.requests: list[Request] = []  # in order of arrival
        self.watches: list[tuple[Session, str]] = []
        self.last: dict[str, int] = {}
        self.owners: dict[str, int] = {}
        self.past: dict[str, tuple[int, int, int]] = {}  # owner, group and mode of the last version of a name
        self.groups: dict[str, int] = {}
        self.modes: dict[str, int] = {}
        self.lost = {device.uuid: 0 for device in devices}
        self.store: int | None = None
        self.drained = False
        self.awaited: list[Lease] | None = None
        self.nothing_lasts = True
        self.restarting = False

    # -- looking things up ---------------------------------------------------------------------

    def session(self, number: int) -> Session | None:
        return next((session for session in self.sessions if session.id == number), None)

    def of(self, name: str) -> list[Version]:
        return [version for version in self.versions if version.name == name]

    def current(self, name: str) -> Version | None:
        return next((version for version in self.of(name) if version.state == "current"), None)

    def drafted(self, name: str) -> bool:
        return any(version.state in ("allocating", "draft") for version in self.of(name))

    @staticmethod
    def cells_of(version: Version) -> list[Cell]:
        return [cell for home in version.homes for cell in home.cells if cell is not None]

    def having(self, cell: Cell) -> list[Version]:
        """The versions that have an allocation, oldest first."""
        return sorted((v for v in self.versions if cell in self.cells_of(v)), key=lambda version: version.number)

    def group_of(self, version: Version) -> MulticastGroup | None:
        return next((group for group in self.multicast_groups if group.version is version), None)

    def several(self, version: Version) -> bool:
        return version.body.share == "multicast" and len(version.body.devices) > 1

    def told(self, version: Version) -> m.Team | None:
        """How a version's replicas are written at once, as everybody may know it."""
        if version.body.share != "multicast":
            return None
        group = self.group_of(version)
        if len(version.body.devices) == 1:
            return m.Team("copies", "it is on one device, so there is nothing to bind together")
        return m.Team(group.how, group.why) if group else None

    def opened_by(self, version: Version) -> str:
        if version.state == "allocating":
            return ""
        if version.body.share == "ipc":
            return "handle"
        handles = [cell.handle for cell in self.cells_of(version)]
        return "descriptor" if m.DESCRIPTOR in handles else "fabric handle"

    def keeps(self, session: Session) -> bool:
        """Whether a session has what stays until its process ends."""
        return any(each.session is session for each in (*self.leases, *self.locks))

    def holds(self, version: Version) -> int:
        return sum(lease.version is version for lease in self.leases)

    def events_of(self, version: Version) -> list[Signal]:
        return [signal for signal in self.signals if signal.lease.version is version]

    def creates(self) -> list[Request]:
        return [request for request in self.requests if isinstance(request.body, m.Create)]

    def room(self, uuid: str) -> int:
        return self.most(uuid) - sum(block.nbytes for block in self.blocks if block.device == uuid)

    def most(self, uuid: str) -> int:
        """The budget of a device, without what failed allocations left there."""
        return next(device.budget for device in self.devices if device.uuid == uuid) - self.lost[uuid]

    def rules(self, session: Session, name: str) -> bool:
        if name not in self.owners or session.uid == self.owners[name]:
            return True
        return self.administers(session.uid, verified=session.verified)

    def owned(self, session: Session, name: str, owners: tuple[int, ...]) -> bool:
        """Whether a pool is of one of the owners that are asked for, if any are, or the session's own, or of nobody."""
        return not owners or self.owners.get(name, session.uid) in {session.uid, *owners}

    def may_publish(self, session: Session, name: str) -> bool:
        """Whether the longest prefix of the name that is reserved, if any, is reserved for the session too."""
        for length in range(len(name), 0, -1):
            if name[:length] in self.policy.reserved:
                allowed = self.policy.reserved[name[:length]]
                listed = session.uid in allowed.users or any(group in allowed.groups for group in session.groups)
                return listed or self.administers(session.uid, verified=session.verified)
        return True

    def administers(self, uid: int, *, verified: bool) -> bool:
        """Whether a user is listed; or root, where that counts, or the broker's, and proven to be so."""
        own = {self.uid, 0} if self.policy.trust_root else {self.uid}
        return uid in self.policy.admins or (verified and uid in own)

    def may(self, letter: str, session: Session, name: str) -> bool:
        """Whether the mode, written as ``ls`` does, has ``r`` or ``w`` for the session."""
        return self.rules(session, name) or allows(letter, session, self.groups[name], self.modes[name])

    def may_read_draft(self, session: Session, draft: Version) -> bool:
        """Whether a session that may read a pool may still do so when a draft is published."""
        mode = self.modes[draft.name] if draft.body.mode is None else draft.body.mode
        return self.rules(session, draft.name) or allows("r", session, self.groups[draft.name], mode)

    def latest(self, session: Session, name: str) -> int:
        """The last version of a name as far as the session may know: of what it could not read, none was there."""
        return self.last.get(name, 0) if self.hears(session, name) else 0

    def hears(self, session: Session, name: str) -> bool:
        """Whether a session may hear what becomes of a name: also of one that nobody had yet."""
        if name in self.owners or self.administers(session.uid, verified=session.verified):
            return self.may("r", session, name)
        owner, group, mode = self.past.get(name, (session.uid, 0, 0))
        return session.uid == owner or allows("r", session, group, mode)

    def disown(self, name: str) -> None:
        """Nothing is left of a name."""
        self.past[name] = self.owners.pop(name), self.groups.pop(name), self.modes.pop(name)

    # -- what users have -----------------------------------------------------------------------

    def quota(self, uid: int) -> Quota:
        return self.policy.quotas.get(uid, self.policy.quota)

    def memory_of(self, uid: int) -> int:
        blocks = sum(block.nbytes for block in self.blocks if block.version.owner == uid)
        return blocks + sum(
            self.total(request) for request in self.requests if request.waits == "room" and request.session.uid == uid
        )

    def layouts_of(self, uid: int) -> int:
        bodies = [version.body for version in self.versions if version.owner == uid]
        bodies += [
            request.body
            for request in self.requests
            if isinstance(request.body, m.Create) and request.version is None and request.session.uid == uid
        ]
        return sum(len(body.layout) for body in bodies)

    def descriptors_of(self, uid: int) -> int:
        found = 2 * sum(session.uid == uid for session in self.sessions)
        blocks = (block for block in self.blocks if block.version.owner == uid)
        found += sum(self.pieces(block.device, block.version.body.share) * len(block.cells) for block in blocks)
        waiting = [r for r in self.requests if r.version is None and r.session.uid == uid]
        return found + sum(self.descriptors(request) for request in waiting if isinstance(request.body, m.Create))

    def descriptors(self, request: Request) -> int:
        """Descriptors that a create takes on all its devices."""
        body, layout = request.body, request.layout
        assert isinstance(body, m.Create)
        assert layout is not None
        return sum(self.pieces(uuid, body.share) * len(self.sizes(body, layout, uuid)) for uuid in body.devices)

    def stored(self) -> int:
        """Places of the store that are taken, or set aside for creates that wait."""
        blocks = sum(len(block.cells) for block in self.blocks if block.version.body.durable)
        waiting = [request for request in self.creates() if request.version is None]
        return 2 * len(self.sessions) + blocks + sum(map(self.durable_pieces, waiting))

    def durable_pieces(self, request: Request) -> int:
        """Places of the store that a create takes."""
        body, layout = request.body, request.layout
        assert isinstance(body, m.Create)
        assert layout is not None
        return sum(len(self.sizes(body, layout, uuid)) for uuid in body.devices) if body.durable else 0

    def pieces(self, uuid: str, share: str) -> int:
        """Descriptors that one allocation takes."""
        emulated = next((device.descriptors for device in self.devices if device.uuid == uuid), 0)
        return {"ipc": (0, 1), "vmm": (1, 2), "multicast": (2, 5)}[share][emulated]

    def total(self, request: Request) -> int:
        """Bytes that a create takes on all its devices."""
        assert isinstance(request.body, m.Create)
        assert request.layout is not None
        return sum(sum(self.sizes(request.body, request.layout, uuid)) for uuid in request.body.devices)

    def sizes(self, body: m.Create, layout: Outline, uuid: str) -> tuple[int, ...]:
        """What a create takes on one of its devices: of what it has or its plan puts there, what is no base's."""
        sizes = [-(-size // (2 << 20)) * (2 << 20) for size in layout.allocations]
        return tuple(
            size
            for number, size in enumerate(sizes)
            if (body.plan is None or body.devices[body.plan[number]] == uuid)
            and (body.base is None or body.base.allocations[number] is None)
        )

    def replica(self, home: Home) -> m.ReplicaHandles:
        """A home as it travels: with nothing for the allocations that are on other devices."""
        by_descriptor = m.DESCRIPTOR in {cell.handle for cell in self.cells_of(home.version)}
        handles = [cell.handle if cell else b"" for cell in home.cells]
        if by_descriptor:
            handles = [handle and m.DESCRIPTOR for handle in handles]
        return m.ReplicaHandles(home.device, tuple(handles))

    def written(self, home: Home) -> m.ReplicaHandles:
        """The same for the writer of a draft: with nothing for what is its base's."""
        whole = self.replica(home).handles
        pairs = zip(whole, home.cells, strict=True)
        handles = tuple(handle if cell and cell.block.version is home.version else b"" for handle, cell in pairs)
        return m.ReplicaHandles(home.device, handles)

    def sources(self, lease: Lease, homes: list[Home]) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
        """Where the descriptors come from: runs of allocations of the same ticket."""
        runs: list[tuple[Block, list[int]]] = []
        for home in homes:
            fresh = True
            for cell in home.cells:
                if cell is None or (lease.writes and cell.block.version is not lease.version):
                    continue
                if fresh or runs[-1][0] is not cell.block:
                    runs.append((cell.block, []))
                runs[-1][1].append(cell.index)
                fresh = False
        return tuple((b.device, b.ticket, () if i == list(range(len(b.sizes))) else tuple(i)) for b, i in runs)

    @staticmethod
    def full(used: int, limit: int | None) -> bool:
        return limit is not None and used >= limit

    # -- reports -------------------------------------------------------------------------------

    def info(self, version: Version) -> status.PoolInfo:
        body, layout = version.body, version.layout
        state = "draft" if version.state == "allocating" else version.state
        told = self.told(version)
        nbytes, tensors, leases = sum(layout.allocations), layout.tensors, self.holds(version)
        return status.PoolInfo(
            version.name,
            version.number,
            state,
            nbytes,
            tensors,
            body.share,
            body.devices,
            bool(body.durable),
            leases,
            version.owner,
            self.groups[version.name],
            self.modes[version.name],
            body.plan is not None,
            body.writable,
            told.how if told else "",
            version.why or (told.why if told else ""),
            self.opened_by(version),
            body.share in ("vmm", "multicast") and not body.writable,
            version.digests.algorithm if version.digests else "",
            sum(cell.nbytes for cell in self.cells_of(version)),
            sum(cell.nbytes for cell in self.cells_of(version) if self.having(cell)[0] is not version),
            published=version.published,
        )

    def sharing(self, version: Version) -> tuple[status.SharingInfo, ...]:
        found = []
        for other in sorted(self.of(version.name), key=lambda other: other.number):
            both = [cell for cell in self.cells_of(other) if cell in self.cells_of(version)]
            if both and other is not version:
                found.append(status.SharingInfo(other.number, len(both), sum(cell.nbytes for cell in both)))
        return tuple(found)

    def client(self, asking: Session, session: Session) -> status.ClientInfo:
        state = "connected" if session.connected else "detached"
        leases = [lease.version for lease in self.leases if lease.session is session]
        held = tuple(status.LeaseInfo(v.name, v.number, 0.0) for v in leases if self.may("r", asking, v.name))
        locks = tuple(each.name for each in self.locks if each.session is session and self.may("r", asking, each.name))
        return status.ClientInfo(session.id, session.pid, session.uid, state, held, locks=locks)

    def device(self, device: Budget) -> status.DeviceInfo:
        allocated, promised = (
            sum(block.nbytes for block in self.blocks if block.device == device.uuid and block.state in states)
            for states in (("held", "freeing"), ("wanted", "unwanted"))
        )
        allocated += self.lost[device.uuid]
        totals = device.total, device.budget, allocated, promised
        return status.DeviceInfo(device.index, device.uuid, device.name, *totals)


def allows(letter: str, session: Session, group: int, mode: int) -> bool:
    """Whether a mode lets a session that is not its owner's."""
    written = "".join(kind if bit == "1" else "-" for kind, bit in zip("rwxrwxrwx", f"{mode:09b}", strict=True))
    return letter in (written[3:6] if group in session.groups else written[6:])
