"""Pools on other devices than the worker's, and on several."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cubroker.client import Broker, Draft, Pool
from cubroker.client.devices import resolve_plan
from cubroker.client.loading.verify import verify
from cubroker.integrations.torch import state_dict
from cubroker.protocol import Layout
from cubroker.protocol.errors import Invalid, NotFound
from tests import checkpoints
from tests.brokers import eventually, serving
from tests.unit.client.conftest import LAYOUT, content, leases, publish

PLAN = {"a": 0, "b": 1, "c": 0, "none": 1}
TENSORS = [("a", "U8", (300,)), ("b", "F32", (8,)), ("c", "BF16", (3, 5)), ("none", "I64", (0,))]
SHARDED = Layout.pack(TENSORS, groups=PLAN)


@pytest.fixture(scope="module")
def islands() -> Iterator[Path]:
    """A broker whose four devices reach each other in twos."""
    with serving("host:4@16MiB/2") as broker:
        yield broker.directory


# -- peers -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("share")
def test_a_pool_on_a_peer_is_reached_from_the_workers_own_device(client: Broker, name: str) -> None:
    publish(client, name, devices=(1,))
    near, far = client.driver.devices
    with pytest.raises(NotFound, match="reach it from here over peer access"):
        client.attach(name, device=0)
    with client.attach(name, device=0, peer=True) as pool:
        assert (pool.device, pool.memory_device, pool.context.device) == (near, far, near)
        tensor = pool["weight"]
        assert (tensor.device, tensor.memory_device) == (near, far)
        assert tensor.tobytes() == content("weight", 128)
        assert tensor.numpy().tobytes() == content("weight", 128)
        if pool.share == "vmm":
            pool.sleep()
            pool.wake()
            assert pool.device == near
            assert tensor.tobytes() == content("weight", 128)
        del tensor
    assert leases(client, name) == 0


def test_what_is_on_the_workers_own_device_is_not_taken_from_a_peer(client: Broker, name: str) -> None:
    publish(client, name, devices=(1, 0))
    with client.attach(name, device=0, peer=True) as pool:
        assert pool.device == pool.memory_device == client.driver.devices[0]


def test_what_no_device_reaches_is_refused_before_it_is_touched(islands: Path, name: str) -> None:
    with Broker(islands) as client:
        publish(client, name, devices=(2,))
        with client.attach(name, device=3, peer=True) as pool:
            assert (pool.device.index, pool.memory_device.index) == (3, 2)
        with pytest.raises(NotFound, match=r"nor on one that it can reach.*attach there, or load it here"):
            client.attach(name, device=0, peer=True)
        assert leases(client, name) == 0
        client.retire(name)


def test_a_peer_has_to_be_somebodys(client: Broker, name: str) -> None:
    with pytest.raises(Invalid, match="name the device that is to reach it with `device`"):
        client.attach(name, peer=True)


def test_the_first_of_many_creates_and_the_others_reach_it_from_their_own_device(islands: Path, name: str) -> None:
    with Broker(islands) as client:
        found: list[Pool] = []

        def ask() -> None:
            found.append(client.attach_or_create(name, LAYOUT, device=3, devices=(2,), peer=True))

        with pytest.raises(NotFound, match="no device 9"):
            client.attach_or_create(name, LAYOUT, device=9, devices=(2,), peer=True)
        with client.attach_or_create(name, LAYOUT, device=3, devices=(2,), peer=True) as draft:
            assert isinstance(draft, Draft)
            assert (draft.device.index, draft.memory_device.index) == (2, 2)
            draft["weight"].copy_from_bytes(content("weight", 128))
            other = threading.Thread(target=ask)
            other.start()
            eventually(client.requests.waiting, "the request to be under way")
            draft.seal()
            other.join()
        ask()
        for pool in found:
            assert not isinstance(pool, Draft)
            assert (pool.device.index, pool.memory_device.index) == (3, 2)
            assert pool["weight"].tobytes() == content("weight", 128)
            pool.close()
        with pytest.raises(NotFound, match=r"is not on the broker's device 3 .*; it is on the broker's device 2 "):
            client.attach_or_create(name, LAYOUT, device=3, devices=(2,))
        with pytest.raises(NotFound, match="nor on one that it can reach"):
            client.attach_or_create(name, LAYOUT, device=0, peer=True)
        client.retire(name)


# -- shards ----------------------------------------------------------------------------------------


def publish_sharded(client: Broker, name: str) -> None:
    with client.create(name, SHARDED, devices=(0, 1), plan=PLAN) as draft:
        assert [tensor.device.index for tensor in draft.values()] == [0, 1, 0, 1]
        assert [list(shard) for shard in draft.replicas] == [["a", "c"], ["b", "none"]]
        assert [shard.device.index for shard in draft.replicas] == [0, 1]
        label = f"draft of pool {name!r} version {draft.version}"
        assert repr(draft.replicas[1]) == f"<Replica of {label} on device 1, 2 tensors>"
        for tensor in draft.values():
            tensor.copy_from_bytes(content(tensor.name, tensor.nbytes))
        draft.seal()


@pytest.mark.usefixtures("share")
def test_every_tensor_of_a_sharded_pool_is_on_its_own_device(client: Broker, name: str) -> None:
    publish_sharded(client, name)
    (info,) = client.pools()
    assert (info.sharded, len(info.devices), info.nbytes) == (True, 2, SHARDED.nbytes)
    assert client.describe(name)[2] == info.devices
    with client.attach(name) as pool:
        assert [device.index for device in pool.devices] == [0, 1]
        assert {each: tensor.device.index for each, tensor in pool.items()} == PLAN
        assert all(tensor.tobytes() == content(each, tensor.nbytes) for each, tensor in pool.items())
        assert (pool.nbytes, pool.allocations, len(pool.allocation_views)) == (SHARDED.nbytes, (0, 1), 2)
        for ask in (lambda: pool.device, lambda: pool.context, lambda: pool.memory_device):
            with pytest.raises(Invalid, match=f"pool '{name}' version 1 is spread over devices 0, 1; ask each"):
                ask()
        assert list(state_dict(pool)) == list(PLAN)
        if pool.share == "vmm":
            where = [tensor.pointer for tensor in pool.values()]
            pool.sleep()
            pool.wake()
            assert [tensor.pointer for tensor in pool.values()] == where
            assert pool["b"].tobytes() == content("b", 32)


@pytest.mark.usefixtures("share")
def test_a_worker_may_take_the_shard_of_its_device_alone(client: Broker, name: str) -> None:
    publish_sharded(client, name)
    with client.attach(name, device=1) as pool:
        assert (list(pool), len(pool), pool.device.index) == (["b", "none"], 2, 1)
        assert "a" not in pool
        with pytest.raises(KeyError, match="has no tensor 'a'; it is in the shard of another device"):
            pool["a"]
        with pytest.raises(KeyError, match="has no tensor 'nine'; did you mean 'none'"):
            pool["nine"]
        assert (pool.layout, pool.allocations, pool.nbytes) == (SHARDED, (1,), SHARDED.allocations[1])
        assert [slab.name for slab in pool.allocation_views] == ["allocation 1"]
        state: dict[str, Any] = state_dict(pool)
        assert list(state) == ["b", "none"]
        assert bytes(state["b"].view(torch.uint8).numpy().tobytes()) == content("b", 32)
        del state
        if pool.share == "vmm":
            pool.sleep()
            pool.wake()
            assert list(pool) == ["b", "none"]


@pytest.mark.usefixtures("share")
def test_the_first_of_many_spreads_a_pool_and_the_others_get_all_of_it_or_a_shard(client: Broker, name: str) -> None:
    with client.attach_or_create(name, SHARDED, plan=PLAN) as draft:
        assert isinstance(draft, Draft)
        assert [shard.device.index for shard in draft.replicas] == [0, 1]
        for tensor in draft.values():
            tensor.copy_from_bytes(content(tensor.name, tensor.nbytes))
        draft.seal()
    with client.attach_or_create(name, SHARDED, plan=PLAN) as pool:
        assert {each: tensor.device.index for each, tensor in pool.items()} == PLAN
        assert all(tensor.tobytes() == content(each, tensor.nbytes) for each, tensor in pool.items())
    with client.attach_or_create(name, SHARDED, plan=PLAN, device=1) as pool:
        assert (pool.device.index, list(pool)) == (1, ["b", "none"])
    with client.attach_or_create(name, SHARDED, devices=(1, 0)) as pool:  # as attach(device=1)
        assert (pool.device.index, list(pool)) == (1, ["b", "none"])
    with pytest.raises(Invalid, match="name the device that is to reach it with `device`"):
        client.attach_or_create(name, SHARDED, plan=PLAN, peer=True)
    with pytest.raises(Invalid, match="which `devices` does not name"):
        client.attach_or_create(name, SHARDED, plan=PLAN, devices=(0,))


def test_a_plan_says_which_devices_there_are_by_number_or_uuid(client: Broker, name: str) -> None:
    near, far = client.driver.devices
    plan = {"a": 1, "b": near.uuid, "c": far.uuid, "none": 0}
    with client.create(name, Layout.pack(TENSORS, groups=plan), plan=plan) as draft:
        assert [shard.device for shard in draft.replicas] == [far, near]
        assert [list(shard) for shard in draft.replicas] == [["a", "c"], ["b", "none"]]
    for ask in (client.create, client.attach_or_create):
        with ask(name, TENSORS, plan=plan) as packed:
            assert packed.layout == Layout.pack(TENSORS, groups={"a": 1, "b": 0, "c": 1, "none": 0})


def test_a_plan_of_a_create_has_patterns_as_that_of_a_load(client: Broker, name: str) -> None:
    plan = {"b": 0, "[ac]": "cuda:1", "*": 0}
    for layout in (SHARDED, TENSORS, iter(TENSORS), {key: (dtype, shape) for key, dtype, shape in TENSORS}):
        with client.create(name, layout, plan=plan) as draft:
            assert draft.layout == Layout.pack(TENSORS, groups={"a": 1, "b": 0, "c": 1, "none": 0})
            assert [(shard.device.index, list(shard)) for shard in draft.replicas] == [
                (0, ["b", "none"]),
                (1, ["a", "c"]),
            ]
    with pytest.raises(Invalid, match="the plan has no device for tensor 'none'"):
        client.create(name, TENSORS, plan={"[abc]": 0})


def test_a_sharded_draft_that_is_left_leaves_nothing(client: Broker, name: str) -> None:
    with client.create(name, SHARDED, devices=(1, 0), plan=PLAN) as draft:
        assert [shard.device.index for shard in draft.replicas] == [1, 0]
        assert client.describe(name, draft.version)[2] == tuple(device.uuid for device in client.driver.devices)
        assert sum(device.allocated for device in client.devices()) == 4 << 20
    eventually(lambda: not any(device.allocated for device in client.devices()), "the memory to return")


@pytest.mark.parametrize(
    ("layout", "devices", "plan", "says"),
    [
        (LAYOUT, (0, 1), {"weight": 0, "bias": 1, "scale": 0, "none": 0}, r"share allocation 0; .*groups="),
        (SHARDED, (0,), PLAN, r"tensors on device 1 \(.*\), which `devices` does not name"),
        (SHARDED, (0, 1), {"a": 0, "b": 1, "c": 0}, r"the plan has no device for tensor 'none'; .* '\*' as the last"),
        (SHARDED, (0, 1), {**PLAN, "d": 0}, "the plan's 'd' is no tensor's name and matches none"),
        (SHARDED, (0, 1), {"b": 1, "*": 1, "a": 0}, r"share allocation 0; .*groups="),
        (SHARDED, (0, 1), dict.fromkeys(PLAN, 0), "puts nothing on"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    client: Broker, name: str, layout: Layout, devices: tuple[int, ...], plan: dict[str, int], says: str
) -> None:
    with pytest.raises(Invalid, match=says):
        client.create(name, layout, devices=devices, plan=plan)


@pytest.mark.usefixtures("share")
def test_a_sharded_pool_is_verified_whole_and_shard_by_shard(client: Broker, tmp_path: Path, name: str) -> None:
    publish_sharded(client, name)
    tensors = {
        each: (dtype, shape, content(each, spec.nbytes))
        for (each, dtype, shape), spec in zip(TENSORS, SHARDED.tensors, strict=True)
    }
    path = checkpoints.write(tmp_path / "m.safetensors", tensors)
    found = verify(client, name, path)
    assert (found.tensors, found.differences) == (4, ())
    shard = verify(client, name, path, device=1)
    assert (shard.tensors, shard.nbytes, shard.differences) == (2, 32, ())
    tensors["b"] = ("F32", (8,), bytes(32))
    path = checkpoints.write(tmp_path / "other.safetensors", tensors)
    assert verify(client, name, path).differences == ("tensor 'b' differs, first in byte 0 of its 32",)


NAMES = ("embed", "layers.0.q", "layers.1.q", "layers.1.norm[0]", "head")


def test_a_name_goes_before_patterns_and_of_these_the_first_counts() -> None:
    plan = {"layers.1.*": 2, "layers.*": 1, "layers.1.norm[0]": 3, "[eh]*": 5, "*": 0, "head": 4}
    assert resolve_plan(plan, NAMES) == {
        "embed": 5,
        "layers.0.q": 1,
        "layers.1.q": 2,
        "layers.1.norm[0]": 3,
        "head": 4,
    }


def test_a_plan_by_names_alone_is_what_it_is() -> None:
    plan = dict.fromkeys(reversed(NAMES), "GPU-1")
    assert resolve_plan(plan, NAMES) == plan
    assert list(resolve_plan(plan, NAMES)) == list(NAMES)


def test_a_pattern_may_take_no_tensor_where_its_order_changes_nothing() -> None:
    for plan in ({"layers.*": 1, "[eh]*": 2, "*": 0}, {"*": 1, "layers.*": 1}, {"*": 0, "?*": 1}):
        assert set(resolve_plan(plan, NAMES).values()) <= {0, 1, 2}


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"layers.*": 1, "embed": 0}, r"no device for tensor 'head'; add its name, or '\*' as the last pattern"),
        ({"*": 1, "layers.7.*": 0}, r"the plan's 'layers\.7\.\*' is no tensor's name and matches none"),
        ({"*": 1, "tail": 0}, "the plan's 'tail' is no tensor's name"),
        ({}, "no device for tensor 'embed'"),
        (
            {"*": 0, "layers.*": 1},
            r"the plan's 'layers\.\*' comes after '\*', which matches its tensors and more; put it first",
        ),
    ],
)
def test_what_a_plan_leaves_open_or_says_of_nothing_is_refused(plan: dict[str, int], says: str) -> None:
    with pytest.raises(Invalid, match=says):
        resolve_plan(plan, NAMES)
