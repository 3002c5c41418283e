"""Updates: versions that share memory with an earlier one, and what that saves, keeps and refuses."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cubroker import aio
from cubroker.client import Broker, delta
from cubroker.client import publish as publishing
from cubroker.driver import DriverError
from cubroker.protocol import Layout, messages
from cubroker.protocol.errors import DeviceFailure, Exists, Invalid, NotFound, Retired, Unsupported
from tests.brokers import BrokerProcess, eventually, serving
from tests.unit.client.conftest import begun, leases, session_of
from tests.unit.client.scripts import start

MIB = 1 << 20
GRANULE = 2 * MIB


def filled(value: int, nbytes: int = MIB) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.full(nbytes, value, np.uint8)


def model(**changed: int) -> dict[str, np.ndarray[Any, np.dtype[np.uint8]]]:
    """Tensors ``a`` to ``h`` of 1 MiB, which hold their number, or what ``changed`` says."""
    values = dict(zip("abcdefgh", range(8), strict=True)) | changed
    return {name: filled(value) for name, value in values.items()}


def held(broker: Broker, name: str) -> dict[int, tuple[int, int]]:
    """The memory that each version of a pool has, and how much of it an older one has, too."""
    return {info.version: (info.memory, info.shared) for info in broker.pools() if info.name == name}


def allocated(broker: Broker) -> int:
    return sum(device.allocated for device in broker.devices())


def content(broker: Broker, name: str, version: int | None = None, device: int | None = None) -> dict[str, list[int]]:
    """Which values the tensors of a version hold."""
    with broker.attach(name, version=version, device=device) as pool:
        return {key: np.unique(tensor.numpy().view(np.uint8)).tolist() for key, tensor in pool.items()}


def values(**changed: int) -> dict[str, list[int]]:
    return {name: [int(array[0])] for name, array in model(**changed).items()}


@pytest.fixture(params=["by pool", "by number", "by name"])
def naming(request: pytest.FixtureRequest, client: Broker, name: str) -> Iterator[Callable[[], object]]:
    """The ways to name the current version as a base."""
    pools = []

    def base() -> object:
        if request.param == "by number":
            return max(held(client, name))
        if request.param == "by name":
            return name
        pools.append(client.attach(name))
        return pools[-1]

    yield base
    for pool in pools:
        pool.close()


@pytest.mark.usefixtures("share")
def test_an_update_takes_memory_for_what_has_changed_and_the_rest_is_shared(
    client: Broker, name: str, naming: Callable[[], object]
) -> None:
    with_base = naming
    client.publish(name, model())
    assert held(client, name) == {1: (8 * MIB, 0)}
    with client.attach(name) as old:
        assert client.publish(name, {"b": filled(70)}, base=with_base()) == 2
        assert held(client, name) == {1: (8 * MIB, 0), 2: (8 * MIB + GRANULE, 8 * MIB)}
        assert allocated(client) == 8 * MIB + GRANULE
        assert content(client, name) == values(b=70)
        assert np.unique(old["b"].numpy()).tolist() == [1], "a version never changes"
    assert content(client, name, 2) == values(b=70)


def test_what_only_an_ended_version_had_is_freed_and_the_rest_with_the_last(client: Broker, name: str) -> None:
    layout = Layout.pack([(key, "U8", (MIB,)) for key in "abcdefgh"], slab=2 * MIB)
    with client.create(name, layout) as draft:
        for key, array in model().items():
            draft[key].copy_from(array)
        draft.seal()
    client.publish(name, {"a": filled(50), "b": filled(51)}, base=1)
    assert held(client, name) == {2: (8 * MIB, 0)}, "version 1 has ended: nobody leases it"
    eventually(lambda: allocated(client) == 8 * MIB, "the memory that only version 1 had to be freed")
    assert content(client, name) == values(a=50, b=51)
    client.retire(name)
    eventually(lambda: allocated(client) == 0, "the memory to be freed with the last version")


def test_an_update_of_what_the_update_before_changed_has_its_layout_and_a_pool_switches_to_it(
    client: Broker, name: str
) -> None:
    client.publish(name, model(), share="vmm")
    client.publish(name, {"b": filled(2), "c": filled(3)}, base=1)
    with client.attach(name) as pool:
        array = pool["b"].numpy()
        kept = pool["a"].numpy()
        client.publish(name, {"b": filled(4), "c": filled(5)}, base=pool)
        assert pool.switch() == 3
        assert (np.unique(array).tolist(), np.unique(kept).tolist()) == ([4], [0])
        del array, kept
        assert held(client, name) == {3: (8 * MIB + GRANULE, 0)}
    assert content(client, name) == values(b=4, c=5)


def test_with_all_tensors_given_the_unchanged_are_found(client: Broker, name: str) -> None:
    client.publish(name, model())
    assert client.publish(name, model(h=99), base=1) == 2
    assert held(client, name) == {2: (8 * MIB + GRANULE, 0)}
    assert content(client, name) == values(h=99)
    with client.attach(name) as pool:
        tensors: dict[str, object] = {**pool, "a": torch.from_dlpack(pool["a"]), "b": pool["b"].numpy()}
        assert client.publish(name, tensors, base=pool) == 3
        tensors.clear()
        assert held(client, name)[3] == (8 * MIB + GRANULE, 8 * MIB + GRANULE), "nothing has changed"
    assert content(client, name) == values(h=99)


def test_tensors_of_another_pool_are_compared_where_they_are(client: Broker, name: str) -> None:
    client.publish(name, model())
    client.publish(f"{name}.other", model(d=44))
    with client.attach(f"{name}.other") as other:
        client.publish(name, other, base=name)
    assert content(client, name) == values(d=44)
    (update,) = (info for info in client.pools() if info.name == name)
    assert update.memory == 8 * MIB + GRANULE


def test_tensors_of_another_shape_or_type_and_new_ones_have_memory_of_their_own(client: Broker, name: str) -> None:
    client.publish(name, {**model(), "none": np.zeros((0, 3))})
    changed = {
        "a": filled(9, 3 * MIB),
        "new": np.ones(5, np.float32),
        "b": filled(1).view(np.int32),
        "none": np.zeros((0, 4)),
    }
    client.publish(name, changed, base=1)
    with client.attach(name) as pool:
        assert list(pool) == [*"abcdefgh", "none", "new"]
        assert {key: pool[key].shape for key in ("a", "b", "none", "new")} == {
            "a": (3 * MIB,),
            "b": (MIB // 4,),
            "none": (0, 4),
            "new": (5,),
        }
        assert np.unique(pool["a"].numpy()).tolist() == [9]
        assert pool["new"].numpy().tolist() == [1] * 5


@pytest.mark.parametrize("together", [True, False])
def test_names_of_one_tensor_part_when_one_of_them_changes(client: Broker, name: str, together: bool) -> None:
    tied = filled(1)
    client.publish(name, {"x": tied, "y": tied, "z": filled(3, 8 * MIB)})
    new = filled(2)
    client.publish(name, {"x": new, "y": new} if together else {"x": new}, base=1)
    with client.attach(name) as pool:
        assert [int(pool[key].numpy()[0]) for key in "xyz"] == [2, 2 if together else 1, 3]
        assert (pool["x"].pointer == pool["y"].pointer) == together


def test_all_devices_of_the_base_get_the_update(client: Broker, name: str) -> None:
    client.publish(name, model(), devices=[0, 1])
    client.publish(name, {"c": filled(33)}, base=name)
    (info,) = (info for info in client.pools() if info.name == name)
    assert (len(info.devices), info.memory) == (2, 2 * (8 * MIB + GRANULE))
    for device in (0, 1):
        assert content(client, name, device=device) == values(c=33)


def test_an_update_of_a_sharded_version_keeps_each_tensor_on_its_device(client: Broker, name: str) -> None:
    plan = dict.fromkeys("abcd", 0) | dict.fromkeys("efgh", 1)
    client.publish(name, model(), plan=plan)
    client.publish(name, {"f": filled(66), "new": filled(9)}, base=1, digest=True)
    assert content(client, name) == values(f=66) | {"new": [9]}
    with client.attach(name) as pool:
        assert [pool[key].memory_device.index for key in ("a", "f", "new")] == [0, 1, 0]
        pool.check()


def test_a_tensor_without_elements_stays_on_its_device_when_all_others_there_move(client: Broker, name: str) -> None:
    first = {"a": filled(1), "b": filled(2), "none": np.empty((0, 3), np.float32)}
    client.publish(name, first, plan={"a": 0, "b": 1, "none": 1})
    client.publish(name, {"b": filled(3).view(np.int8)}, base=1)
    with client.attach(name, device=0) as pool:
        assert set(pool) == {"a"}
    with client.attach(name, device=1) as pool:
        assert set(pool) == {"b", "none"}


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("devices", [[0], [0, 1]])
def test_an_update_is_sealed_with_the_digests_of_all_its_memory(
    client: Broker, name: str, sealed: bool, devices: list[int]
) -> None:
    client.publish(name, model(), digest=sealed, devices=devices)
    client.publish(name, {"b": filled(71)}, base=1, digest=True)
    for device in devices:
        with client.attach(name, device=device) as pool:
            pool.check()
    answer = client.digests(name)
    assert answer.digests is not None
    assert all(len(row) == 2 and all(row) for row in answer.digests.replicas)


def test_a_draft_of_an_update_has_nothing_mapped_of_what_is_shared(client: Broker, name: str) -> None:
    client.publish(name, model(), share="vmm")
    _, layout, _ = client.describe(name)
    shared = messages.Base(1, (0, None))
    wider = Layout((*layout.tensors,), (*layout.allocations, MIB))
    (uuid,) = {info.devices for info in client.pools() if info.name == name}
    created = client.requests.submit(
        messages.Create(name, wider.encode(), uuid, "auto", 0.0, None, base=shared)
    ).result()
    assert isinstance(created, messages.Created)
    assert created.replicas[0].handles == (b"", messages.DESCRIPTOR)
    client.requests.submit(messages.Close(created.lease)).result()


@pytest.mark.parametrize(
    ("terms", "base", "error", "says"),
    [
        ({}, 7, NotFound, "7"),
        ({}, "elsewhere", Invalid, "not 'elsewhere'"),
        ({}, 0, Invalid, "no whole number from 1"),
        ({}, True, Invalid, "a Pool that is attached to it, its number, or the pool's name, and not True"),
        ({}, 1.0, Invalid, "and not 1.0"),
        ({}, ["1"], Invalid, r"and not \['1'\]"),
        ({"devices": [0]}, 1, Invalid, "leave devices and plan out"),
        ({"share": "ipc"}, 1, Unsupported, "share kind"),
        ({"durable": True}, 1, Unsupported, "store"),
    ],
)
def test_what_a_base_cannot_be_is_refused(
    client: Broker, name: str, terms: dict[str, Any], base: Any, error: type[Exception], says: str
) -> None:
    client.publish(name, model(), share="vmm")
    with pytest.raises(error, match=says):
        client.publish(name, {"a": filled(1)}, base=base, **terms)
    assert held(client, name) == {1: (8 * MIB, 0)}
    assert not leases(client, name)


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.zeros(2, complex), "tensor 'a': unknown dtype 'complex128'; known are"),
        (np.zeros(2, ">f4"), r"tensor 'a': the dtype '>f4' is big-endian, .* with a\.astype\("),
        (np.zeros((1,) * 33, np.uint8), "tensor 'a': a shape of rank 33"),
        (torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "tensor 'a': a F4 tensor .* takes 4 bits"),
    ],
)
def test_what_an_update_cannot_hold_is_refused_by_its_name(client: Broker, name: str, array: object, says: str) -> None:
    client.publish(name, model(), share="vmm")
    with pytest.raises(Invalid, match=says):
        client.publish(name, {"a": array, "b": filled(1)}, base=name)
    assert held(client, name) == {1: (8 * MIB, 0)}
    assert not leases(client, name)


def test_a_base_is_this_brokers_and_open(client: Broker, name: str) -> None:
    client.publish(name, model(), share="vmm")
    with serving() as elsewhere, Broker(elsewhere.directory) as other:
        other.publish(name, model(a=9), share="vmm")
        with other.attach(name) as pool, pytest.raises(Invalid, match=f"is of the broker on {elsewhere.directory}"):
            client.publish(name, {"b": filled(1)}, base=pool)
    with Broker(client.directory) as other, other.attach(name) as pool:
        assert client.publish(name, {"b": filled(70)}, base=pool) == 2
    with pytest.raises(Invalid, match=r"version 1, 8 tensors, closed> .* it is closed"):
        client.publish(name, {"b": filled(1)}, base=pool)
    with client.attach(name) as pool:
        with pytest.raises(Invalid, match=r"and not <Pool .*>; .* give its `blocking`"):
            client.publish(name, {"b": filled(1)}, base=aio.Pool(pool))  # type: ignore[arg-type]
        assert client.publish(name, {"c": filled(71)}, base=pool) == 3
    assert content(client, name) == values(b=70, c=71)


@pytest.mark.parametrize("terms", [{"writable": True}, {"share": "multicast"}])
def test_memory_that_changes_or_is_bound_together_is_not_shared(
    client: Broker, name: str, terms: dict[str, Any]
) -> None:
    with client.create(name, [("a", "U8", (MIB,))], **terms) as draft:
        draft.seal()
    with pytest.raises(Unsupported, match="cannot share its memory"):
        client.publish(name, {"a": filled(1)}, base=1)


def test_an_older_broker_shares_no_memory(client: Broker, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client.publish(name, model())
    monkeypatch.setattr(session_of(client), "version", messages.UPDATES - 1)
    with pytest.raises(Unsupported, match="too old"):
        client.publish(name, {"a": filled(1)}, base=1)


def test_if_the_comparison_fails_nothing_is_left(client: Broker, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise DriverError("cuLaunchKernel", 719, "CUDA_ERROR_LAUNCH_FAILED")

    client.publish(name, model())
    monkeypatch.setattr(publishing, "differing", refuse)
    with pytest.raises(DeviceFailure, match="comparing"):
        client.publish(name, {"a": filled(1)}, base=1)
    assert held(client, name) == {1: (8 * MIB, 0)}
    assert not leases(client, name)


@pytest.mark.parametrize("by_pool", [False, True])
def test_an_error_that_is_kept_keeps_no_lease_on_the_base(
    client: Broker, lender: BrokerProcess, name: str, *, by_pool: bool
) -> None:
    """Tensors that share an allocation with much that has changed are copied from the base, and belong to it."""
    client.publish(name, model(), share="vmm")
    with (
        Broker(lender.directory) as other,
        client.attach(name) as pool,
        other.create(name, pool.layout),
        pytest.raises(Exists) as error,
    ):
        client.publish(name, model(a=1, b=1, c=1, d=1, e=1), base=pool if by_pool else 1)
    assert error.traceback
    assert not leases(client, name)


def test_if_copying_fails_an_error_that_is_kept_keeps_no_lease_on_the_base(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise DriverError("cuMemcpyDtoDAsync", 719, "CUDA_ERROR_LAUNCH_FAILED")

    client.publish(name, model(), share="vmm")
    monkeypatch.setattr(publishing, "_start", refuse)
    with pytest.raises(DeviceFailure, match="copying") as error:
        client.publish(name, model(a=1, b=1, c=1, d=1, e=1), base=1)
    assert error.traceback
    assert not leases(client, name)


def test_a_follower_takes_updates_in_place_and_processes_share_the_bytes(
    lender: BrokerProcess, client: Broker, name: str
) -> None:
    client.publish(name, model(), share="vmm")
    client.publish(name, {"b": filled(2)}, base=1)
    program = """
        import json
        import numpy as np
        with Broker(directory) as broker, broker.attach(sys.argv[2]) as pool:
            arrays = {key: pool[key].numpy() for key in pool}
            def told():
                found = {key: np.unique(each).tolist() for key, each in arrays.items()}
                print(json.dumps([pool.version, found]), flush=True)
            told()
            with pool.follow(switch=True) as versions:
                for version in versions:
                    told()
                    if version == 4:
                        break
            del arrays
    """
    process = start(lender, program, name)
    assert process.stdout is not None
    try:
        for version, value in ((2, 2), (3, 30), (4, 40)):
            if version > 2:
                client.publish(name, {"b": filled(value)}, base=name)
            assert json.loads(process.stdout.readline()) == [version, values(b=value)]
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
    eventually(lambda: held(client, name) == {4: (8 * MIB + GRANULE, 0)}, "the end of version 3")
    eventually(lambda: allocated(client) == 8 * MIB + GRANULE, "its memory to be freed")


def test_a_base_by_name_is_the_current_version_also_if_another_replaces_it_meanwhile(
    client: Broker, lender: BrokerProcess, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions 1 and 2 are gone between the question which one is current and the attach to it."""
    client.publish(name, model())
    attach, left = Broker.attach, [2, 1]

    def late(self: Broker, *args: Any, **terms: Any) -> Any:
        if left:
            client.publish(name, model(a=70 + left.pop()))
        return attach(self, *args, **terms)

    with Broker(lender.directory) as other, monkeypatch.context() as patch:
        patch.setattr(Broker, "attach", late)
        assert other.publish(name, {"b": filled(80)}, base=name) == 4
        left.append(3)
        with pytest.raises(Retired, match="@4 was retired or replaced"):
            other.publish(name, {"b": filled(81)}, base=4)
    assert content(client, name, 5) == values(a=73)


