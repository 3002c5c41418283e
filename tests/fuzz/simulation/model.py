"""What the ledger promises, written a second time and as plainly as possible: lists, and searching through them.

Nothing is shared with the ledger. The model is told the same events and says what should come of
each. It does not know the ids that the ledger gives to leases, tickets and timers: those are learned
from what the ledger does, by :mod:`tests.fuzz.simulation.compare`.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from cubroker.protocol import messages as m
from cubroker.protocol.layout import Outline
from cubroker.server.ledger import Budget, Limits
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import Policy
from tests.fuzz.simulation import draining, locks, restart
from tests.fuzz.simulation.facts import Facts
from tests.fuzz.simulation.records import (
    Block,
    Cell,
    Expected,
    Home,
    Lease,
    MulticastGroup,
    Refusal,
    Request,
    Session,
    Signal,
    Version,
)

MIB = 1 << 20
GOOD_NAMES = ("a", "b", "c")


def digest(handle: bytes) -> bytes:
    """What writers say that memory with this handle holds."""
    return handle.ljust(16, b"-")[:16] if handle else b""


class Model(Facts):
    """Takes events, and says what each should have for effects."""

    def __init__(self, devices: tuple[Budget, ...], uid: int, limits: Limits, policy: Policy) -> None:
        super().__init__(devices, uid, limits, policy)
        self.out = Expected()

    # -- events --------------------------------------------------------------------------------

    def handle(self, event: e.LedgerEvent) -> Expected:
        self.out = Expected()
        match event:
            case e.SessionOpened():
                groups = (event.gid, *event.groups)
                self.sessions.append(Session(event.session, event.pid, event.uid, groups, event.verified))
            case e.RequestReceived():
                self.asked(event)
            case e.ConnectionLost() | e.ProcessExited():
                session = self.session(event.session)
                if session is not None:
                    self.ended(session, gone=isinstance(event, e.ProcessExited))
            case e.TimerExpired():
                for request in self.requests:
                    if request.timed and request.timer == event.timer:
                        request.timed = False
                        self.refuse(request, "timeout")
                        break
            case e.Allocated() | e.AllocationFailed() | e.Freed():
                self.memory(event)
            case e.MulticastBound() | e.MulticastUnbound():
                self.bound(event)
            case e.Reconfigured():
                self.reconfigured(event)
            case e.ShutdownStarted():
                draining.end(self, event)
            case e.MemoryLost():
                restart.vanished(self, event)
            case e.Resumed():
                restart.resumed(self)
        self.serve()
        return self.out

    def reconfigured(self, event: e.Reconfigured) -> None:
        self.policy, self.limits = event.policy, event.limits
        self.devices = tuple(replace(device, budget=event.budgets[device.uuid]) for device in self.devices)
        for request in self.creates():
            request.aside = False
            limit = self.quota(request.session.uid).memory
            if request.waits == "turn" and limit is not None and self.total(request) > limit:
                self.refuse(request, "over_quota")
        ended = {version.name for version in list(self.versions) if self.end_if_unused(version)}
        for name in ended:
            self.announce(name)

    def asked(self, event: e.RequestReceived) -> None:
        session = self.session(event.session)
        if session is None:
            return
        try:
            self.answered(session, event.request, event)
        except Refusal as refusal:
            self.out.answers[session.id, event.request] = refusal.code
        if not session.connected and not self.keeps(session):
            self.sessions.remove(session)
            self.out.forgotten.append(session.id)

    def answered(self, session: Session, number: int, event: e.RequestReceived) -> None:
        body = event.body
        if not session.connected and not isinstance(body, m.Close | m.Seal | m.Unlock | m.Cancel | m.DropEvent):
            raise Refusal("unavailable")
        match body:
            case m.Attach():
                self.attach(session, number, body)
            case m.Create():
                assert event.layout is not None
                self.create(session, number, body, event.layout)
            case m.SetLayout():
                assert event.layout is not None
                self.set_layout(self.own(session, body.lease), body, event.layout)
                self.out.answers[session.id, number] = m.Done()
            case m.ShareEvent():
                self.share(session, number, body)
            case m.OpenEvent():
                self.open(session, number, body)
            case m.AwaitEvent():
                self.listen(session, number, body)
            case m.Lock():
                locks.lock(self, session, number, body)
            case _:
                self.out.answers[session.id, number] = self.simple(session, body)

    def simple(self, session: Session, body: m.Request) -> m.Reply:
        match body:
            case m.Close():
                for name in self.close(self.own(session, body.lease)):
                    self.announce(name)
                return m.Done()
            case m.SendDescriptors():
                return self.send_descriptors(self.own(session, body.lease))
            case m.Seal() | m.SealInPlace():
                return self.seal(self.own(session, body.lease), body)
            case m.Cancel():
                for request in list(self.requests):
                    if request.session is session and request.id == body.request:
                        self.refuse(request, "timeout")
                return m.Done()
            case m.Recorded():
                return self.recorded(self.made(session, body.event))
            case m.DropEvent():
                self.drop(self.made(session, body.event))
                return m.Done()
            case m.Unlock():
                return locks.unlock(self, session, body.lock)
            case m.Retire():
                self.permit("w", session, body.name)
                return self.retire(self.find(session, body.name, body.version))
            case m.Watch():
                return self.watch(session, body)
            case m.Describe():
                self.permit("r", session, body.name)
                version = self.find(session, body.name, body.version)
                return m.Description(self.info(version), version.body.layout, version.body.plan, self.sharing(version))
            case m.ListDigests():
                self.permit("r", session, body.name)
                version = self.find(session, body.name, body.version)
                return m.DigestList(version.number, version.body.devices, version.digests)
            case m.Drain():
                return draining.drain(self, session, body)
            case m.ListPools():
                visible = [version for version in self.versions if self.may("r", session, version.name)]
                return m.Pools(tuple(map(self.info, sorted(visible, key=lambda v: (v.name, v.number)))))
            case m.ListClients():
                everybody = self.administers(session.uid, verified=session.verified)
                known = [other for other in self.sessions if everybody or other.uid == session.uid]
                return m.Clients(tuple(self.client(session, other) for other in known))
            case m.ListDevices():
                return m.DeviceList(tuple(map(self.device, self.devices)))
            case _:
                raise AssertionError(body)

    # -- requests ------------------------------------------------------------------------------

    def permit(self, letter: str, session: Session, name: str) -> None:
        if not self.may(letter, session, name):
            raise Refusal("denied")

    def attach(self, session: Session, number: int, body: m.Attach) -> None:
        draining.check(self, durable=True)
        self.permit("r", session, body.name)
        if not self.owned(session, body.name, body.owners):
            raise Refusal("denied")
        for version in self.of(body.name):
            if version.state == "current" and body.version in (0, version.number):
                return self.lease(session, number, version, body)
            if version.state == "superseded" and body.version == version.number:
                return self.lease(session, number, version, body)
            if version.state == "draft" and body.version == version.number and body.unsealed:
                return self.lease(session, number, version, body)
        self.name(body.name)
        if 0 < body.version <= self.latest(session, body.name):
            raise Refusal("retired")
        if body.device is not None and not {body.device, *body.peers} & {device.uuid for device in self.devices}:
            raise Refusal("not_found")
        if body.wait == 0:
            raise Refusal("not_found")
        self.admit(Request(session, number, body, "publication"))
        return None

    def create(self, session: Session, number: int, body: m.Create, layout: Outline) -> None:
        draining.check(self, durable=True)
        current = self.current(body.name)
        if body.attach is not None and current is not None:
            return self.lease(session, number, current, body.attach)
        base = self.base_of(session, body)
        body = self.decided(body, layout, base)
        draining.check(self, durable=bool(body.durable))
        self.name(body.name)
        if body.share not in ("ipc", "vmm", "multicast"):
            raise Refusal("invalid")
        if body.durable and (body.share == "ipc" or self.store is None):
            raise Refusal("unsupported")
        if not layout.allocations or len(set(body.devices)) != len(body.devices):
            raise Refusal("invalid")
        if body.plan is not None and (
            body.share == "multicast"
            or len(body.plan) != len(layout.allocations)
            or sorted(set(body.plan)) != list(range(len(body.devices)))
        ):
            raise Refusal("invalid")
        known = {device.uuid for device in self.devices}
        if not set(body.devices) <= known:
            raise Refusal("not_found")
        if body.attach and body.attach.device and not {body.attach.device, *body.attach.peers} & known:
            raise Refusal("not_found")
        if base is not None:
            self.check_base(body, layout, base)
        for device in self.devices:
            if device.uuid in body.devices and sum(self.sizes(body, layout, device.uuid)) > self.most(device.uuid):
                raise Refusal("over_budget")
        if body.attach is None:
            self.check_writer(session, body)
        self.check_leases(session)
        request = Request(session, number, body, "turn", layout)
        quota = self.quota(session.uid)
        if quota.memory is not None and self.total(request) > quota.memory:
            raise Refusal("over_quota")
        if quota.layouts is not None and self.layouts_of(session.uid) + len(body.layout) > quota.layouts:
            raise Refusal("over_quota")
        takes = self.descriptors(request)
        if quota.descriptors is not None and takes and self.descriptors_of(session.uid) + takes > quota.descriptors:
            raise Refusal("over_quota")
        pieces = self.durable_pieces(request)
        if self.store is not None and pieces and self.stored() + pieces > self.store - min(16, self.store // 16):
            raise Refusal("over_quota")
        self.admit(request)
        self.serve()
        if request in self.requests and request.waits != "memory" and body.wait == 0:
            reason = "exists" if self.busy(body.name) else "over_quota"
            self.refuse(request, reason if request.waits == "turn" else "over_budget")
        return None

    def base_of(self, session: Session, body: m.Create) -> Version | None:
        """The version with which a create's may share memory: current, or leased by the session."""
        if body.base is None:
            return None
        if body.attach is not None:
            raise Refusal("invalid")
        self.permit("r", session, body.name)
        base = self.find(session, body.name, body.base.version)
        if base.state == "lost":
            raise Refusal("unavailable")
        leased = any((lease.session, lease.version) == (session, base) for lease in self.leases)
        if base.state in ("allocating", "draft") or base.lent or not (base.state == "current" or leased):
            raise Refusal("invalid")
        return base

    def check_base(self, body: m.Create, layout: Outline, base: Version) -> None:
        assert body.base is not None
        one, other = body, base.body
        if "multicast" in (one.share, other.share) or one.writable or other.writable:
            raise Refusal("unsupported")
        if (one.share, one.devices) != (other.share, other.devices) or bool(one.durable) != bool(other.durable):
            raise Refusal("unsupported")
        if (one.plan is None) != (other.plan is None):
            raise Refusal("unsupported")
        kept = [number for number in body.base.allocations if number is not None]
        if len(body.base.allocations) != len(layout.allocations) or len(set(kept)) != len(kept):
            raise Refusal("invalid")
        for new, number in enumerate(body.base.allocations):
            if number is None:
                continue
            if number >= len(base.layout.allocations):
                raise Refusal("invalid")
            sizes = layout.allocations[new], base.layout.allocations[number]
            here, there = (-(-size // (2 << 20)) for size in sizes)
            if here != there or (one.plan and other.plan and one.plan[new] != other.plan[number]):
                raise Refusal("invalid")

    def decided(self, body: m.Create, layout: Outline, base: Version | None) -> m.Create:
        """What a create leaves to the broker: ``vmm`` where it can be, durable where half the store has room.

        An update leaves it to its base.
        """
        share, durable = body.share, body.durable
        if base is not None:
            share = base.body.share if share == "auto" else share
            durable = base.body.durable if durable is None else durable
        if share == "auto":
            able = {device.uuid: device.vmm for device in self.devices}
            usual = {"auto": "vmm" if all(able.get(uuid, True) for uuid in body.devices) else "ipc"}
            share = "vmm" if durable else usual.get(self.policy.share, self.policy.share)
        if durable is None:
            durable = share in ("vmm", "multicast") and self.store is not None
            pieces = len(layout.allocations) * (1 if body.plan is not None else len(body.devices))
            if durable and self.store is not None and pieces:
                most = self.store - min(16, self.store // 16)
                memory = self.stored() - 2 * len(self.sessions)
                durable = self.stored() + pieces <= most and memory + pieces <= self.store // 2
        return msgspec.structs.replace(body, share=share, durable=durable)

    def check_writer(self, session: Session, body: m.Create) -> None:
        if not self.may_publish(session, body.name):
            raise Refusal("denied")
        self.permit("w", session, body.name)
        if body.mode is not None and not self.rules(session, body.name) and body.mode != self.modes[body.name]:
            raise Refusal("denied")

    def admit(self, request: Request) -> None:
        mine = [other for other in self.requests if other.session is request.session]
        if any(other.id == request.id for other in mine):
            raise Refusal("invalid")
        if len(mine) >= self.limits.requests:
            raise Refusal("over_quota")
        uid = request.session.uid
        if self.full(sum(other.session.uid == uid for other in self.requests), self.quota(uid).requests):
            raise Refusal("over_quota")
        self.requests.append(request)
        if request.body.wait and request.waits in ("publication", "event", "generation", "lock"):
            self.out.timer, request.timed = request, True

    def set_layout(self, lease: Lease, body: m.SetLayout, layout: Outline) -> None:
        version = lease.version
        if not lease.writes:
            raise Refusal("unavailable" if version.state == "lost" else "invalid")
        before, after = ([-(-size // (2 << 20)) for size in each.allocations] for each in (version.layout, layout))
        if before != after:
            raise Refusal("invalid")
        limit, more = self.quota(version.owner).layouts, len(body.layout) - len(version.body.layout)
        if limit is not None and more > 0 and self.layouts_of(version.owner) + more > limit:
            raise Refusal("over_quota")
        version.body, version.layout = msgspec.structs.replace(version.body, layout=body.layout), layout

    def seal(self, lease: Lease, body: m.Seal | m.SealInPlace) -> m.Sealed:
        version = lease.version
        if not lease.writes:
            raise Refusal("unavailable" if version.state == "lost" else "invalid")
        stays = isinstance(body, m.SealInPlace)
        if stays and (
            version.body.share == "multicast" or (version.body.plan is None and len(version.body.devices) > 1)
        ):
            raise Refusal("unsupported")
        if stays and any(cell.block.version is not version for cell in self.cells_of(version)):
            raise Refusal("unsupported")
        if isinstance(body, m.SealDigested | m.SealInPlace) and body.digests is not None:
            if version.body.writable:
                raise Refusal("unsupported")
            handles = [self.replica(home).handles for home in version.homes]
            if body.digests.replicas != tuple(tuple(digest(handle) for handle in row) for row in handles):
                raise Refusal("invalid")
            version.digests = body.digests
        previous = self.current(version.name)
        version.state, version.published, version.lent = "current", 0.0, False
        if version.body.mode is not None:
            self.modes[version.name] = version.body.mode
        self.last[version.name] = version.number
        if not stays:
            self.give_back(lease)
        if previous is not None:
            previous.state = "superseded"
        for old in self.of(version.name):
            self.end_if_unused(old)
        self.announce(version.name)
        for request in list(self.requests):
            if isinstance(request.body, m.Attach | m.Create) and request.body.name == version.name:
                self.published(request, request.body, version)
        return m.Sealed(version.number)

    def published(self, request: Request, body: m.Attach | m.Create, version: Version) -> None:
        where = body if isinstance(body, m.Attach) else body.attach
        if where and (not isinstance(where, m.Attach) or where.version in (0, version.number)):
            self.leave(request)
            try:
                self.lease(request.session, request.id, version, where)
            except Refusal as refusal:
                self.out.answers[request.session.id, request.id] = refusal.code

    def retire(self, version: Version) -> m.Retirement:
        if version.state in ("allocating", "draft"):
            raise Refusal("invalid")
        was, version.state = version.state, "lost" if version.state == "lost" else "retired"
        leases = self.holds(version)
        if self.end_if_unused(version) or was == "current":
            self.announce(version.name)
        return m.Retirement(version.number, leases)

    def watch(self, session: Session, body: m.Watch) -> m.Done:
        self.name(body.name)
        watching = (session, body.name) in self.watches
        if not body.on:
            self.watches = [watch for watch in self.watches if watch != (session, body.name)]
            return m.Done()
        self.permit("r", session, body.name)
        if not watching:
            if sum(watcher is session for watcher, _ in self.watches) >= self.limits.watches:
                raise Refusal("over_quota")
            users = sum(watcher.uid == session.uid for watcher, _ in self.watches)
            if self.full(users, self.quota(session.uid).watches):
                raise Refusal("over_quota")
            self.watches.append((session, body.name))
        self.notice(session, body.name)
        return m.Done()

    # -- leases and memory ---------------------------------------------------------------------

    def lease(self, session: Session, number: int, version: Version, where: m.Attach | m.Where) -> None:
        uuid, peers = where.device, where.peers
        self.permit("r", session, version.name)
        if not self.owned(session, version.name, where.owners):
            raise Refusal("denied")
        draft = version.state == "draft"
        if draft and not self.may_read_draft(session, version):
            raise Refusal("denied")
        if draft and version.body.writable:
            raise Refusal("unsupported")
        others = draft and version.writer is not None and version.writer.session.uid != session.uid
        if others and version.body.share == "ipc" and not self.administers(session.uid, verified=session.verified):
            raise Refusal("unsupported")
        draining.check(self, durable=bool(version.body.durable))
        homes = list(version.homes)
        if uuid is None and len(homes) > 1 and version.body.plan is None:
            raise Refusal("invalid")
        if uuid is not None:
            places = (uuid, *peers) if version.body.plan is None else (uuid,)
            homes = [home for place in places for home in homes if home.device == place][:1]
        if not homes:
            raise Refusal("not_found")
        self.check_leases(session)
        version.lent = version.lent or draft
        group, told, through = self.group_of(version), self.told(version), None
        bound = group is not None and version.body.writable and uuid in version.body.devices
        if group is not None and bound:
            if group.how == "multicast":
                through, told = group, m.Team(group.how, group.why, group.sizes)
            elif group.how == "copies":
                homes += [home for home in version.homes if home not in homes]
        self.give(session, number, version, homes, through, bound=bound)
        self.out.answers[session.id, number] = m.Attached(
            0,
            version.name,
            version.number,
            version.body.share,
            version.body.layout,
            tuple(map(self.replica, homes)),
            version.body.writable,
            told,
        )

    def give(
        self,
        session: Session,
        number: int,
        version: Version,
        homes: list[Home],
        group: MulticastGroup | None = None,
        *,
        bound: bool,
        writes: bool = False,
    ) -> None:
        lease = Lease(session, version, homes[0], bound)
        if writes:
            version.writer = lease
        self.leases.append(lease)
        self.out.leases[session.id, number] = lease
        if version.body.share != "ipc" and self.sources(lease, homes):
            if self.opened_by(version) == "fabric handle":
                lease.unsent = homes
            else:
                self.out.handed.append((lease, homes, group))

    def send_descriptors(self, lease: Lease) -> m.Done:
        if not lease.unsent:
            raise Refusal("invalid")
        if lease.version.state == "lost":
            raise Refusal("unavailable")
        self.out.handed.append((lease, lease.unsent, None))
        lease.unsent = []
        return m.Done()

    def give_back(self, lease: Lease) -> None:
        self.leases.remove(lease)
        draining.given_back(self, lease)
        if lease.version.body.share != "ipc":
            self.out.withdrawn.append((lease.session.id, lease.id))

    def check_leases(self, session: Session) -> None:
        if sum(lease.session is session for lease in self.leases) >= self.limits.leases:
            raise Refusal("over_quota")
        if self.full(sum(lease.session.uid == session.uid for lease in self.leases), self.quota(session.uid).leases):
            raise Refusal("over_quota")

    def admits(self, uid: int, *, verified: bool) -> bool:
        quota = self.quota(uid)
        if quota.descriptors is not None and self.descriptors_of(uid) + 2 > quota.descriptors:
            return False
        reserve = 0 if self.administers(uid, verified=verified) else 16
        if self.store is not None and self.stored() + 2 > self.store - min(reserve, self.store // 16):
            return False
        return not self.full(sum(session.uid == uid for session in self.sessions), quota.sessions)

    def own(self, session: Session, number: int) -> Lease:
        for lease in self.leases:
            if lease.session is session and lease.id == number:
                return lease
        raise Refusal("not_found")

    def close(self, lease: Lease) -> set[str]:
        """End a lease; return the name of its version if that ended, so that it is to be announced."""
        for request in list(self.requests):
            if request.lease is lease:
                self.refuse(request, "not_found")
        for signal in list(self.signals):
            if signal.lease is lease:
                self.drop(signal)
        writes = lease.writes
        self.give_back(lease)
        if writes and lease.version.lent:
            lease.version.state = "retired"
            self.withdraw(lease.version)
        elif writes:
            self.end(lease.version)
        return {lease.version.name} if self.end_if_unused(lease.version) else set()

    def withdraw(self, draft: Version) -> None:
        """A draft will never be published: its number is used up, and those who may hear that do not wait for it."""
        self.last[draft.name] = draft.number
        for request in list(self.requests):
            body = request.body
            late = isinstance(body, m.Attach) and body.name == draft.name and 0 < body.version <= draft.number
            if late and self.hears(request.session, draft.name):
                self.refuse(request, "retired")

    def end_if_unused(self, version: Version) -> bool:
        if version.state not in ("superseded", "retired", "lost") or self.holds(version) or self.kept(version):
            return False
        self.end(version)
        return True

    def kept(self, version: Version) -> bool:
        newer = [v for v in self.of(version.name) if v.state == "superseded" and v.number > version.number]
        return version.state == "superseded" and len(newer) < self.policy.keep

    def end(self, version: Version) -> None:
        group = self.group_of(version)
        if group is not None:
            self.out.unbound.append(group)
        version.state = "ended"
        self.versions.remove(version)
        for block in self.blocks:
            unused = [cell for cell in block.cells if cell in self.cells_of(version) and not self.having(cell)]
            if unused and not any(map(self.having, block.cells)):
                block.state = {"wanted": "unwanted", "held": "freeing"}[block.state]
            for cell in unused:
                cell.freeing = True
            if unused and group is None:
                self.out.frees.append((block, tuple(cell.index for cell in unused)))
        if not self.of(version.name):
            self.disown(version.name)

    def memory(self, event: e.Allocated | e.AllocationFailed | e.Freed) -> None:
        block = next((block for block in self.blocks if block.ticket == event.ticket), None)
        if block is None:
            assert isinstance(event, e.Freed)
            return
        request = next((request for request in self.requests if request.version is block.version), None)
        if isinstance(event, e.Allocated):
            for cell, handle in zip(block.cells, event.handles, strict=True):
                cell.handle = handle
            block.state = {"wanted": "held", "unwanted": "freeing"}[block.state]
            if request is not None:
                self.complete(request, block.version)
        elif isinstance(event, e.AllocationFailed):
            self.blocks.remove(block)
            self.lost[block.device] += event.unfreed
            if request is not None:
                self.refuse(request, event.code)
        else:
            self.lost[block.device] += event.unfreed
            block.cells = [cell for cell in block.cells if event.numbers and cell.index not in event.numbers]
            if not block.cells:
                self.blocks.remove(block)

    def complete(self, request: Request, version: Version) -> None:
        """Once a draft has all its memory, give it to its writer, or have it bound together first."""
        if any(cell.block.state != "held" for cell in self.cells_of(version)):
            return
        if self.several(version):
            self.multicast_groups.append(MulticastGroup(version))
            self.out.bound.append(self.multicast_groups[-1])
        else:
            self.filled(request, version)

    def bound(self, event: e.MulticastBound | e.MulticastUnbound) -> None:
        group = next(group for group in self.multicast_groups if group.id == event.group)
        if isinstance(event, e.MulticastUnbound):
            self.multicast_groups.remove(group)
            blocks = [block for block in self.blocks if block.version is group.version]
            self.out.frees += [(block, tuple(range(len(block.sizes)))) for block in blocks]
            return
        group.how, group.why, group.sizes = event.how, event.why, event.sizes
        request = next((request for request in self.requests if request.version is group.version), None)
        if request is not None:
            self.filled(request, group.version)
        elif group.version.state not in ("lost", "ended"):
            restart.rebound(self, group)

    def filled(self, request: Request, version: Version) -> None:
        try:
            self.check_leases(request.session)
        except Refusal as refusal:
            return self.refuse(request, refusal.code)
        version.state = "draft"
        self.requests.remove(request)
        homes, group, told = version.homes, self.group_of(version), self.told(version)
        if group is not None:
            group, told = group if group.sizes else None, m.Team(group.how, group.why, group.sizes)
        self.give(request.session, request.id, version, homes, group, bound=self.several(version), writes=True)
        replicas = tuple(map(self.written, homes))
        self.out.answers[request.session.id, request.id] = m.Created(
            0, version.name, version.number, version.body.share, replicas, told
        )
        for other in list(self.requests):
            body = other.body
            if (
                isinstance(body, m.Attach)
                and body.unsealed
                and (body.name, body.version) == (version.name, version.number)
            ):
                self.published(other, body, version)
        return None

    # -- events of versions --------------------------------------------------------------------

    def with_events(self, session: Session, number: int, name: str) -> Lease:
        lease = self.own(session, number)
        if not lease.version.body.writable or lease.version.state == "draft":
            raise Refusal("invalid")
        self.name(name)
        return lease

    def share(self, session: Session, number: int, body: m.ShareEvent) -> None:
        lease = self.with_events(session, body.lease, body.name)
        if body.device not in [device.uuid for device in self.devices]:
            raise Refusal("not_found")
        if body.name in [signal.body.name for signal in self.events_of(lease.version)]:
            raise Refusal("exists")
        if sum(signal.lease.session is session for signal in self.signals) >= self.limits.events:
            raise Refusal("over_quota")
        users = sum(signal.lease.session.uid == session.uid for signal in self.signals)
        if self.full(users, self.quota(session.uid).events):
            raise Refusal("over_quota")
        signal = self.out.signals[session.id, number] = Signal(lease, body)
        self.signals.append(signal)
        self.out.answers[session.id, number] = m.EventShared(0)
        for request in list(self.requests):
            if request.waits == "event" and request.lease is not None and request.lease.version is lease.version:
                assert isinstance(request.body, m.OpenEvent)
                if request.body.name == body.name:
                    self.leave(request)
                    self.opened(request.session, request.id, signal)

    def opened(self, session: Session, number: int, signal: Signal) -> None:
        self.out.signals[session.id, number] = signal
        self.out.answers[session.id, number] = m.EventOpened(0, signal.body.device, signal.body.handle)

    def open(self, session: Session, number: int, body: m.OpenEvent) -> None:
        lease = self.with_events(session, body.lease, body.name)
        for signal in self.events_of(lease.version):
            if signal.body.name == body.name:
                return self.opened(session, number, signal)
        if not body.wait:
            raise Refusal("not_found")
        return self.admit(Request(session, number, body, "event", lease=lease))

    def listen(self, session: Session, number: int, body: m.AwaitEvent) -> None:
        lease = self.own(session, body.lease)
        signal = next((signal for signal in self.events_of(lease.version) if signal.id == body.event), None)
        if signal is None:
            raise Refusal("unavailable")
        if signal.generation > body.after:
            self.out.answers[session.id, number] = m.Generation(signal.generation)
            return None
        if not body.wait:
            raise Refusal("timeout")
        return self.admit(Request(session, number, body, "generation", lease=lease, signal=signal))

    def made(self, session: Session, number: int) -> Signal:
        for signal in self.signals:
            if signal.lease.session is session and signal.id == number:
                return signal
        raise Refusal("not_found")

    def recorded(self, signal: Signal) -> m.Generation:
        signal.generation += 1
        for request in list(self.requests):
            if request.signal is signal:
                assert isinstance(request.body, m.AwaitEvent)
                if request.body.after < signal.generation:
                    self.leave(request)
                    self.out.answers[request.session.id, request.id] = m.Generation(signal.generation)
        return m.Generation(signal.generation)

    def drop(self, signal: Signal) -> None:
        self.signals.remove(signal)
        for request in list(self.requests):
            if request.signal is signal:
                self.refuse(request, "unavailable")

    # -- ends ----------------------------------------------------------------------------------

    def ended(self, session: Session, *, gone: bool) -> None:
        session.connected = False
        for request in list(self.requests):
            if request.session is session:
                self.leave(request)
        self.watches = [watch for watch in self.watches if watch[0] is not session]
        if gone:
            held_by_it = [lease for lease in self.leases if lease.session is session]
            for name in set[str]().union(*map(self.close, held_by_it)):
                self.announce(name)
            for held in list(self.locks):
                if held.session is session:
                    locks.release(self, held)
        if not self.keeps(session):
            self.sessions.remove(session)
            self.out.forgotten.append(session.id)

    def leave(self, request: Request) -> None:
        self.requests.remove(request)
        if request.timed:
            self.out.dropped.append(request.timer)
        if request.version is not None:
            self.end(request.version)

    def refuse(self, request: Request, code: str) -> None:
        self.leave(request)
        self.out.answers[request.session.id, request.id] = code

    # -- whose turn it is ----------------------------------------------------------------------

    def serve(self) -> None:
        """Give turns and room in order of arrival, from the start again after every change."""
        while self.serve_one():
            pass
        newest = self.requests[-1] if self.requests else None
        if newest is not None and newest.waits in ("turn", "room") and newest.body.wait and not newest.timed:
            newest.timed = True
            self.out.timer = newest

    def serve_one(self) -> bool:
        creates = self.creates()
        for request in creates:
            assert isinstance(request.body, m.Create)
            if request.waits == "turn" and not self.busy(request.body.name) and self.offer(request, creates):
                return True
        taken: set[str] = set()
        for request in creates:
            if request.waits == "room":
                assert isinstance(request.body, m.Create)
                if not taken & set(request.body.devices) and self.decide(request, request.body):
                    return True
                taken |= set(request.body.devices)
        return False

    def busy(self, name: str) -> bool:
        creating = [request.body for request in self.requests if request.waits == "room"]
        return self.drafted(name) or any(isinstance(body, m.Create) and body.name == name for body in creating)

    def offer(self, request: Request, creates: list[Request]) -> bool:
        """Give a create its turn, or refuse it, or let it step aside: False."""
        assert isinstance(request.body, m.Create)
        try:
            self.check_writer(request.session, request.body)
        except Refusal as refusal:
            self.refuse(request, refusal.code)
            return True
        uid = request.session.uid
        earlier = creates[: creates.index(request)]
        limit = self.quota(uid).memory
        if any(other.aside and other.session.uid == uid for other in earlier) or (
            limit is not None and self.total(request) and self.memory_of(uid) + self.total(request) > limit
        ):
            request.aside = True
            return False
        request.aside = False
        request.waits = "room"
        return True

    def decide(self, request: Request, body: m.Create) -> bool:
        """Give a create its room, or refuse it if there will never be enough, or let it wait: False."""
        assert request.layout is not None
        sizes = {uuid: self.sizes(body, request.layout, uuid) for uuid in body.devices}
        if any(self.most(uuid) < sum(sizes[uuid]) for uuid in body.devices):
            self.refuse(request, "over_budget")
            return True
        if any(self.room(uuid) < sum(sizes[uuid]) for uuid in body.devices):
            return False
        try:
            base = self.base_of(request.session, body)
        except Refusal as refusal:
            self.refuse(request, refusal.code)
            return True
        if request.timed:
            self.out.dropped.append(request.timer)
            request.timed = False
        request.waits = "memory"
        number = self.last.get(body.name, 0) + 1
        request.version = Version(body.name, number, request.session.uid, body, request.layout)
        self.versions.append(request.version)
        if body.name not in self.owners:
            self.owners[body.name] = request.session.uid
            self.groups[body.name] = request.session.groups[0]
            self.modes[body.name] = self.policy.mode if body.mode is None else body.mode
        for place, uuid in enumerate(body.devices):
            block = Block(request.version, uuid, sizes[uuid])
            if block.cells:
                self.blocks.append(block)
                self.out.blocks.append(block)
            new, cells = iter(block.cells), list[Cell | None]()
            for number in range(len(request.layout.allocations)):
                kept = None if body.base is None else body.base.allocations[number]
                if body.plan is not None and body.plan[number] != place:
                    cells.append(None)
                elif base is None or kept is None:
                    cells.append(next(new))
                else:
                    cells.append(base.homes[place].cells[kept])
            request.version.homes.append(Home(request.version, uuid, cells))
        self.complete(request, request.version)
        return True

    # -- words ---------------------------------------------------------------------

    def name(self, name: str) -> None:
        if name not in GOOD_NAMES:
            raise Refusal("invalid")

    def find(self, session: Session, name: str, number: int) -> Version:
        self.name(name)
        for version in self.of(name):
            if version.number == number or (number == 0 and version.state == "current"):
                return version
        raise Refusal("retired" if 0 < number <= self.latest(session, name) else "not_found")

    def announce(self, name: str) -> None:
        for session, watched in self.watches:
            if watched == name and self.hears(session, name):
                self.notice(session, name)

    def notice(self, session: Session, name: str) -> None:
        current = self.current(name)
        self.out.notices.append((session.id, m.PoolChanged(name, current.number if current else 0)))
