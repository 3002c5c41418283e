"""What the log and the counters have of what happens to a ledger."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest

from cubroker.protocol import messages as m
from cubroker.server.ledger import Budget, Ledger, Limits
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import Policy, Quota
from cubroker.server.monitoring import observer
from cubroker.server.monitoring.metrics import BrokerCounters
from cubroker.server.monitoring.observer import LedgerObserver, Releases
from tests.unit.server.ledger.story import ALICE, BOB, BROKER, MIB, asks, attaches, creates


class Scene:
    """A ledger with an observer; sessions 1 and 2 are Alice's and Bob's."""

    def __init__(self) -> None:
        self.ledger = Ledger([Budget(0, "GPU-0", "first", 16 * MIB, 10 * MIB)], BROKER)
        self.counters = BrokerCounters()
        self.observer = LedgerObserver(self.ledger, self.counters)
        self.tell(e.SessionOpened(1, 101, ALICE, 100), e.SessionOpened(2, 102, BOB, 200))

    def tell(self, *events: e.LedgerEvent) -> None:
        for event in events:
            self.observer.before(event)
            self.observer.after(event, self.ledger.handle(event))

    def publish(self) -> None:
        self.tell(creates(1, 1, "llama", MIB), e.Allocated(1, (b"handle",)), asks(1, 2, m.Seal(1)))

    def counted(self, name: str, **labels: str) -> float | None:
        return self.counters.registry.get_sample_value(name, labels)


@pytest.fixture
def scene(caplog: pytest.LogCaptureFixture) -> Scene:
    caplog.set_level(logging.INFO)
    return Scene()


def test_publications_and_ends_are_lines_that_say_who_and_why(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.publish()
    scene.tell(attaches(2, 1, "llama"), asks(1, 3, m.Retire("llama", 0)), e.ConnectionLost(2), e.ProcessExited(2))
    assert caplog.messages == [
        "session 1 (pid 101, uid 1001): writes llama@1",
        "session 1 (pid 101, uid 1001): published llama@1",
        "session 1 (pid 101, uid 1001): retired llama@1, with 1 lease left on it",
        "session 2 (pid 102, uid 1002): the connection has ended; 1 lease until the process does",
        "session 2 (pid 102, uid 1002): the process has ended, and with it 1 lease",
    ]
    fields = {
        name: caplog.records[1].__dict__[name] for name in ("session", "pid", "uid", "request", "pool", "version")
    }
    assert fields == {"session": 1, "pid": 101, "uid": ALICE, "request": 2, "pool": "llama", "version": 1}


@pytest.mark.parametrize(
    "seal", [m.Seal(1), m.SealDigested(1, m.Digests("cubroker-128-1", ((bytes(16),),))), m.SealInPlace(1)]
)
def test_each_kind_of_seal_says_what_it_published(
    scene: Scene, caplog: pytest.LogCaptureFixture, seal: m.Seal | m.SealInPlace
) -> None:
    scene.tell(creates(1, 1, "llama", MIB), e.Allocated(1, (b"handle",)), asks(1, 2, seal))
    assert caplog.messages[-1] == "session 1 (pid 101, uid 1001): published llama@1"


def test_a_refusal_says_what_was_asked_and_why_not(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.tell(attaches(2, 1, "llama"))
    (message,) = caplog.messages
    assert message.startswith(
        "session 2 (pid 102, uid 1002): Attach of llama was refused (not_found): no pool is named"
    )
    assert caplog.records[0].__dict__["code"] == "not_found"
    assert scene.counted("cubroker_refusals_total", request="Attach", code="not_found") == 1


def test_what_is_denied_is_one_warning_with_its_request_and_its_pool(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.publish()
    caplog.clear()
    scene.tell(asks(2, 1, m.Retire("llama", 0)))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"process 102 (user {BOB}) was refused: user {BOB} may not publish or retire")
    fields = {name: record.__dict__[name] for name in ("session", "pid", "uid", "request", "pool", "code")}
    assert fields == {"session": 2, "pid": 102, "uid": BOB, "request": 1, "pool": "llama", "code": "denied"}
    assert scene.counted("cubroker_refusals_total", request="Retire", code="denied") == 1


def test_everything_else_is_for_those_who_want_all(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    scene.publish()
    caplog.clear()
    scene.tell(e.SessionOpened(3, 103, BOB, 200), attaches(3, 1, "llama"), asks(3, 2, m.Close(2)))
    scene.tell(asks(3, 3, m.ListDevices()), asks(3, 4, m.Tell("llama", 0)), e.ProcessExited(3))
    who = "session 3 (pid 103, uid 1002)"
    assert caplog.messages == [
        f"{who}: joined",
        f"{who}: attached to llama@1, lease 2",
        f"{who}: Close was done",
        f"{who}: ListDevices was done",
        f"{who}: Tell was done",
        f"{who}: the process has ended",
    ]


def test_it_is_told_who_drains_the_broker(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.tell(
        e.SessionOpened(3, 103, 0, 0, verified=True),
        asks(3, 1, m.Drain(True)),
        asks(2, 1, m.Drain(True)),
        asks(3, 2, m.Drain(False)),
    )
    on, denied, off = caplog.messages
    assert on == "session 3 (pid 103, uid 0): drains the broker, which lends nothing new"
    assert denied.startswith("process 102 (user 1002) was refused: user 1002 may not drain the broker")
    assert off == "session 3 (pid 103, uid 0): has the broker lend again"


def test_a_user_who_is_refused_all_the_time_has_few_lines(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    for request in range(observer.BURST + 50):
        scene.tell(attaches(2, request, "llama"))
    assert observer.BURST <= len(caplog.messages) < observer.BURST + 10
    scene.publish()
    assert caplog.messages[-1] == "session 1 (pid 101, uid 1001): published llama@1"


def test_a_request_counts_with_its_answer_however_late(scene: Scene) -> None:
    scene.tell(attaches(2, 1, "llama", wait=5.0))
    assert scene.counted("cubroker_request_seconds_count", request="Attach") is None
    scene.publish()
    assert scene.counted("cubroker_request_seconds_count", request="Attach") == 1
    assert scene.counted("cubroker_request_seconds_count", request="Create") == 1


def test_nothing_is_kept_of_requests_that_nobody_will_answer(scene: Scene) -> None:
    scene.tell(
        attaches(2, 1, "llama", wait=5.0), attaches(1, 1, "llama", wait=5.0), e.ConnectionLost(2), e.ProcessExited(1)
    )
    for session in (1, 2):
        scene.observer.after(e.TimerExpired(1), [e.Respond(session, 1, m.Done())])
    assert scene.counted("cubroker_request_seconds_count", request="Attach") is None


def test_an_answer_to_a_question_of_an_earlier_broker_is_not_counted(scene: Scene) -> None:
    scene.observer.after(e.TimerExpired(1), [e.Respond(2, 77, m.Done())])
    assert scene.counted("cubroker_request_seconds_count", request="Attach") is None


def test_a_device_frees_until_it_says_that_it_has(scene: Scene) -> None:
    scene.publish()
    assert freeing(scene) == {}
    scene.tell(creates(1, 3, "llama", MIB), e.Allocated(2, (b"handle",)), asks(1, 4, m.Seal(2)))
    scene.tell(asks(1, 5, m.Retire("llama", 2)))
    before = freeing(scene)["GPU-0"]
    assert 0 <= before <= freeing(scene)["GPU-0"]
    scene.tell(e.Freed(1))
    assert set(freeing(scene)) == {"GPU-0"}, "the other one is left"
    scene.tell(e.Freed(2))
    assert freeing(scene) == {}


def test_the_memory_of_a_group_is_being_freed_while_its_devices_unbind_it() -> None:
    releases = Releases()
    members = (("GPU-0", 5), ("GPU-1", 6))
    releases.begun(e.BindMulticast(7, (MIB,), members), 0.0)
    assert releases.longest(1.0) == {}
    releases.begun(e.UnbindMulticast(7), 10.0)
    assert releases.longest(11.0) == {"GPU-0": 1.0, "GPU-1": 1.0}
    releases.done(e.MulticastUnbound(7))
    releases.begun(e.Free(5, "GPU-0", (1, 2)), 12.0)
    releases.begun(e.Free(5, "GPU-0", (3,)), 14.0)
    assert releases.longest(15.0) == {"GPU-0": 3.0}
    releases.done(e.Freed(5, (1, 2)))
    assert releases.longest(15.0) == {"GPU-0": 1.0}
    releases.done(e.Freed(5, (3,)))
    releases.done(e.Freed(5, (3,)))
    assert releases.longest(15.0) == {}


def freeing(scene: Scene) -> Mapping[str, float]:
    return scene.observer.snapshot(everything=True).gauges.freeing


def test_a_mistake_in_looking_is_logged_and_harms_nobody(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    broken = LedgerObserver(None)  # type: ignore[arg-type]
    broken.before(e.ConnectionLost(1))
    broken.after(e.SessionOpened(1, 101, ALICE, 100), [])
    assert caplog.messages == ["the broker failed at counting and logging an event"] * 2


def test_a_failure_at_one_reply_does_not_lose_the_request_that_led_to_it(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier, later = attaches(1, 1, "llama", wait=5.0), attaches(2, 1, "llama", wait=5.0)

    def fail(request: str, seconds: float, code: str = "") -> None:
        raise MemoryError

    scene.tell(earlier)
    scene.observer.before(later)
    with monkeypatch.context() as patch:
        patch.setattr(scene.counters, "request_answered", fail)
        scene.observer.after(later, [e.Respond(1, 1, m.Done())])
    assert caplog.messages == ["the broker failed at counting and logging an event"]
    scene.observer.after(e.TimerExpired(1), [e.Respond(2, 1, m.Done())])
    assert scene.counted("cubroker_request_seconds_count", request="Attach") == 1


def test_who_has_too_much_beyond_leases_is_one_line_and_so_is_who_has_no_longer(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    def looked(**bytes_of: int) -> None:
        users = {"alice": (101, ALICE), "bob": (102, BOB)}
        found = (e.ProcessMemory(*users[name], {77: nbytes}) for name, nbytes in bytes_of.items())
        scene.tell(e.ProcessScanStarted(), e.ProcessScanFinished(tuple(found)))

    def allows(nbytes: int | None) -> None:
        policy = Policy(quota=Quota(mapped_beyond_leases=nbytes))
        scene.tell(e.Reconfigured(policy, Limits(), {"GPU-0": 10 * MIB}))

    looked(alice=2 * MIB)
    assert scene.observer.snapshot(everything=True).gauges.beyond_leases == {ALICE: 2 * MIB}
    assert caplog.messages == []
    allows(MIB)
    looked(alice=2 * MIB, bob=MIB)
    looked(alice=3 * MIB, bob=MIB)
    (warning,) = caplog.records
    assert (warning.levelname, warning.__dict__["uid"]) == ("WARNING", ALICE)
    assert warning.getMessage().startswith(f"user {ALICE} gets no leases: processes of user {ALICE} have 2 MiB of the")
    looked(bob=2 * MIB)
    assert f"user {BOB} gets no leases" in caplog.messages[1]
    assert f"user {ALICE} gets leases again" in caplog.messages[2]
    allows(None)
    assert len(caplog.messages) == 4
    assert f"user {BOB} gets leases again" in caplog.messages[3]
    assert scene.observer.snapshot(everything=True).gauges.beyond_leases == {BOB: 2 * MIB}
