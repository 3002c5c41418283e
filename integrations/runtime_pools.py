"""Runtime pools: the tensors that one rank of an engine computes with, published by one process and bound by others.

A checkpoint's tensors are not what an engine computes with. It fuses, shards and quantizes them, leaves transposed
views, ties names to each other, and drops what it has consumed. A *runtime pool* holds the outcome: the parameters,
buffers and tensor attributes of a module's tree as they are in memory after post-processing. Its *manifest*
(:mod:`.runtime_manifest`) says how to put them together again.

:func:`publish` makes such a pool of a module. :func:`bind` gives its tensors, without a copy, to a module that was made
on the meta device. :func:`.engine_loader.obtain` has one process of many load. If only one of pool and module has a
name, :func:`bind` raises an error with that name. No content of a pool can cause an import or an unpickling.

The pool's memory is read-only. Tensors that an engine writes are *private*: each process has a copy. Those are the
tensors that :func:`writes` has seen written, and buffers of up to :data:`SMALL` bytes, which engines may set again at
any time. Tensors within lists and dictionaries that modules have as attributes are not found.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import msgspec

from cubroker.client.broker import Broker
from cubroker.client.devices import DeviceId
from cubroker.client.pool import Pool
from cubroker.integrations.runtime_manifest import (
    ATTRIBUTE,
    BUFFER,
    FORMAT,
    MANIFEST,
    PARAMETER,
    SOURCE,
    SOURCE_BYTES,
    Entry,
    Manifest,
    Scalar,
    difference,
    read_manifest,
    read_source,
    some,
)
from cubroker.protocol.encoding import encode_json
from cubroker.protocol.errors import Invalid

try:
    import torch
    from torch import nn
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    from cubroker.integrations.torch import DTYPES, state_dict
except ImportError as error:
    raise ImportError(
        f"cubroker.integrations.runtime_pools needs PyTorch ({error}): pip install 'cubroker[torch]'"
    ) from error

__all__ = [
    "FORMAT",
    "MANIFEST",
    "SOURCE_BYTES",
    "Entry",
    "Manifest",
    "bind",
    "on_meta",
    "publish",
    "read_manifest",
    "read_source",
    "refuse_meta",
    "switch",
    "writes",
]

log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)

SMALL = 4096
"""Bytes. Buffers up to this size are private."""

COMPARED = 16 << 20
"""Bytes. Up to this size :func:`writes` compares the bytes of buffers, which finds writes that torch does not count."""

ALIGNMENT = 256
"""Bytes. Memory that is stored with its gaps begins at a multiple of this, so that tensors in it stay aligned."""

# -- what a module has -----------------------------------------------------------------------------------


class _Found(NamedTuple):
    name: str
    kind: str
    tensor: torch.Tensor
    persistent: bool = True


def _found(model: nn.Module) -> Iterator[_Found]:
    """Yield every tensor of a module's tree, under each of its names."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                yield _Found(prefix + leaf, PARAMETER, parameter)
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                yield _Found(prefix + leaf, BUFFER, buffer, leaf not in module._non_persistent_buffers_set)
        for leaf, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield _Found(prefix + leaf, ATTRIBUTE, value)


def on_meta(model: nn.Module) -> list[str]:
    """Return the names of all parameters, buffers and tensor attributes that have no data."""
    return [found.name for found in _found(model) if found.tensor.is_meta]


def refuse_meta(model: nn.Module, pool: Pool) -> None:
    """Raise ``Invalid`` with the names of tensors that have no data after a pool was bound."""
    if left := on_meta(model):
        raise Invalid(
            f"{some(left)} of {type(model).__name__} would stay on the meta device: runtime pool"
            f" {pool.name!r}@{pool.version} lacks them; publish it anew from a module that has them"
        )


