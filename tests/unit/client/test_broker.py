from __future__ import annotations

import enum
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cubroker.client import Broker, Draft, Pool
from cubroker.client.loading.loader import load
from cubroker.protocol import Layout, paths
from cubroker.protocol.errors import Exists, Invalid, NotFound, OverBudget, TimedOut, Unavailable, Unsupported
from tests.brokers import PATIENCE, BrokerProcess, eventually
from tests.unit.client.conftest import LAYOUT, begun, content, leases, publish
from tests.unit.client.scripts import run


def test_what_one_process_publishes_another_one_reads(client: Broker, lender: BrokerProcess, name: str) -> None:
    publish(client, name)
    done = run(
        lender,
        """
        with Broker(directory) as broker, broker.attach(sys.argv[2]) as pool:
            print(list(pool), pool["weight"].tobytes().hex())
        """,
        name,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("]")[0] + "]" == "['weight', 'bias', 'scale', 'none']"
    assert content("weight", 128).hex() in done.stdout


def test_a_pool_knows_what_it_is(client: Broker, name: str) -> None:
    publish(client, name)
    with client.attach(name, device=0) as pool:
        assert (pool.name, pool.version, pool.nbytes, len(pool)) == (name, 1, LAYOUT.nbytes, 4)
        assert pool.layout == LAYOUT
        assert pool.device == pool.context.device == client.driver.devices[0]
        assert list(pool) == ["weight", "bias", "scale", "none"]
        assert "weight" in pool
        assert "other" not in pool
        assert pool.lease > 0
        assert f"{pool!r}" == f"<Pool {name!r} version 1, 4 tensors>"
        assert pool == pool
        with pytest.raises(KeyError, match="other"):
            pool["other"]
    assert pool.closed
    assert "closed" in repr(pool)


def test_slabs_are_the_allocations_as_bytes(client: Broker, name: str) -> None:
    layout = Layout.pack([("a", "U8", (300,)), ("b", "U8", (300,))], slab=512)
    publish(client, name, layout)
    with client.attach(name) as pool:
        assert [slab.shape for slab in pool.allocation_views] == [(512,), (512,)]
        assert [slab.dtype for slab in pool.allocation_views] == ["U8", "U8"]
        assert [slab.tobytes()[:300] for slab in pool.allocation_views] == [content("a", 300), content("b", 300)]
        assert [slab.pointer for slab in pool.allocation_views] == [pool["a"].pointer, pool["b"].pointer]


def test_each_attach_has_a_lease_of_its_own_on_the_same_mapping(client: Broker, name: str) -> None:
    publish(client, name, share="ipc")
    with client.attach(name) as one, client.attach(name) as two:
        assert one.lease != two.lease
        assert one["weight"].pointer == two["weight"].pointer
        assert leases(client, name) == 2
        one.close()
        assert leases(client, name) == 1
        assert two["weight"].tobytes() == content("weight", 128)


def test_versions_are_attached_by_number_or_the_current_one(client: Broker, name: str) -> None:
    publish(client, name)
    old = client.attach(name)
    assert publish(client, name, Layout.pack([("x", "U8", (5,))])) == 2
    with client.attach(name) as new, client.attach(name, version=1) as same:
        assert (old.version, new.version, same.version) == (1, 2, 1)
        assert list(new) == ["x"]
        assert list(same) == list(LAYOUT_NAMES)
    old.close()


LAYOUT_NAMES = ("weight", "bias", "scale", "none")


def test_devices_are_named_by_ordinal_or_uuid(client: Broker, name: str) -> None:
    first, second = client.driver.devices
    cuda0 = SimpleNamespace(type="cuda", index=0)  # what torch.device has
    publish(client, name, devices=("cuda:0", second.uuid[:12]))
    names = (1, second), (second.uuid, second), (second.uuid[:12].lower(), second), ("cuda:1", second), (first, first)
    for device, expected in (*names, (cuda0, first), ("cuda", first), (client.devices()[1], second)):
        with client.attach(name, device=device) as pool:
            assert pool.device == expected
            assert pool["weight"].tobytes() == content("weight", 128)
    with pytest.raises(Invalid, match=rf"the broker.s devices, 0 .* 1 \(.*, {second.uuid[:13]}\)"):
        client.attach(name)


@pytest.mark.parametrize("device", [7, -1, "GPU-none", True])
def test_a_device_that_is_not_there_is_answered_with_those_that_are(client: Broker, name: str, device: Any) -> None:
    if device is True:
        device = 2
    with pytest.raises(NotFound, match=rf"no device {device!r}; it has 0 \(.*, HOST-.*\), 1 \(.*, HOST-"):
        client.attach(name, device=device)


def test_a_pool_that_is_not_there_is_not_found_or_waited_for(client: Broker, name: str) -> None:
    with pytest.raises(NotFound, match=name):
        client.attach(name)
    with pytest.raises(TimedOut):
        client.attach(name, wait=0.01)
    found: list[Pool] = []
    reader = threading.Thread(target=lambda: found.append(client.attach(name, wait=60)))
    reader.start()
    publish(client, name)
    reader.join()
    assert found[0].version == 1
    found[0].close()


def test_there_is_one_writer_at_a_time(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT):
        with pytest.raises(Exists):
            client.create(name, LAYOUT)
        found: list[Draft] = []
        next_one = threading.Thread(target=lambda: found.append(client.create(name, LAYOUT, wait=60)))
        next_one.start()
    next_one.join()
    assert found[0].version == 1
    found[0].close()


def test_the_first_of_many_creates_and_the_others_attach(client: Broker, name: str) -> None:
    first = client.attach_or_create(name, LAYOUT)
    assert isinstance(first, Draft)
    found: list[Pool | Draft] = []
    others = [
        threading.Thread(target=lambda: found.append(client.attach_or_create(name, LAYOUT, device=0))) for _ in range(4)
    ]
    for other in others:
        other.start()
    first.seal()
    for other in others:
        other.join()
    assert [type(pool) for pool in found] == [Pool] * 4
    assert {pool.version for pool in found} == {1}
    for pool in found:
        pool.close()


def test_the_next_in_line_takes_over_from_a_writer_that_fails(client: Broker, name: str) -> None:
    first = client.attach_or_create(name, LAYOUT, devices=(0, 1), device=1)
    found: list[Pool | Draft] = []
    other = threading.Thread(target=lambda: found.append(client.attach_or_create(name, LAYOUT)))
    other.start()
    first.close()
    other.join()
    assert isinstance(found[0], Draft)
    found[0].close()


def test_what_there_is_can_be_listed(client: Broker, name: str) -> None:
    publish(client, name)
    info, layout, places = client.describe(name)
    assert (layout, places) == (LAYOUT, ())
    assert info in client.pools()
    assert (info.name, info.version, info.state, info.leases) == (name, 1, "current", 0)
    assert client.session in [session.session for session in client.clients()]
    assert [device.uuid for device in client.devices()] == [device.uuid for device in client.driver.devices]
    with Broker(client.directory) as another:
        shown = f"<Broker on {client.directory}, session {another.session}"
        assert repr(another) == f"{shown}>"
    assert repr(another) == f"{shown}, closed>"


def test_a_retired_version_stays_with_who_holds_it(client: Broker, name: str) -> None:
    publish(client, name)
    with client.attach(name) as pool:
        retirement = client.retire(name)
        assert (retirement.version, retirement.leases) == (1, 1)
        with pytest.raises(NotFound):
            client.attach(name)
        with pytest.raises(
            NotFound, match=rf"load it again\. {name}@1 is still held; name that version if you mean it"
        ):
            client.describe(name)
        assert client.describe(name, 1)[0].state == "retired"
        assert pool["weight"].tobytes() == content("weight", 128)
    eventually(lambda: name not in [info.name for info in client.pools()], "the end of the retired version")


@pytest.mark.parametrize(
    ("call", "error", "complaint"),
    [
        (lambda broker: broker.attach("no name!"), Invalid, "cannot name a pool.* or _$"),
        (
            lambda broker: broker.attach("x@1"),
            Invalid,
            "'x@1' cannot .*; give the version separately from the name 'x'",
        ),
        (lambda broker: broker.attach("@1"), Invalid, "cannot name a pool.* or _$"),
        *(
            (
                partial(call, name=None),
                Invalid,
                "an object of type NoneType cannot name a (pool|lock): use 1 to 255 letters",
            )
            for call in (
                Broker.attach,
                partial(Broker.create, layout=LAYOUT),
                partial(Broker.attach_or_create, layout=LAYOUT),
                partial(Broker.publish, source={}),
                Broker.retire,
                Broker.watch,
                Broker.wait_ended,
                Broker.follow,
                Broker.lock,
                Broker.describe,
                Broker.digests,
                lambda broker, name: broker.story(name),
            )
        ),
        (lambda broker: broker.attach("x", version=0), Invalid, "no whole number from 1 to"),
        (lambda broker: broker.attach("x", version=2**70), Invalid, "no whole number from 1 to"),
        (
            lambda broker: broker.attach("x", version="2"),
            Invalid,
            "version '2' is no whole number from 1 .* current one",
        ),
        (lambda broker: broker.retire("x", version=1.0), Invalid, "version 1.0 is no whole number"),
        (lambda broker: broker.describe("x", version=True), Invalid, "version True is no whole number"),
        (lambda broker: broker.attach("x", wait=-1), Invalid, "wait of -1"),
        (lambda broker: broker.attach("x", wait=float("nan")), Invalid, "wait of nan"),
        (lambda broker: broker.attach("x", wait=None), Invalid, "a wait of None seconds; it can be 0 to 604800"),
        (lambda broker: broker.reconnect(wait="3"), Invalid, "a wait of '3' seconds"),
        (lambda broker: broker.create("x", LAYOUT, share="wish"), Invalid, "unknown share kind"),
        (lambda broker: broker.create("x", LAYOUT, share="ipc", durable=True), Unsupported, "use vmm or multicast"),
        (lambda broker: broker.create("x", LAYOUT, durable=True), Unsupported, "no store"),
        (lambda broker: broker.attach_or_create("x", LAYOUT, share="vmm", durable=True), Unsupported, "no store"),
        (lambda broker: broker.create("x", LAYOUT, devices=()), Invalid, "no list of devices"),
        (lambda broker: broker.create("x", LAYOUT, devices="GPU-1"), Invalid, "'GPU-1' is no list of devices"),
        (lambda broker: broker.attach_or_create("x", LAYOUT, devices=()), Invalid, "no list of devices"),
        (lambda broker: broker.create("x", LAYOUT, devices=1), Invalid, "1 is no list of devices"),
        (lambda broker: broker.publish("x", {"a": b"1"}, devices=1), Invalid, "1 is no list of devices"),
        (lambda broker: broker.create("x", LAYOUT, devices=np.array(0)), Invalid, r"array\(0\) is no list of devices"),
        (lambda broker: broker.create("x", LAYOUT, plan=1), Invalid, "1 is no plan: .* a mapping of names"),
        (lambda broker: broker.publish("x", {"a": b"1"}, plan=["*"]), Invalid, r"\['\*'\] is no plan: "),
        (lambda broker: broker.create("x", Layout.pack([("a", "U8", (1 << 30,))])), OverBudget, "budget"),
        (lambda broker: broker.describe("x"), NotFound, "x"),
        (lambda broker: broker.retire("x", version=3), NotFound, "x"),
    ],
)
def test_a_mistake_is_named(client: Broker, call: Any, error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        call(client)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), None, "3"])
def test_a_timeout_must_be_some_time(lender: BrokerProcess, timeout: Any) -> None:
    with pytest.raises(Invalid, match=f"a timeout of {timeout!r} seconds; it can be more than 0, up to 604800"):
        Broker(lender.directory, timeout=timeout)


