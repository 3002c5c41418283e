"""Runtime pools: what a module computes with, published once and bound without a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cubroker.client import Broker
from cubroker.integrations import runtime_pools
from cubroker.integrations.torch import state_dict
from cubroker.protocol.errors import Invalid, NotFound, Retired
from tests.unit.integrations.runtime_process import CONSUMED, Fused, Runtime, Weight, meta


def loaded(seed: int = 0) -> Runtime:
    torch.manual_seed(seed)
    model = Runtime()
    model.process()
    return model


class Place(NamedTuple):
    """A tensor of a module's tree, and how the module has it."""

    kind: str
    persistent: bool
    tensor: torch.Tensor


def places(model: nn.Module) -> dict[str, Place]:
    """Every tensor of a module's tree, under each of its names."""
    found, stored = dict[str, Place](), model.state_dict().keys()
    for path, module in model.named_modules(remove_duplicate=False):
        terms: dict[str, Any] = {"prefix": path, "recurse": False, "remove_duplicate": False}
        found |= {name: Place("parameter", True, tensor) for name, tensor in module.named_parameters(**terms)}
        found |= {name: Place("buffer", name in stored, tensor) for name, tensor in module.named_buffers(**terms)}
        own = {f"{path}.{leaf}" if path else leaf: value for leaf, value in vars(module).items()}
        found |= {name: Place("", True, value) for name, value in own.items() if isinstance(value, torch.Tensor)}
    return found


def same(one: nn.Module, other: nn.Module) -> None:
    """All tensors of two modules are equal in everything but their address."""
    ours, theirs = places(one), places(other)
    assert ours.keys() == theirs.keys()
    for name, mine in ours.items():
        twin = theirs[name]
        assert (mine.kind, mine.persistent) == (twin.kind, twin.persistent), name
        a, b = mine.tensor, twin.tensor
        assert (a.dtype, a.shape, a.stride(), type(a)) == (b.dtype, b.shape, b.stride(), type(b)), name
        assert a.requires_grad == b.requires_grad, name
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), name


def publish(broker: Broker, name: str, model: nn.Module, **terms: Any) -> int:
    return runtime_pools.publish(broker, name, model, consumed=CONSUMED, share="vmm", **terms)