@contextmanager
def writes(model: nn.Module) -> Iterator[set[str]]:
    """Measure what a ``with`` block writes: afterwards the set has the names of tensors that changed, or were replaced.

    Writes by torch's operations are counted by torch. Writes by other code are found in buffers and attributes of up to
    :data:`COMPARED` bytes, if they change any byte.
    """
    before = [(found, _version(found.tensor), _copy(found)) for found in _found(model)]
    written: set[str] = set()
    yield written
    now = {found.name: found.tensor for found in _found(model)}
    for found, version, copy in before:
        tensor = now.get(found.name)
        if tensor is None:
            continue
        changed = copy is not None and not torch.equal(copy, _memory(tensor))
        if tensor is not found.tensor or _version(tensor) != version or changed:
            written.add(found.name)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _copy(found: _Found) -> torch.Tensor | None:
    compared = found.kind != PARAMETER or found.tensor.is_inference()
    if not compared or found.tensor.is_meta or not _is_plain(found.tensor) or not found.tensor.numel():
        return None
    memory = _memory(found.tensor)
    return memory.clone() if memory.numel() <= COMPARED else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether memory, dtype, shape and strides describe a tensor completely."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not is_traceable_wrapper_subclass(tensor)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of its storage that a tensor with elements reaches, and the byte after the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return begin, begin + (last + 1) * tensor.element_size()


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes between a tensor's first and last element."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    begin, end = _extent(tensor)
    return _view(tensor.untyped_storage(), torch.uint8, begin, (end - begin,), (1,))


def _view(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, offset, shape, strides)


# -- publishing --------------------------------------------------------------------------------------------


def publish(
    broker: Broker,
    name: str,
    model: nn.Module,
    *,
    written: Collection[str] = (),
    private: Collection[str] = (),
    attributes: Mapping[str, Scalar] | None = None,
    consumed: Collection[str] = (),
    like: Manifest | None = None,
    source: bytes = bytes(SOURCE_BYTES),
    device: DeviceId | None = None,
    **terms: Any,
) -> int:
    """Copy what a module computes with into a new version of a runtime pool; returns the version.

    Memory is stored once however many names and views it has; bytes that no tensor reaches are left out.

    Args:
        broker: the session.
        name: the pool; :mod:`cubroker.integrations.fingerprint` makes names that tell models apart.
        model: the module, after post-processing. It is not changed, and not needed any more when this returns.
        written: names of tensors that engines write, as :func:`writes` has measured them; they are private.
        private: names of other tensors to make private, such as those that engines save and restore.
        attributes: attributes of the module itself that :func:`bind` sets.
        consumed: names of tensors that post-processing has removed from the model; :func:`bind` removes them, too.
        like: the manifest of the version before. Only the names in it are published, and it replaces ``written``,
            ``private``, ``attributes`` and ``consumed``. So a running module does not publish tensors that it made
            later, such as its caches, and processes that have the version before can :func:`switch`.
        source: :data:`SOURCE_BYTES` bytes that identify what the module was loaded from, for :func:`read_source`.
        device: the pool's; by default the device of the tensors, or the broker's first one if they are in host memory.
        **terms: as for :meth:`Broker.publish`: ``share``, ``mode``, ``durable``, ``wait``, ``digest``.

    Raises:
        Invalid: a tensor, which the message names, has no data, or is not described by memory, dtype, shape and strides
            (sparse, quantized by torch, a subclass that wraps others, the conjugate of memory that others have); the
            module's structure differs from ``like``; or ``source`` has another length.
        CubrokerError: as :meth:`Broker.publish`.
    """
    if len(source) != SOURCE_BYTES:
        raise Invalid(f"the source of a runtime pool is {SOURCE_BYTES} bytes, not {len(source)}; give a digest")
    names: Collection[str] | None = None
    if like is not None:
        names = {entry.name for entry in like.entries if entry.stored is not None}
        written = {entry.name for entry in like.entries if entry.private and not entry.constant}
        private = {entry.name for entry in like.entries if entry.constant}
        attributes, consumed = like.attributes, like.consumed
    entries, arrays = _described(model, written, private, names)
    manifest = Manifest(FORMAT, tuple(entries), dict(attributes or {}), tuple(consumed))
    if like is not None:
        if (made := _as_in(like, manifest)) != like:
            raise Invalid(
                f"{type(model).__name__} has another structure than `like`, the manifest to publish pool {name!r} by:"
                f" {difference(like, made)}; nothing was published: publish it without `like`, for new modules"
            )
        manifest = like
    arrays[MANIFEST] = torch.frombuffer(bytearray(encode_json(manifest)), dtype=torch.uint8)
    arrays[SOURCE] = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    devices = None if device is None else (device,)
    return broker.publish(name, arrays, devices=devices, **terms)


