"""The ledger and the model side by side: every event goes to both, and what comes of it must be the same."""

from __future__ import annotations

import msgspec

from cubroker.protocol import messages as m
from cubroker.server.ledger import Budget, Ledger, Limits
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import Policy
from tests.fuzz.simulation import restart
from tests.fuzz.simulation.model import Model
from tests.fuzz.simulation.records import Block, Expected, MulticastGroup


class Pair:
    """A ledger and a model that have seen the same events."""

    def __init__(
        self, devices: tuple[Budget, ...], uid: int, limits: Limits, policy: Policy, store: int | None = None
    ) -> None:
        self.ledger = Ledger(devices, uid, limits, policy, store)
        self.model = Model(devices, uid, limits, policy)
        self.model.store = store
        self.kept: dict[bytes, bytes] = {}  # the record, as it was committed change by change
        self.under_way: list[Block] = []  # asked for and not reported
        self.to_free: list[tuple[Block, tuple[int, ...]]] = []  # to be freed and not reported
        self.to_bind: list[MulticastGroup] = []  # asked for and not reported
        self.to_unbind: list[MulticastGroup] = []
        #: allocations of tickets and groups whose descriptors a session may be sent
        self.handed: dict[tuple[int, int], set[tuple[int, int]]] = {}
        self.counts: dict[int, int] = {}  # allocations of each ticket

    def admits(self, uid: int, *, verified: bool) -> bool:
        """Whether a user may open one more session, by both."""
        refusal = self.ledger.admission_error(uid, verified=verified)
        assert refusal is None or (refusal.code == "over_quota" and refusal.message)
        assert (refusal is None) == self.model.admits(uid, verified=verified)
        return refusal is None

    def handle(self, event: e.LedgerEvent) -> None:
        """Give an event to both; raises ``AssertionError`` if the effects differ or the ledger contradicts itself."""
        effects = self.ledger.handle(event)
        self.ledger.check()
        self._record()
        expected = self.model.handle(event)
        self._answers(expected, [effect for effect in effects if isinstance(effect, e.Respond)])
        notices = [(effect.session, effect.notice) for effect in effects if isinstance(effect, e.Notify)]
        assert _counted(notices) == _counted(expected.notices)
        forgotten = [effect.session for effect in effects if isinstance(effect, e.ForgetSession)]
        assert forgotten == expected.forgotten
        assert sum(isinstance(effect, e.ShutdownReady) for effect in effects) == expected.drained
        _check_order(effects)
        self._memory(expected, effects)
        self._multicast_groups(expected, effects)
        self._descriptors(expected, effects)
        self._timers(expected, effects)

    def restart(self, devices: tuple[Budget, ...], limits: Limits, policy: Policy, store: int) -> None:
        """Restore the ledger from its record; what the shell knew is gone but for the sessions and the memory."""
        before = self.ledger
        self.ledger = Ledger.restore(devices, self.model.uid, limits, policy, self.kept.items(), store)
        self.ledger.check()
        assert self.ledger.snapshot() == self.kept
        assert not self.ledger.changes()
        for lease in self.model.leases:
            if lease.version.body.share != "multicast":  # whose group is to be put together again
                key = lease.session.id, lease.id
                assert self.ledger.granted(*key) is not None
                assert self.ledger.granted(*key) == before.granted(*key)
                assert self.ledger.sent_fds(*key) == before.sent_fds(*key)
        restart.restart(self.model, devices, limits, policy, store)
        assert bool(self.ledger.drain_reason) == self.model.drained
        held = [
            (block.ticket, block.device, {cell.index: cell.nbytes for cell in block.cells}, block.version.body.durable)
            for block in self.model.blocks
        ]
        found = [(held.ticket, held.device, held.sizes, held.durable) for held in self.ledger.held_memory()]
        assert sorted(found, key=repr) == sorted(held, key=repr)
        joined = {session.id: not session.connected for session in self.ledger.sessions()}
        assert joined == {session.id: not session.connected for session in self.model.sessions}
        for pending in (self.under_way, self.to_free, self.to_bind, self.to_unbind):
            pending.clear()

    def _record(self) -> None:
        """Commit what changed; then the record is that of the whole ledger."""
        changes = self.ledger.changes()
        assert self.model.store is not None or not changes
        for key, value in changes:
            self.kept.pop(key, None)
            if value is not None:
                self.kept[key] = value
        assert self.model.store is None or self.kept == self.ledger.snapshot()

    def _answers(self, expected: Expected, responses: list[e.Respond]) -> None:
        answers = {(response.session, response.request): response.body for response in responses}
        assert len(answers) == len(responses), "a request was answered twice"
        assert answers.keys() == expected.answers.keys()
        for key, body in answers.items():
            wanted = expected.answers[key]
            if isinstance(body, m.Attached | m.Created):
                assert not isinstance(wanted, str), f"{body} instead of {wanted}"
                expected.leases[key].id = body.lease
                body = msgspec.structs.replace(body, lease=0)
            elif isinstance(body, m.EventShared | m.EventOpened):
                assert not isinstance(wanted, str), f"{body} instead of {wanted}"
                signal = expected.signals[key]
                signal.id = signal.id or body.event
                assert signal.id == body.event
                body = msgspec.structs.replace(body, event=0)
            elif isinstance(body, m.Locked):
                assert not isinstance(wanted, str), f"{body} instead of {wanted}"
                expected.locks[key].id = body.lock
                body = msgspec.structs.replace(body, lock=0)
            elif isinstance(body, m.Failed):
                assert body.code == wanted, f"{body} instead of {wanted}"
                assert body.message
                continue
            assert body == wanted

    def _memory(self, expected: Expected, effects: list[e.Effect]) -> None:
        allocates = [effect for effect in effects if isinstance(effect, e.Allocate)]
        assert len(allocates) == len(expected.blocks)
        for block in expected.blocks:  # on one device, in order
            allocate = next(allocate for allocate in allocates if allocate.device == block.device)
            allocates.remove(allocate)
            assert allocate.sizes == block.sizes
            block.ticket = allocate.ticket
            self.counts[block.ticket] = len(block.sizes)
            self.under_way.append(block)
        frees = [(free.ticket, free.device, free.numbers) for free in effects if isinstance(free, e.Free)]
        assert sorted(frees) == sorted(
            (block.ticket, block.device, () if len(numbers) == len(block.sizes) else numbers)
            for block, numbers in expected.frees
        )
        self.to_free += expected.frees

    def _multicast_groups(self, expected: Expected, effects: list[e.Effect]) -> None:
        binds = [effect for effect in effects if isinstance(effect, e.BindMulticast)]
        assert len(binds) == len(expected.bound)
        for effect, group in zip(binds, expected.bound, strict=True):
            blocks = [cell.block for home in group.version.homes for cell in home.cells[:1] if cell]
            assert effect.members == tuple((block.device, block.ticket) for block in blocks)
            assert {effect.sizes} == {block.sizes for block in blocks}
            assert effect.group not in [block.ticket for block in self.model.blocks]
            group.id = effect.group
            self.to_bind.append(group)
        unbound = [effect.group for effect in effects if isinstance(effect, e.UnbindMulticast)]
        assert sorted(unbound) == sorted(group.id for group in expected.unbound)
        self.to_unbind += expected.unbound
        bound = [
            block
            for group in self.model.multicast_groups
            for block in self.model.blocks
            if block.version is group.version
        ]
        assert not [block for block, _ in self.to_free if block in bound], "memory is freed that is still bound"

    def _descriptors(self, expected: Expected, effects: list[e.Effect]) -> None:
        """What is handed over comes before the answer, and stays until it is withdrawn; all of a lease, or nothing."""
        handed = [effect for effect in effects if isinstance(effect, e.SendFds)]
        assert sorted((o.session, o.lease, o.sources, o.group, o.writable) for o in handed) == sorted(
            (
                lease.session.id,
                lease.id,
                self.model.sources(lease, homes),
                group.id if group else 0,
                lease.version.body.writable or lease.writes,
            )
            for lease, homes, group in expected.handed
        )
        withdrawn = [(effect.session, effect.lease) for effect in effects if isinstance(effect, e.CancelFds)]
        assert sorted(withdrawn) == sorted(expected.withdrawn)
        rebound: set[tuple[int, int]] = set()
        for effect in effects:
            match effect:
                case e.SendFds(session, lease, sources, group, again):
                    known = self.handed.setdefault((session, lease), set())
                    assert again == bool(known), "descriptors of a lease again, and nobody says why"
                    assert again == ((session, lease) in rebound)
                    known |= {(s.ticket, n) for s in sources for n in s.numbers or range(self.counts[s.ticket])}
                    known.add((group, 0))
                case e.Notify(session, m.Rebound(lease)):
                    rebound.add((session, lease))
                case e.CancelFds(session, lease):
                    self.handed.pop((session, lease), None)
                case e.Respond(session, _, m.Attached() | m.Created() as body):
                    handles = {handle for replica in body.replicas for handle in replica.handles}
                    assert (m.DESCRIPTOR in handles) == ((session, body.lease) in self.handed)
                    assert m.DESCRIPTOR not in handles or handles <= {m.DESCRIPTOR, b""}
                case e.Free(ticket, _, numbers):
                    going = {(ticket, number) for number in numbers or range(self.counts[ticket])}
                    assert all(going.isdisjoint(known) for known in self.handed.values())
                case e.UnbindMulticast(group):
                    assert not any((group, 0) in known for known in self.handed.values())

    def _timers(self, expected: Expected, effects: list[e.Effect]) -> None:
        timers = [effect for effect in effects if isinstance(effect, e.SetTimer)]
        if expected.timer is None:
            assert not timers
        else:
            assert [timer.seconds for timer in timers] == [expected.timer.body.wait]
            expected.timer.timer = timers[0].timer
        dropped = [effect.timer for effect in effects if isinstance(effect, e.CancelTimer)]
        assert sorted(dropped) == sorted(expected.dropped)


def _check_order(effects: list[e.Effect]) -> None:
    """A session that is forgotten is told nothing afterwards."""
    forgotten: set[int] = set()
    for effect in effects:
        if isinstance(effect, e.ForgetSession):
            forgotten.add(effect.session)
        elif isinstance(effect, e.Respond | e.Notify | e.SendFds | e.CancelFds):
            assert effect.session not in forgotten


def _counted(notices: list[tuple[int, m.Notice]]) -> list[str]:
    return sorted(map(repr, notices))