def protected(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory can only be read."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            if first <= tensor.data_ptr() < last:
                return "w" not in line.split()[1]
    raise AssertionError("mapped nowhere")


def test_a_module_made_on_the_meta_device_gets_all_that_another_computes_with(client: Broker, name: str) -> None:
    model = loaded()
    assert publish(client, name, model) == 1
    with client.attach(name) as pool:
        twin = runtime_pools.bind(meta(), pool, strict=False)
        runtime_pools.refuse_meta(twin, pool)
    same(twin, model)
    assert twin.head.weight is twin.embed.weight
    assert twin.view.untyped_storage().data_ptr() == twin.table.untyped_storage().data_ptr()
    assert twin.fused.weight.output_dim == 0
    assert twin.fused.weight.loader is Fused.loader
    assert torch.equal(twin(torch.arange(4)), model(torch.arange(4)))
    assert list(twin.state_dict()) == list(model.state_dict())


def test_parameters_are_shared_and_read_only_and_small_buffers_are_each_processs_own(client: Broker, name: str) -> None:
    publish(client, name, loaded())
    with client.attach(name) as pool:
        one, two = (runtime_pools.bind(meta(), pool, strict=False) for _ in range(2))
    for shared in ("embed.weight", "fused.weight", "table", "large"):
        tensors = [dict(model.named_parameters()) | dict(model.named_buffers()) for model in (one, two)]
        assert tensors[0][shared].data_ptr() == tensors[1][shared].data_ptr()
        assert protected(tensors[0][shared])
    one.scale.fill_(7.0)
    assert two.scale.item() != 7.0
    assert not protected(one.scale)


def test_tensors_that_were_seen_written_are_each_processs_own_whatever_their_size(client: Broker, name: str) -> None:
    model = loaded()
    with runtime_pools.writes(model) as written:
        model.calibrate()
    assert written == {"large", "view", "scale", "table"}
    publish(client, name, model, written=written)
    with client.attach(name) as pool:
        one, two = (runtime_pools.bind(meta(), pool, strict=False) for _ in range(2))
    one.calibrate()
    assert not protected(one.large)
    assert one.view.untyped_storage().data_ptr() == one.table.untyped_storage().data_ptr()
    same(two, model)


def test_writes_that_torch_does_not_count_are_found_in_bytes(client: Broker) -> None:
    with torch.inference_mode():
        model = loaded()
    numbers = model.large.numpy() if not model.large.is_inference() else model.large.detach().numpy()
    with runtime_pools.writes(model) as written:
        numbers[0] += 1
        del model.scale
    assert written == {"large"}


def test_memory_is_stored_once_and_gaps_are_left_out(client: Broker, name: str) -> None:
    model = loaded()
    publish(client, name, model)
    with client.attach(name) as pool:
        stored = {tensor.name: (tensor.dtype, tensor.shape) for tensor in pool.layout.tensors}
    assert stored["embed.weight"] == ("F32", (11, 8))
    assert "head.weight" not in stored
    assert stored["fused.weight"] == ("BF16", (24, 8))  # in the order of memory: the module has its transpose
    assert stored["table"] == ("U8", (2048 * 4,))  # a view is besides
    assert stored["padded"] == ("U8", ((7 * 16 + 8) * 4,))  # the last gap is no one's
    assert stored["far"][0] == "F32"
    assert stored["near"] == ("F32", (4,))  # both of one large storage
    assert sum(1 for tensor in stored if tensor in ("none", "large")) == 1


def test_the_module_that_was_loaded_can_be_bound_itself(client: Broker, name: str) -> None:
    model, twin = loaded(), loaded()
    runtime_pools.publish(client, name, model, attributes={"has_own_head": True, "rank": 3})
    with client.attach(name) as pool:
        with pytest.raises(Invalid, match=f"{name}'@1 would set rank of Runtime, which a pool may not set"):
            runtime_pools.bind(model, pool, accepts=["has_own_head"])
        assert runtime_pools.bind(model, pool, accepts=["has_own_head", "rank"]) is model
    same(model, twin)
    assert (model.has_own_head, model.rank) == (True, 3)
    assert model.head.weight is model.embed.weight


def test_a_module_that_runs_publishes_what_the_version_before_has_and_no_caches(client: Broker, name: str) -> None:
    publish(client, name, loaded(1), written=["scale"], attributes={"rank": 3})
    with client.attach(name) as pool:
        twin = runtime_pools.bind(meta(), pool, strict=False, accepts=["rank"])
        model, manifest = loaded(2), runtime_pools.read_manifest(pool)
        model.cache = torch.zeros(1 << 16)
        model.none = torch.zeros(1 << 16)  # it was empty when it was published
        runtime_pools.publish(client, name, model, like=manifest, share="vmm")
        assert runtime_pools.switch(client, twin, pool) == 2
        assert torch.equal(twin.embed.weight, model.embed.weight)
        assert runtime_pools.read_manifest(pool) == manifest
        del twin


def untied(model: Runtime) -> None:
    model.head.weight = nn.Parameter(torch.randn(11, 8))


def lacking(model: Runtime) -> None:
    del model.far


def other_dtype(model: Runtime) -> None:
    model.large = model.large.double()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (untied, "stored of 'head.weight' is 'embed.weight' there and 'head.weight' here, and 0 more"),
        (lacking, "only one of them has far"),
        (other_dtype, "dtype of 'large' is 'float32' there and 'float64' here"),
    ],
)
def test_a_module_of_another_structure_is_not_published_as_one_like_the_version_before(
    client: Broker, name: str, change: Callable[[Runtime], None], why: str
) -> None:
    publish(client, name, loaded())
    model = loaded()
    change(model)
    with client.attach(name) as pool:
        manifest = runtime_pools.read_manifest(pool)
    with pytest.raises(
        Invalid, match=f"Runtime has another structure than `like`, the manifest to publish pool '{name}' by: {why}"
    ):
        publish(client, name, model, like=manifest)
    assert [info.version for info in client.pools()] == [1]