def _as_in(like: Manifest, manifest: Manifest) -> Manifest:
    """Return ``manifest`` with the order, the numbers of objects, and the tensors without memory of ``like``.

    Names that are one object in only one of the manifests still differ in where their bytes are, unless they share
    memory.
    """
    ours = {entry.name: entry for entry in manifest.entries}
    entries = [
        each if each.stored is None else msgspec.structs.replace(ours[each.name], object=each.object)
        for each in like.entries
        if each.stored is None or each.name in ours
    ]
    return msgspec.structs.replace(manifest, format=like.format, entries=tuple(entries))


def _described(
    model: nn.Module, written: Collection[str], private: Collection[str], names: Collection[str] | None
) -> tuple[list[Entry], dict[str, torch.Tensor]]:
    """Return the entries of a module's tensors, those in ``names`` if it is not None, and the arrays to store."""
    objects: dict[int, list[_Found]] = defaultdict(list)
    for found in _found(model):
        if names is None or found.name in names:
            objects[id(found.tensor)].append(found)
    if refused := [group[0].name for group in objects.values() if group[0].tensor.is_meta]:
        raise Invalid(f"{some(refused)} of {type(model).__name__} cannot be published: on the meta device")
    if refused := [group[0].name for group in objects.values() if not _is_plain(group[0].tensor)]:
        raise Invalid(
            f"{some(refused)} of {type(model).__name__} cannot be published: a tensor has to be its memory, dtype,"
            f" shape and strides, and these are sparse, quantized by torch or wrap other tensors"
        )
    groups = list(objects.values())
    numbers = {group[0].name: number for number, group in enumerate(groups)}
    on_device = any(group[0].tensor.device.type != "cpu" for group in groups)
    entries: list[Entry] = []
    arrays: dict[str, torch.Tensor] = {}
    for members in _regions(groups):
        first = members[0][0]
        if not first.tensor.numel():
            entries += _entries(members, numbers, None, 0, on_device=on_device)
            continue
        begin = min(_extent(group[0].tensor)[0] for group in members)
        end = max(_extent(group[0].tensor)[1] for group in members)
        dense = _dense(first.tensor) if len(members) == 1 else None
        if dense is None:
            _refuse_lazy(model, members)
            begin -= begin % ALIGNMENT
            dense = _view(first.tensor.untyped_storage(), torch.uint8, begin, (end - begin,), (1,))
        arrays[first.name] = dense
        everyone = [found for group in members for found in group]
        measured = any(found.name in written for found in everyone)
        small = end - begin <= SMALL and all(found.kind != PARAMETER for found in everyone)
        own = measured or small or any(found.name in private for found in everyone)
        entries += _entries(
            members, numbers, first.name, begin, private=own, constant=not measured, on_device=on_device
        )
    order = {found.name: index for index, found in enumerate(_found(model))}
    return sorted(entries, key=lambda entry: order[entry.name]), arrays


def _refuse_lazy(model: nn.Module, members: list[list[_Found]]) -> None:
    """Raise ``Invalid`` for tensors that torch conjugates or negates on reading: their memory has other values."""
    if lazy := [group[0].name for group in members if group[0].tensor.is_conj() or group[0].tensor.is_neg()]:
        raise Invalid(
            f"{some(lazy)} of {type(model).__name__} cannot be published: torch conjugates or negates them as they are"
            f" read, and others have their memory, too, or it has gaps; give them resolve_conj().resolve_neg()"
        )


def _regions(groups: list[list[_Found]]) -> Iterator[list[list[_Found]]]:
    """Yield groups of objects that share memory; an object is the list of its names."""
    storages: dict[tuple[torch.device, int], list[list[_Found]]] = defaultdict(list)
    for names in groups:
        tensor = names[0].tensor
        if tensor.numel():
            storages[tensor.device, tensor.untyped_storage().data_ptr()].append(names)
        else:
            yield [names]
    for members in storages.values():
        members.sort(key=lambda names: _extent(names[0].tensor))
        region, end = [members[0]], _extent(members[0][0].tensor)[1]
        for names in members[1:]:
            begin, last = _extent(names[0].tensor)
            if begin >= end:
                yield region
                region = []
            region.append(names)
            end = max(end, last)
        yield region