def test_a_base_that_is_switched_during_the_comparison_is_refused(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arrays equal the version before the switch, and nothing of the version after it."""
    client.publish(name, model(), share="vmm")
    compare = publishing.differing
    with client.attach(name) as pool:
        client.publish(name, {each: filled(70) for each in model()})

        def late(*args: Any) -> Any:
            found = compare(*args)
            begun(pool.switch).result()
            return found

        monkeypatch.setattr(publishing, "differing", late)
        with client.attach(name, version=1), pytest.raises(Invalid, match=r"version 1 of .* was switched during"):
            client.publish(name, model(), base=pool)
    assert held(client, name) == {2: (8 * MIB, 0)}


def test_a_base_that_is_switched_while_the_update_waits_is_refused(
    client: Broker, lender: BrokerProcess, name: str
) -> None:
    """Tensors that share an allocation with much that has changed are copied from the base, once there is room."""
    client.publish(name, model(), share="vmm")
    with client.attach(name) as pool, client.attach(name), Broker(lender.directory) as other:
        client.publish(name, {each: filled(70) for each in model()})
        with other.create(name, pool.layout):
            update = begun(lambda: client.publish(name, model(a=1, b=1, c=1, d=1, e=1), base=pool, wait=600))
            eventually(lambda: client.look().waiters, "the update to wait for the other writer")
            pool.switch()
        with pytest.raises(Invalid, match=r"version 1 of .* was switched during"):
            update.result()
    assert held(client, name) == {2: (8 * MIB, 0)}


@pytest.mark.parametrize("moment", ["fill", "seal"])
def test_a_writer_that_is_killed_leaves_its_base_and_nothing_else(
    lender: BrokerProcess, client: Broker, name: str, moment: str
) -> None:
    client.publish(name, model(), share="vmm")
    program = """
        import numpy as np
        from cubroker.client.draft import Draft
        from cubroker.client.publish import Sources
        owner = Sources if sys.argv[3] == "fill" else Draft
        setattr(owner, sys.argv[3], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        with Broker(directory) as broker:
            broker.publish(sys.argv[2], {"b": np.full(1 << 20, 9, np.uint8)}, base=1)
    """
    process = start(lender, program, name, moment, measured=False)
    try:
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
    finally:
        process.kill()
    eventually(lambda: held(client, name) == {1: (8 * MIB, 0)}, "the end of the draft")
    eventually(lambda: allocated(client) == 8 * MIB, "its memory to be freed")
    assert content(client, name) == values()


def test_versions_say_what_they_share(client: Broker, name: str) -> None:
    client.publish(name, model())
    with client.attach(name):
        client.publish(name, {"a": filled(9)}, base=1)
        description = client.requests.submit(messages.Describe(name, 2)).result()
        assert isinstance(description, messages.Description)
        assert [(each.version, each.allocations, each.nbytes) for each in description.shared] == [(1, 1, 8 * MIB)]
        blocks = client.look().blocks
        assert sorted((block.version, block.nbytes) for block in blocks if block.pool == name) == [
            (1, 8 * MIB),
            (2, GRANULE),
        ]


# -- layouts of updates --------------------------------------------------------------------------------


def laid_out(base: Layout, *changed: str, **shapes: tuple[int, ...]) -> delta.Updated:
    specs = {spec.name: spec for spec in base.tensors}
    changes = {name: delta.Change("U8", specs[name].shape, name) for name in changed}
    changes |= {name: delta.Change("U8", shape, name) for name, shape in shapes.items()}
    return delta.updated(base, (None,) * len(base.allocations), changes)


def packed(*sizes: int, slab: int | None = None) -> Layout:
    return Layout.pack([(chr(97 + number), "U8", (size,)) for number, size in enumerate(sizes)], slab=slab)


def test_without_a_change_everything_is_shared() -> None:
    base = packed(256, 256, slab=256)
    assert laid_out(base) == delta.Updated(base, (0, 1), (None, None))


def test_half_of_the_bytes_are_replaced_in_place_and_less_moves() -> None:
    base = packed(512, 256, 256)
    assert laid_out(base, "a") == delta.Updated(base, (None,), (None,))
    moved = laid_out(base, "b")
    assert moved.kept == (0, None)
    assert moved.layout.allocations == (1024, 256)
    again = laid_out(moved.layout, "b")
    assert again == delta.Updated(moved.layout, (0, None), (None, None))


def test_an_allocation_with_many_holes_is_copied_without_them() -> None:
    layout = packed(*[512] * 8)
    for name in "abcd":
        result = laid_out(layout, name)
        assert result.kept[0] == 0
        layout = result.layout
    result = laid_out(layout, "e")
    assert result.kept[0] is None
    assert result.layout.allocations[0] == 3 * 512, "f, g and h alone are left there"


def test_an_allocation_without_tensors_is_dropped() -> None:
    result = laid_out(packed(256, 512, slab=512), a=(1024,))
    assert result.layout.allocations == (512, 1024)
    assert result.kept == (1, None)
    assert [spec.allocation for spec in result.layout.tensors] == [1, 0]


def test_where_tensors_leave_and_most_changes_the_rest_is_packed() -> None:
    result = laid_out(packed(512, 256, 256), a=(768,))
    assert result.kept == (None, None)
    assert result.layout.allocations == (512, 768)


def test_a_tensor_without_elements_stays_one() -> None:
    base = packed(256, 0)
    assert laid_out(base, "a").layout == base
    dropped = laid_out(base, a=(512,))
    assert [(spec.name, spec.nbytes) for spec in dropped.layout.tensors] == [("a", 512), ("b", 0)]
    assert laid_out(base, b=(0, 2)).layout.tensors[1].shape == (0, 2)


@pytest.mark.slow
def test_random_updates_keep_every_tensor_whole_and_share_what_does_not_change() -> None:
    chance = np.random.default_rng(7)
    for _ in range(60):
        layout = packed(*(int(n) for n in chance.integers(1, 9, 12) * 128), slab=int(chance.integers(1, 5)) * 512)
        for step in range(8):
            names = [spec.name for spec in layout.tensors]
            changed = [name for name in names if chance.random() < 0.2]
            shapes = {name: (int(chance.integers(1, 9)) * 128,) for name in (f"new{step}", *names[:1])}
            result = laid_out(layout, *changed, **(shapes if chance.random() < 0.3 else {}))
            result.layout.check()
            before = {spec.name: spec for spec in layout.tensors}
            for spec in result.layout.tensors:
                was, now = before.get(spec.name), result.kept[spec.allocation]
                if now is not None:
                    assert was is not None
                    assert (was.allocation, was.offset, was.shape) == (now, spec.offset, spec.shape)
                    assert spec.name not in changed
            used = {spec.allocation for spec in result.layout.tensors}
            assert used == set(range(len(result.layout.allocations)))
            layout = result.layout