Change = Callable[[Any], object]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: delattr(model, "scale"), "missing in the pool: nothing; only in the pool: scale; different"),
        (
            lambda model: model.register_buffer("more", torch.zeros(1, device="meta")),
            "missing in the pool: more; only in the pool: nothing",
        ),
        (lambda model: setattr(model, "head", nn.Identity()), "only in the pool: head.weight"),
        (
            lambda model: model.register_buffer("large", torch.zeros(3, device="meta")),
            r"different: large \(float32 \(2048,\) for float32 \(3,\)\)",
        ),
        (lambda model: setattr(model.norm, "weight", Weight(torch.zeros(8))), "'norm.weight' .* is a torch.*Parameter"),
    ],
)
def test_a_module_that_does_not_fit_is_told_by_names_and_not_changed(
    client: Broker, name: str, change: Change, words: str
) -> None:
    publish(client, name, loaded())
    twin = meta()
    twin.process()
    change(twin)
    kept = {each: place.tensor for each, place in places(twin).items()}
    with client.attach(name) as pool:
        if "torch" in words:  # torch's own class takes any place
            runtime_pools.bind(twin, pool)
            assert type(twin.norm.weight) is nn.Parameter
            return
        with pytest.raises(Invalid, match=rf"pool '{name}'@1 does not fit Runtime .*{words}"):
            runtime_pools.bind(twin, pool)
    assert {each: place.tensor for each, place in places(twin).items()} == kept


def test_a_class_that_the_module_does_not_have_is_not_imported(client: Broker, name: str) -> None:
    model = loaded()
    publish(client, name, model)
    twin = meta()
    twin.process()
    twin.fused.weight = nn.Parameter(twin.fused.weight.data, requires_grad=False)
    with client.attach(name) as pool, pytest.raises(Invalid, match=r"is a .*runtime_process.Weight, and the module's"):
        runtime_pools.bind(twin, pool)


def test_what_would_stay_without_data_is_an_error(client: Broker, name: str) -> None:
    publish(client, name, loaded())
    twin = meta()
    twin.extra = torch.zeros(2, device="meta")
    with client.attach(name) as pool:
        runtime_pools.bind(twin, pool, strict=False)
        with pytest.raises(Invalid, match=f"extra of Runtime would stay on the meta device: .*{name!r}@1 lacks them"):
            runtime_pools.refuse_meta(twin, pool)


def test_what_is_more_than_its_memory_is_not_published(client: Broker, name: str) -> None:
    with pytest.raises(Invalid, match=r"table, view, .* of Runtime cannot be published: on the meta device"):
        runtime_pools.publish(client, name, meta())
    model = loaded()
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    with pytest.raises(Invalid, match="sparse of Runtime cannot be published: a tensor has to be its memory"):
        publish(client, name, model)


