"""What is so, as far as the model knows."""

from __future__ import annotations

from cubroker.protocol import messages as m
from cubroker.server.ledger import Budget, Limits
from tests.simulation.records import Block, Lease, Request, Session, Version


class Facts:
    """All that the model knows, in lists, and ways to look it up."""

    def __init__(self, devices: tuple[Budget, ...], uid: int, limits: Limits) -> None:
        self.devices, self.uid, self.limits = devices, uid, limits
        self.sessions: list[Session] = []
        self.versions: list[Version] = []
        self.blocks: list[Block] = []
        self.leases: list[Lease] = []
        self.requests: list[Request] = []  # in order of arrival
        self.watches: list[tuple[Session, str]] = []
        self.last: dict[str, int] = {}
        self.owners: dict[str, int] = {}

    # -- looking things up ---------------------------------------------------------------------

    def session(self, number: int) -> Session | None:
        return next((session for session in self.sessions if session.id == number), None)

    def of(self, name: str) -> list[Version]:
        return [version for version in self.versions if version.name == name]

    def current(self, name: str) -> Version | None:
        return next((version for version in self.of(name) if version.state == "current"), None)

    def drafted(self, name: str) -> bool:
        return any(version.state in ("allocating", "draft") for version in self.of(name))

    def blocks_of(self, version: Version) -> list[Block]:
        return [block for block in self.blocks if block.version is version and block.state in ("wanted", "held")]

    def holds(self, version: Version) -> int:
        return sum(lease.version is version for lease in self.leases)

    def room(self, uuid: str) -> int:
        budget = next(device.budget for device in self.devices if device.uuid == uuid)
        return budget - sum(sum(block.sizes) for block in self.blocks if block.device == uuid)

    def may_change(self, session: Session, name: str) -> bool:
        return name not in self.owners or session.uid in (0, self.uid, self.owners[name])

    # -- reports -------------------------------------------------------------------------------

    def info(self, version: Version) -> m.PoolInfo:
        body, layout = version.body, version.layout
        state = "draft" if version.state == "allocating" else version.state
        nbytes, tensors, leases = sum(layout.allocations), len(layout.tensors), self.holds(version)
        return m.PoolInfo(
            version.name, version.number, state, nbytes, tensors, "ipc", body.devices, False, leases, version.owner
        )

    def client(self, session: Session) -> m.ClientInfo:
        state = "connected" if session.connected else "detached"
        leases = [lease.version for lease in self.leases if lease.session is session]
        infos = tuple(m.LeaseInfo(version.name, version.number) for version in leases)
        return m.ClientInfo(session.id, session.pid, session.uid, state, infos)

    def device(self, device: Budget) -> m.DeviceInfo:
        sums = {
            states: sum(
                sum(block.sizes) for block in self.blocks if block.device == device.uuid and block.state in states
            )
            for states in (("held", "freeing"), ("wanted", "unwanted"))
        }
        return m.DeviceInfo(device.index, device.uuid, device.name, device.total, device.budget, *sums.values())