def _dense(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a view with the dimensions in the order of memory; None if there are gaps, or pools lack the dtype."""
    if tensor.dtype not in DTYPES.values():
        return None
    strides: tuple[int, ...] = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis))
    ordered = tensor.detach().permute(order)
    return ordered if ordered.is_contiguous() else None


def _entries(
    members: list[list[_Found]],
    numbers: Mapping[str, int],
    stored: str | None,
    begin: int,
    *,
    on_device: bool,
    private: bool = False,
    constant: bool = False,
) -> Iterator[Entry]:
    for names in members:
        for found in names:
            tensor = found.tensor
            of_parameter = found.kind == PARAMETER
            extra = vars(tensor) if of_parameter else {}
            scalars = {key: value for key, value in extra.items() if isinstance(value, bool | int | str | None)}
            yield Entry(
                name=found.name,
                kind=found.kind,
                object=numbers[names[0].name],
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                strides=tensor.stride(),
                stored=stored,
                offset=0 if stored is None else int(tensor.storage_offset()) - begin // tensor.element_size(),
                private=private,
                constant=private and constant,
                host=on_device and tensor.device.type == "cpu",
                persistent=found.persistent,
                gradient=of_parameter and tensor.requires_grad,
                type=_qualified(type(tensor)) if of_parameter else "",
                attributes=scalars,
                kept=tuple(sorted(extra.keys() - scalars.keys())),
            )


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# -- binding -----------------------------------------------------------------------------------------------


def bind(model: Model, pool: Pool, *, strict: bool = True, accepts: Collection[str] = ()) -> Model:
    """Give a module the tensors of a runtime pool, in place; only private tensors are copied.

    Args:
        model: a module that was made on the meta device, or loaded; the tensors of a loaded one are dropped.
        pool: a runtime pool that was published from a module of the same kind.
        strict: whether names, shapes and dtypes have to be the module's own. An engine whose post-processing replaces
            tensors passes False, and calls :func:`refuse_meta` afterwards.
        accepts: the attributes of the module itself that the pool may set.

    Returns:
        ``model``, for convenience. Parameters require a gradient if they did in the module that was published.

    Raises:
        Invalid: ``pool`` is not a runtime pool; names, shapes or dtypes differ; a parameter's class is not the
            module's; the pool would set a name that it may not set, such as a method's; or with ``strict`` a tensor
            would stay without data. The model was not changed, except in the last case.
    """
    manifest = read_manifest(pool)
    modules = dict(model.named_modules(remove_duplicate=False))
    own = {found.name: found for found in _found(model)}
    _refuse_differences(model, pool, manifest, modules, own, strict=strict)
    _refuse_names(model, pool, manifest, modules, own, accepts)
    kinds = {entry.name: _kind_of(entry, own.get(entry.name), pool) for entry in manifest.entries}
    made = list(_tensors(manifest.entries, pool))
    objects: dict[int, torch.Tensor] = {}
    for entry, tensor in zip(manifest.entries, made, strict=True):
        before = own.get(entry.name)
        if entry.object not in objects:
            objects[entry.object] = _object(entry, tensor, kinds[entry.name], None if before is None else before.tensor)
        path, _, leaf = entry.name.rpartition(".")
        _place(modules[path], leaf, entry, objects[entry.object])
    for name in manifest.consumed:
        if name in own:
            path, _, leaf = name.rpartition(".")
            _clear(modules[path], leaf)
    for name, value in manifest.attributes.items():
        setattr(model, name, value)
    if strict:
        refuse_meta(model, pool)
    return model


def _refuse_differences(
    model: nn.Module,
    pool: Pool,
    manifest: Manifest,
    modules: Mapping[str, nn.Module],
    own: Mapping[str, _Found],
    *,
    strict: bool,
) -> None:
    entries = {entry.name: entry for entry in manifest.entries}
    besides = [name for name in entries if name.rpartition(".")[0] not in modules]
    missing: list[str] = []
    different: list[str] = []
    if strict:
        besides = [name for name in entries if name not in own]
        missing = [name for name in own if name not in entries and name not in manifest.consumed]
        different = [
            f"{name} ({entry.dtype} {entry.shape} for {str(mine.dtype).removeprefix('torch.')} {tuple(mine.shape)})"
            for name, entry in entries.items()
            if name in own
            and (tuple((mine := own[name].tensor).shape), f"{mine.dtype}") != (entry.shape, f"torch.{entry.dtype}")
        ]
    if besides or missing or different:
        raise Invalid(
            f"runtime pool {pool.name!r}@{pool.version} does not fit {type(model).__name__} (missing in the pool:"
            f" {some(missing)}; only in the pool: {some(besides)}; different: {some(different)}); attach the pool of"
            f" this model, engine and configuration, or publish it anew"
        )


_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that torch sets on every module, such as ``_parameters``."""


def _refuse_names(
    model: nn.Module,
    pool: Pool,
    manifest: Manifest,
    modules: Mapping[str, nn.Module],
    own: Mapping[str, _Found],
    accepts: Collection[str],
) -> None:
    """Refuse a manifest that would set a tensor or a value in place of code or state of the module or of torch."""
    refused = [name for name in manifest.attributes if name not in accepts]
    for entry in manifest.entries:
        path, _, leaf = entry.name.rpartition(".")
        module = modules[path]
        of_class = getattr(type(module), leaf, None)
        taken = leaf in _OF_MODULES or leaf in module._modules or callable(of_class) or isinstance(of_class, property)
        if not leaf or (entry.name not in own and taken):
            refused.append(entry.name)
        refused += [f"{entry.name}.{key}" for key in entry.attributes if hasattr(torch.Tensor, key)]
    if refused:
        raise Invalid(
            f"runtime pool {pool.name!r}@{pool.version} would set {some(refused)} of {type(model).__name__}, which a"
            f" pool may not set; attach the pool of this model and engine, or publish it anew"
        )


def _kind_of(entry: Entry, own: _Found | None, pool: Pool) -> type[nn.Parameter] | None:
    """Return the class of a parameter: torch's, or that of the module's own parameter of this name."""
    if entry.kind != PARAMETER:
        return None
    known: list[type] = [nn.Parameter, *([type(own.tensor)] if own is not None else [])]
    for kind in known:
        if _qualified(kind) == entry.type and issubclass(kind, nn.Parameter):
            return kind
    raise Invalid(
        f"parameter {entry.name!r} of runtime pool {pool.name!r}@{pool.version} is a {entry.type}, and the module's own"
        f" is a {_qualified(known[-1])}; attach the pool of this engine and its version, or publish it anew"
    )


def _tensors(entries: Iterable[Entry], pool: Pool) -> Iterator[torch.Tensor]:
    """Yield the tensor of each entry: a view of the pool, or of a private copy that all views of that memory share."""
    state = state_dict(pool)
    device = state[MANIFEST].device
    storages: dict[tuple[str, bool, bool], torch.UntypedStorage] = {}
    for entry in entries:
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise Invalid(f"{entry.name!r} of runtime pool {pool.name!r} has dtype {entry.dtype}, which torch lacks")
        place = torch.device("cpu") if entry.host else device
        if entry.stored is None:
            if 0 not in entry.shape or len(entry.shape) != len(entry.strides):
                raise Invalid(f"{entry.name!r} of runtime pool {pool.name!r} has elements {entry.shape}, and no memory")
            yield torch.empty_strided(entry.shape, entry.strides, dtype=dtype, device=place)
            continue
        key = entry.stored, entry.private, entry.host
        if key not in storages:
            if entry.stored not in state:
                raise Invalid(f"runtime pool {pool.name!r} has no tensor {entry.stored!r}, which {entry.name!r} is in")
            shared = state[entry.stored].untyped_storage()
            storages[key] = _own(shared, place) if entry.private or entry.host else shared
        _check_extent(entry, dtype, storages[key].nbytes(), pool)
        yield _view(storages[key], dtype, entry.offset, entry.shape, entry.strides)


def _check_extent(entry: Entry, dtype: torch.dtype, nbytes: int, pool: Pool) -> None:
    """Refuse a tensor that reaches beyond its memory: torch would enlarge a private copy instead of failing."""
    last = entry.offset + sum((size - 1) * step for size, step in zip(entry.shape, entry.strides, strict=False))
    end = 0 if 0 in entry.shape else (last + 1) * dtype.itemsize
    if len(entry.shape) != len(entry.strides) or end > nbytes:
        raise Invalid(
            f"{entry.name!r} of runtime pool {pool.name!r} reaches beyond its memory: it has shape {entry.shape} and"
            f" strides {entry.strides} from element {entry.offset} on, and {nbytes} bytes are there"
        )


def _own(storage: torch.UntypedStorage, place: torch.device) -> torch.UntypedStorage:
    """Return a copy of a storage, on a device."""
    whole = _view(storage, torch.uint8, 0, (storage.nbytes(),), (1,))
    return whole.to(place, copy=True).untyped_storage()


def _object(
    entry: Entry, tensor: torch.Tensor, kind: type[nn.Parameter] | None, before: torch.Tensor | None
) -> torch.Tensor:
    """Return the object of an entry; for a parameter, an instance of its class with its attributes."""
    if kind is None:
        return tensor
    made: torch.Tensor = torch.Tensor._make_subclass(kind, tensor, entry.gradient)
    had = vars(before) if before is not None else {}
    vars(made).update({key: had[key] for key in entry.kept if key in had}, **entry.attributes)
    if lacking := [key for key in entry.kept if key not in had]:
        log.debug("parameter %s lacks %s, which it had where it was published", entry.name, ", ".join(lacking))
    return made


def _place(module: nn.Module, leaf: str, entry: Entry, tensor: torch.Tensor) -> None:
    """Set a tensor on a module, in place of what has that name there."""
    _clear(module, leaf)
    if entry.kind == PARAMETER:
        module._parameters[leaf] = tensor  # type: ignore[assignment]  # it may be tied to a parameter, and is one
    elif entry.kind == BUFFER:
        module.register_buffer(leaf, tensor, persistent=entry.persistent)
    else:
        vars(module)[leaf] = tensor


def _clear(module: nn.Module, leaf: str) -> None:
    module._parameters.pop(leaf, None)
    module._buffers.pop(leaf, None)
    module._non_persistent_buffers_set.discard(leaf)
    vars(module).pop(leaf, None)


# -- other versions ----------------------------------------------------------------------------------------


def switch(
    broker: Broker,
    model: nn.Module,
    pool: Pool,
    version: int | None = None,
    *,
    wait: float = 0.0,
    manifest: Manifest | None = None,
) -> int:
    """Map another version for a module that a pool is bound to, at the same addresses; returns the version.

    No work may run on the module during the call. Private tensors that no process was seen to write get the new values,
    except those that the module has dropped. If the call raises an error, the module keeps its version.

    Args:
        broker: the pool's session.
        model: a module that :func:`bind` gave the tensors of ``pool``.
        pool: the pool.
        version: the version to map; by default the current one.
        wait: seconds to wait for its publication.
        manifest: the manifest of the module's version, if the pool is asleep: it wakes on the other version.

    Raises:
        Invalid: the version was not published from a module of the same structure.
        CubrokerError: as :meth:`Broker.attach` and :meth:`Pool.switch`.
        torch.OutOfMemoryError: there is no memory for a second copy of the private tensors.
    """
    if manifest is None:
        manifest = read_manifest(pool)
    with broker.attach(pool.name, version=version, device=pool.devices[0].uuid, wait=wait) as target:
        if (other := read_manifest(target)) != manifest:
            raise Invalid(
                f"runtime pool {pool.name!r}@{target.version} was published from a module of another structure than"
                f" version {pool.version}, which stays: {difference(other, manifest)}; bind it to a new module"
            )
        now = {found.name: found.tensor for found in _found(model)}
        entries = [
            entry
            for entry in manifest.entries
            if entry.name in now and (entry.constant or (entry.host and not entry.private))
        ]
        # The copies are made first: if there is no memory for them, the module keeps all of its version.
        made = list(_tensors(entries, target))
        pool.switch(target.version)
    with torch.no_grad():
        for entry, tensor in zip(entries, made, strict=True):
            now[entry.name].copy_(tensor)
    return pool.version