def test_an_empty_directory_is_not_the_current_folder(monkeypatch: pytest.MonkeyPatch, lender: BrokerProcess) -> None:
    monkeypatch.chdir(lender.directory)
    with pytest.raises(Invalid, match="an empty path as the directory of the broker; has the variable"):
        Broker("")


def test_the_directory_comes_from_the_environment(lender: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBROKER_DIR", str(lender.directory))
    with Broker() as broker:
        assert broker.directory == lender.directory


def test_the_log_says_which_directory_was_found_and_nothing_of_one_that_was_named(
    lender: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="cubroker")
    monkeypatch.setattr(paths, "SYSTEM", lender.directory)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    Broker(lender.directory).close()
    monkeypatch.setenv("CUBROKER_DIR", str(lender.directory))
    Broker().close()
    assert caplog.messages == []
    monkeypatch.delenv("CUBROKER_DIR")
    with Broker() as broker:
        assert broker.directory == lender.directory
        found = f"no directory was named; session {broker.session} is with the broker found on {lender.directory}"
    assert caplog.messages == [found]


def test_a_relative_directory_survives_a_change_of_the_working_directory(
    lender: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(lender.directory.parent)
    with Broker(lender.directory.name) as broker:
        monkeypatch.chdir("/")
        assert broker.directory == lender.directory
        assert broker.devices()


FLAGS: list[tuple[str, Callable[[Broker, str, Any], object]]] = [
    ("peer", lambda broker, name, value: broker.attach(name, device=0, peer=value)),
    ("unsealed", lambda broker, name, value: broker.attach(name, version=1, unsealed=value)),
    ("writable", lambda broker, name, value: broker.create(name, LAYOUT, writable=value)),
    ("durable", lambda broker, name, value: broker.create(name, LAYOUT, durable=value)),
    ("writable", lambda broker, name, value: broker.attach_or_create(name, LAYOUT, writable=value)),
    ("peer", lambda broker, name, value: broker.attach_or_create(name, LAYOUT, peer=value)),
    ("durable", lambda broker, name, value: broker.publish(name, {"x": b"1"}, durable=value)),
    ("digest", lambda broker, name, value: broker.publish(name, {"x": b"1"}, digest=value)),
    ("over", lambda broker, _, value: broker.wait_draining(0, over=value)),
    ("on", lambda broker, _, value: broker.drain(on=value)),
    ("digest", lambda broker, name, value: broker.create(name, LAYOUT).seal(digest=value)),
    ("in_place", lambda broker, name, value: broker.create(name, LAYOUT).seal(in_place=value)),
    ("switch", lambda broker, name, value: broker.attach(name).follow(switch=value)),
    ("if_absent", lambda broker, name, value: load(broker, name, "none.safetensors", if_absent=value)),
    ("digest", lambda broker, name, value: load(broker, name, "none.safetensors", digest=value)),
]
"""Calls with a flag, each with the flag's name."""


@pytest.mark.parametrize(("flag", "call"), FLAGS, ids=[f"{number}-{flag}" for number, (flag, _) in enumerate(FLAGS)])
@pytest.mark.parametrize("value", [2, "no"], ids=repr)
def test_a_flag_is_true_or_false(
    client: Broker, name: str, flag: str, call: Callable[[Broker, str, Any], object], value: object
) -> None:
    publish(client, name)
    with pytest.raises(Invalid) as caught:
        call(client, name, value)
    assert caught.value.message == f"{flag}={value!r} is neither True nor False; pass one of these, or leave it out"


def test_what_equals_true_or_false_is_a_flag(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT, writable=np.True_, durable=0) as draft:
        assert draft.seal(digest=np.False_) == 1
    with client.attach(name, unsealed=np.False_) as pool:
        assert pool.writable


@pytest.mark.parametrize(
    "kind", [np.str_, lambda text: enum.StrEnum("Names", {"ONE": text}).ONE], ids=["numpy", "enum"]
)
def test_a_name_may_be_text_of_any_type(client: Broker, name: str, kind: Callable[[str], str]) -> None:
    same = kind(name)
    assert type(same) is not str
    with client.create(same, LAYOUT, writable=True) as draft:
        draft.seal()
    with client.attach(same) as pool, pool.event(kind("ready")), client.watch(same) as watch:
        assert (pool.name, next(watch)) == (name, 1)
    with client.follow(same) as follow:
        assert next(follow) == 1
    with client.lock(same) as lock:
        assert lock.name == name
    assert client.publish(same, {"x": b"1"}, base=None) == 2
    assert client.digests(same).digests is None
    assert client.describe(same)[0].name == name
    assert client.story(same)
    assert client.retire(same).version == 2
    assert client.wait_ended(same, 1, PATIENCE)


@pytest.mark.parametrize("kind", [np.int64, np.array], ids=["numpy", "array without dimensions"])
def test_a_number_may_be_an_integer_of_any_type(client: Broker, name: str, kind: Callable[[int], int]) -> None:
    one, two, owner = kind(1), kind(2), kind(os.getuid())
    client.publish(name, {"x": b"1"}, devices=[one])
    with client.attach(name, version=one, device=one, owner=owner) as pool, client.watch(name, owner=[owner]) as watch:
        assert client.publish(name, {"x": b"2"}, base=one) == 2
        assert (pool.version, next(watch)) == (1, 2)
        assert pool.switch(two) == 2
    assert client.digests(name, two).digests is None
    assert client.describe(name, two)[0].version == 2
    assert client.story(kind(client.session))
    assert client.retire(name, two).version == 2
    assert client.wait_ended(name, two, PATIENCE)


def test_a_closed_broker_says_so_and_can_be_closed_again(lender: BrokerProcess) -> None:
    broker = Broker(lender.directory)
    broker.close()
    broker.close()
    with pytest.raises(Unavailable, match="closed"):
        broker.pools()
    with pytest.raises(Unavailable, match="closed"):
        broker.attach("x")
    with pytest.raises(Unavailable, match="closed"):
        broker.watch("x")


def test_closing_a_broker_closes_its_pools_and_drafts(client: Broker, name: str) -> None:
    publish(client, name)
    with Broker(client.directory) as other:
        pool, draft = other.attach(name), other.create(name, LAYOUT)
    assert pool.closed
    assert draft.closed
    assert leases(client, name) == 0


def test_closing_a_broker_ends_what_other_threads_wait_for(client: Broker, name: str) -> None:
    other = Broker(client.directory)
    waiting = begun(lambda: other.attach(name, wait=3600))
    eventually(other.requests.waiting, "the request")
    other.close()
    with pytest.raises(Unavailable, match="closed while it waited"):
        waiting.result(PATIENCE)
    eventually(lambda: other.session not in [info.session for info in client.clients()], "the end of the session")


def test_a_broker_that_is_dropped_ends_its_session(client: Broker) -> None:
    number = Broker(client.directory).session
    eventually(lambda: number not in [info.session for info in client.clients()], "the end of the session")


def test_a_broker_that_is_dropped_leaves_its_pools_alone(client: Broker, name: str) -> None:
    publish(client, name)
    pool = Broker(client.directory).attach(name)
    assert pool["weight"].tobytes() == content("weight", 128)
    assert leases(client, name) == 1
    pool.close()
    eventually(lambda: len(client.clients()) == 1, "the end of the session")


def test_a_mode_is_the_pools_and_one_that_cannot_be_is_refused(client: Broker, name: str) -> None:
    with pytest.raises(Invalid, match=r"a mode of 640, which is 0o1200; .* as in 0o640"):
        client.create(name, LAYOUT, mode=640)
    for mode in ("640", 640.0, True):
        with pytest.raises(Invalid, match=f"a mode of {mode!r}, which is no whole number; .* as in 0o640"):
            client.create(name, LAYOUT, mode=mode)
    with client.attach_or_create(name, LAYOUT, mode=0o604) as draft:
        assert isinstance(draft, Draft)
        draft.seal()
    assert client.describe(name)[0].mode == 0o604