def test_a_conjugate_is_published_by_its_elements_or_not_at_all(client: Broker, name: str) -> None:
    model = loaded()
    turns = torch.polar(torch.ones(1024), torch.arange(1024.0))
    model.register_buffer("back", turns.conj())
    publish(client, name, model)
    with client.attach(name) as pool:
        twin = runtime_pools.bind(meta(), pool, strict=False)
        assert torch.equal(twin.back, turns.conj())
    model.register_buffer("turns", turns)
    with pytest.raises(Invalid, match="back of Runtime cannot be published: torch conjugates or negates them"):
        publish(client, name, model)
    model.back = turns[::2].conj().imag
    with pytest.raises(Invalid, match="back of Runtime cannot be published: torch conjugates or negates them"):
        publish(client, name, model)


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (b"{", "cannot be read"),
        (b'{"format": 1, "entries": [], "attributes": {"\xff": 1}}', "cannot be read"),
        (b'{"more": ' + b"[" * 100_000, "cannot be read"),
        (b'{"format": 2, "entries": "other"}', "has format 2, and this release knows 1"),
        (b'{"format": 1, "entries": [{"name": "a"}]}', "cannot be read"),
        (b'{"format": 1, "entries": [%s]}', "has dtype wide, which torch lacks"),
        (b'{"format": 1, "entries": [%s]}', "reaches beyond its memory"),
        (b'{"format": 1, "entries": [%s]}', "has no tensor 'absent', which 'a' is in"),
    ],
)
def test_a_manifest_that_is_none_is_refused(client: Broker, name: str, manifest: bytes, words: str) -> None:
    dtype, stored = ("wide" if "wide" in words else "float32"), ("absent" if "absent" in words else "a")
    entry = runtime_pools.Entry("a", "buffer", 0, dtype, (9, 9), (9, 1), stored)
    text = manifest.replace(b"%s", msgspec.json.encode(entry))
    client.publish(
        name, {"a": torch.zeros(4), runtime_pools.MANIFEST: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    )
    with client.attach(name) as pool, pytest.raises(Invalid, match=words):
        runtime_pools.bind(nn.Module(), pool, strict=False)


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"shape": (1 << 20,), "strides": (1,), "private": True}, "reaches beyond its memory"),
        ({"shape": (4,), "strides": (1 << 62,)}, "reaches beyond its memory"),
        ({"shape": (2,), "strides": (1,), "offset": 3}, "reaches beyond its memory"),
        ({"shape": (2, 2), "strides": (1,)}, "reaches beyond its memory"),
        ({"shape": (1 << 40,), "strides": (1,), "stored": None}, r"has elements \(1099511627776,\), and no memory"),
    ],
)
def test_a_tensor_that_is_not_within_its_memory_is_refused(
    client: Broker, name: str, terms: dict[str, Any], words: str
) -> None:
    entry = runtime_pools.Entry(
        **{"name": "a", "kind": "buffer", "object": 0, "dtype": "float32", "stored": "a"} | terms
    )
    text = msgspec.json.encode(runtime_pools.Manifest(runtime_pools.FORMAT, (entry,)))
    client.publish(
        name, {"a": torch.zeros(4), runtime_pools.MANIFEST: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    )
    with client.attach(name) as pool, pytest.raises(Invalid, match=f"'a' of runtime pool .* {words}"):
        runtime_pools.bind(nn.Module(), pool, strict=False)


@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
@pytest.mark.parametrize("entry", ["forward", "training", "_parameters", "fused", "fused.loader", "fused."])
def test_a_tensor_in_the_place_of_what_is_none_is_refused(client: Broker, name: str, kind: str, entry: str) -> None:
    """A method, a setting, what torch keeps itself, a module, a function, nothing."""
    told = runtime_pools.Entry(entry, kind, 0, "float32", (4,), (1,), "a", type="torch.nn.parameter.Parameter")
    refuse_entry(client, name, told, f"would set {entry} of Runtime")


def test_an_attribute_of_a_parameter_in_the_place_of_a_method_is_refused(client: Broker, name: str) -> None:
    terms = {"type": "torch.nn.parameter.Parameter", "attributes": {"output_dim": 0, "copy_": True}}
    told = runtime_pools.Entry("bias", "parameter", 0, "float32", (4,), (1,), "a", **terms)
    refuse_entry(client, name, told, "would set bias.copy_ of Runtime")


def refuse_entry(client: Broker, name: str, entry: runtime_pools.Entry, words: str) -> None:
    text = msgspec.json.encode(runtime_pools.Manifest(runtime_pools.FORMAT, (entry,)))
    client.publish(
        name, {"a": torch.zeros(4), runtime_pools.MANIFEST: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    )
    model = meta()
    before = dict(vars(model))
    with client.attach(name) as pool, pytest.raises(Invalid, match=words):
        runtime_pools.bind(model, pool, strict=False)
    assert vars(model) == before


def test_a_pool_of_another_kind_is_no_runtime_pool(client: Broker, name: str) -> None:
    client.publish(name, {"a": torch.zeros(4)})
    with client.attach(name) as pool, pytest.raises(Invalid, match=f"pool {name!r} is no runtime pool"):
        runtime_pools.bind(meta(), pool)


def test_another_version_is_shown_at_the_same_addresses(client: Broker, name: str) -> None:
    one, two = loaded(1), loaded(2)
    publish(client, name, one, written=["scale"])
    with client.attach(name) as pool:
        twin = runtime_pools.bind(meta(), pool, strict=False)
        places = {key: tensor.data_ptr() for key, tensor in twin.state_dict().items()}
        twin.scale.fill_(5.0)
        publish(client, name, two, written=["scale"])
        assert runtime_pools.switch(client, twin, pool) == 2
        assert twin.scale.item() == 5.0  # what the engine has written is its own
        assert torch.equal(twin.bias, two.bias)
        twin.scale.copy_(two.scale)
        same(twin, two)
        assert {key: tensor.data_ptr() for key, tensor in twin.state_dict().items()} == places
        for old, new, why in (
            (b'"scale"', b'"scala"', "only one of them has scala, scale"),
            (b'"float32"', b'"float16"', "dtype of .* is 'float16' there and 'float32' here, and 0 more names differ"),
            (b'"entries":', b'"attributes":{"is_new":true},"entries":', "attributes of the module itself"),
        ):
            other = {key: tensor.clone() for key, tensor in state_dict(pool).items()}
            text = bytes(other[runtime_pools.MANIFEST].tolist()).replace(old, new, 1)
            other[runtime_pools.MANIFEST] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            client.publish(name, other, share="vmm")
            with pytest.raises(Invalid, match=f"another structure than version 2, which stays: .*{why}"):
                runtime_pools.switch(client, twin, pool)
        assert pool.version == 2
        same(twin, two)
        del twin


def test_a_pool_that_is_asleep_wakes_on_another_version(client: Broker, name: str) -> None:
    publish(client, name, loaded(1))
    with client.attach(name) as pool:
        twin = runtime_pools.bind(meta(), pool, strict=False)
        manifest = runtime_pools.read_manifest(pool)
        pool.sleep()
        two = loaded(2)
        publish(client, name, two)
        with pytest.raises((NotFound, Retired), match="cannot wake"):
            pool.wake()
        assert runtime_pools.switch(client, twin, pool, manifest=manifest) == 2
        same(twin, two)
        del twin


def test_tensors_that_shall_be_private_get_the_values_of_another_version(client: Broker, name: str) -> None:
    publish(client, name, loaded(1), private=["large"])
    with client.attach(name) as pool:
        one, two = (runtime_pools.bind(meta(), pool, strict=False) for _ in range(2))
        assert not protected(one.large)
        one.large.zero_()
        same(two, loaded(1))
        publish(client, name, loaded(2), like=runtime_pools.read_manifest(pool))
        del two.scale  # an engine may drop what it needs no more
        assert runtime_pools.switch(client, one, pool) == runtime_pools.switch(client, two, pool) == 2
        same(one, loaded(2))
        assert torch.equal(two.large, loaded(2).large)
        del one, two


class NoRoom(TorchDispatchMode):
    """Torch, on a device that has no memory left for copies."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            raise torch.OutOfMemoryError("no room")
        return func(*args, **(kwargs or {}))


def test_a_module_keeps_its_version_where_there_is_no_room_for_the_private_tensors_of_another(
    client: Broker, name: str
) -> None:
    publish(client, name, loaded(1), private=["large"])
    with client.attach(name) as pool:
        twin = runtime_pools.bind(meta(), pool, strict=False)
        publish(client, name, loaded(2), like=runtime_pools.read_manifest(pool))
        with NoRoom(), pytest.raises(torch.OutOfMemoryError, match="no room"):
            runtime_pools.switch(client, twin, pool)
        assert pool.version == 1
        same(twin, loaded(1))
        assert runtime_pools.switch(client, twin, pool) == 2
        same(twin, loaded(2))
        del twin


def test_a_version_says_what_it_was_made_from(client: Broker, name: str) -> None:
    for source in (bytes(range(32)), bytes(32)):
        publish(client, name, loaded(), source=source)
        with client.attach(name) as pool:
            assert runtime_pools.read_source(pool) == source
    publish(client, name, loaded())
    with client.attach(name) as pool:
        assert runtime_pools.read_source(pool) == bytes(32)
    with pytest.raises(Invalid, match="the source of a runtime pool is 32 bytes, not 3"):
        publish(client, name, loaded(), source=b"abc")
