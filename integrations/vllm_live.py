"""Weight transfer and sleep mode of a running vLLM engine whose weights are in runtime pools.

Both need ``--load-format cubroker``; ``--weight-transfer-config '{"backend": "cubroker"}'`` enables the first, and
``--enable-sleep-mode`` the second.

*Weight transfer.* The message of an update is ``{"pool": name, "version": number}``. Without a pool, or with the
engine's own, the engine switches to that version of its runtime pool, at the same addresses. Any other pool has the
checkpoint's own tensors, by the names in its files, as a trainer publishes them. The first engine of many loads a model
from that pool, as vLLM loads from files, and publishes the result as the runtime pool's next version; all engines
switch to it. If the runtime pool's current version has newer weights than the update, the update is refused, unless a
version with its weights still exists.

*Sleep.* The pools are unmapped. Their tensors are not copied to host memory, since the broker keeps them. vLLM's own
allocator handles all other memory. Levels 1 and 2 do the same.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import signature
from itertools import chain
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from cubroker.client.broker import Broker
from cubroker.client.pool import Pool
from cubroker.client.tensor import SharedTensor
from cubroker.integrations import runtime_pools
from cubroker.protocol import Layout
from cubroker.protocol.errors import CubrokerError, Invalid, NotFound, Retired, Unsupported

try:
    import torch
    from torch import nn
    from torch.utils.dlpack import from_dlpack
    from vllm.config import ModelConfig
    from vllm.distributed.weight_transfer import base, factory
    from vllm.platforms import current_platform

    from cubroker.integrations.engine_loader import LOAD_FORMAT, Held, give_back, held, models
    from cubroker.integrations.torch import DTYPES
except ImportError as error:
    raise ImportError(f"cubroker.integrations.vllm_live needs vLLM with weight transfer ({error})") from error

try:
    from vllm.device_allocator import sleep_mode_backend as sleep_mode
except ImportError:  # this vLLM's sleep mode has no backends to choose from
    sleep_mode = None

log = logging.getLogger("vllm.cubroker")  # below vLLM's own logger, which has handlers

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def switch(worker: Any, version: int | None = None) -> int:
    """Map another version for a worker's model, at the same addresses; returns the version.

    ::

        llm.collective_rpc(cubroker.integrations.vllm.switch)
        llm.reset_prefix_cache()

    Args:
        worker: vLLM's worker, between two steps of the engine.
        version: the version to map; by default the current one.

    Raises:
        CubrokerError: as :func:`cubroker.integrations.runtime_pools.switch`.
    """
    model = worker.get_model()
    mine = held(model)
    return runtime_pools.switch(mine.broker, model, mine.pool, version, manifest=mine.manifest)


def register() -> None:
    """Register the backends with vLLM; a second call changes nothing."""
    with suppress(ValueError):  # it was registered before
        factory.WeightTransferEngineFactory.register_engine(LOAD_FORMAT, PoolWeightTransfer)
    if hasattr(factory, "WeightTransferTrainerFactory"):
        with suppress(ValueError):
            factory.WeightTransferTrainerFactory.register_engine(LOAD_FORMAT, PoolTrainer)
    if sleep_mode is not None:
        with suppress(ValueError):
            sleep_mode.SleepModeBackendFactory.register_backend(LOAD_FORMAT, __name__, PoolSleepMode.__name__)


# -- weight transfer ---------------------------------------------------------------------------------------


@dataclass
class PoolInitInfo(base.WeightTransferInitInfo):  # type: ignore[misc]
    """The first message of a trainer, which has no fields."""


@dataclass
class PoolUpdateInfo(base.WeightTransferUpdateInfo):  # type: ignore[misc]
    """The weights that an engine is told to switch to."""

    #: A pool with the checkpoint's own tensors, or the engine's runtime pool, which is the default.
    pool: str | None = None
    #: By default the current one.
    version: int | None = None
    #: Seconds to wait for its publication.
    wait: float = 0.0
    #: Distinguishes this publication of ``pool`` from one with the same number before a restart of the broker.
    publication: str = ""


class PoolWeightTransfer(base.WeightTransferEngine[PoolInitInfo, PoolUpdateInfo]):  # type: ignore[misc]
    """The backend of vLLM's weight transfer that switches to another version of a pool."""

    init_info_cls = PoolInitInfo
    update_info_cls = PoolUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: PoolInitInfo) -> None:
        """Check that the model has a pool.

        Raises:
            Invalid: it has none.
        """
        held(self.model)

    def start_weight_update(self) -> None:
        """Do nothing: the model stays as it is until the other version is mapped."""

    def finish_weight_update(self) -> None:
        """Do nothing: the model has the other version."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Switch to another version; the device has completed all work for it when this returns."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: PoolUpdateInfo, load_weights: Callable[..., Any] | None = None) -> None:
        """Switch to another version.

        Args:
            update_info: the pool and the version.
            load_weights: an argument that older releases of vLLM pass; it is not used.

        Raises:
            Invalid: the runtime pool's current version was made from a later version of the update's pool.
            CubrokerError: as :func:`cubroker.integrations.runtime_pools.switch` and :meth:`Broker.attach`; the model
                keeps the version that it had.
        """
        # vLLM 0.24 sets another default device here. It does not when it loads, and some tensors are made on the host.
        with torch.device("cpu"):
            self._receive(update_info)

    def _receive(self, update_info: PoolUpdateInfo) -> None:
        mine = held(self.model)
        if runtime_pools.on_meta(self.model):
            _take_back(self.model, mine.manifest)
        version = update_info.version
        if update_info.pool not in (None, mine.pool.name):
            version = _converted(mine, update_info)
        runtime_pools.switch(mine.broker, self.model, mine.pool, version, wait=update_info.wait, manifest=mine.manifest)

    def shutdown(self) -> None:
        """Do nothing: the pool's lease ends with the model."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: Any) -> int:
        """Publish tensors as the next version of a pool; returns the version.

        For releases of vLLM whose trainers have no engine of their own. Afterwards, pass the pool's name and the
        version to ``update_weights``.

        Args:
            iterator: pairs of a name, as in the checkpoint's files, and a tensor.
            trainer_args: ``pool``, the pool's name; ``directory``, where the broker listens; and arguments of
                :meth:`Broker.publish`.
        """
        terms = dict(trainer_args)
        name = terms.pop("pool")
        with Broker(terms.pop("directory", None)) as broker:
            return broker.publish(name, dict(iterator), **terms)


def _take_back(model: nn.Module, manifest: runtime_pools.Manifest) -> None:
    """Restore each layer's tensors, which vLLM 0.24 removes when an update in the checkpoint's format begins."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        info.reset()
    modules = dict(model.named_modules(remove_duplicate=False))
    for entry in manifest.entries:
        if not entry.persistent:  # vLLM registers all buffers as persistent ones
            path, _, leaf = entry.name.rpartition(".")
            modules[path]._non_persistent_buffers_set.add(leaf)


class _Origin(NamedTuple):
    """The version of a pool that a version of a runtime pool was made from; packed, it is the latter's ``source``."""

    #: Digest of the pool's name.
    pool: bytes
    version: int
    #: Digest of :attr:`PoolUpdateInfo.publication`.
    publication: bytes

    @classmethod
    def of(cls, source: Pool, publication: str) -> Self:
        """Return the origin of a version that is made from a pool with a checkpoint's tensors."""
        name, told = (hashlib.sha256(text.encode()).digest() for text in (source.name, publication))
        return cls(name[:8], source.version, told[:16])

    @classmethod
    def read(cls, pool: Pool) -> Self:
        """Return the origin of a version of a runtime pool."""
        return cls(*_ORIGIN.unpack(runtime_pools.read_source(pool)))


_ORIGIN = struct.Struct(">8sQ16s")


def _converted(mine: Held, wanted: PoolUpdateInfo) -> int:
    """Return the version of the runtime pool that was made from a pool with a checkpoint's tensors.

    The first process that asks for that version makes it; the others wait, and use it.
    """
    assert wanted.pool is not None
    name, device = mine.pool.name, mine.pool.devices[0].uuid
    with (
        mine.broker.attach(wanted.pool, version=wanted.version, device=device, wait=wanted.wait, peer=True) as source,
        mine.broker.lock(name, timeout=mine.options.timeout),
    ):
        origin = _Origin.of(source, wanted.publication)
        for version, made_from in _origins(mine):
            if made_from == origin:
                return version
        _refuse_older(mine, source, origin)
        assert mine.load_from is not None  # vLLM's loader says how
        model = mine.load_from(source)
        try:
            return runtime_pools.publish(
                mine.broker,
                name,
                model,
                like=mine.manifest,
                source=_ORIGIN.pack(*origin),
                device=device,
                **mine.options.terms,
            )
        finally:
            del model
            give_back(mine.rank.target)


def _origins(mine: Held) -> Iterator[tuple[int, _Origin]]:
    """Yield the versions of the runtime pool that can be leased, the engine's own first, each with its origin.

    Every other version has to be attached to read its origin, so they are tried from the newest on.
    """
    name, own = mine.pool.name, 0
    if not (mine.pool.asleep or mine.pool.lost):
        own = mine.pool.version
        yield own, _Origin.read(mine.pool)
    leasable = [each for each in mine.broker.pools() if each.name == name and each.state in ("current", "superseded")]
    for version in sorted({each.version for each in leasable} - {own}, reverse=True):
        with suppress(NotFound, Retired):  # its last lease has just ended
            yield version, _origin_of(mine, version)


def _origin_of(mine: Held, version: int | None = None) -> _Origin:
    with mine.broker.attach(mine.pool.name, version=version, device=mine.pool.devices[0].uuid) as pool:
        return _Origin.read(pool)


def _refuse_older(mine: Held, source: Pool, origin: _Origin) -> None:
    """Raise ``Invalid`` if the current version was made from newer weights: engines that start later would get older.

    Versions count from 1 again after a restart of the broker. So a higher number means newer weights only if the pool
    has had a version of that number since.
    """
    try:
        current = _origin_of(mine)
    except NotFound:
        return
    if current.pool != origin.pool or current.version <= origin.version:
        return
    try:
        mine.broker.describe(source.name, current.version)
    except Retired:
        pass
    except NotFound:
        return
    raise Invalid(
        f"pool {source.name!r}@{source.version} is older than version {current.version}, which the current version of"
        f" {mine.pool.name!r} was made from; version {mine.pool.version} stays here: update to version"
        f" {current.version} instead, or publish the older weights again"
    )


# -- the trainer -------------------------------------------------------------------------------------------

T = TypeVar("T")


@dataclass
class _TrainerInit:
    """vLLM 0.32's ``TrainerInitInfo``, for releases that lack it."""

    #: The rank of this process in the trainer; rank 0 sends.
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class _TrainerEngine(Generic[T]):
    """vLLM 0.32's ``TrainerWeightTransferEngine``, for releases that lack it."""

    def __init__(self, *, client: Any, source: Any, is_sender: bool) -> None:
        self.client, self.source, self.is_sender = client, source, is_sender


class _Named(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class _ModuleSource:
    """The parameters of a module, one by one; a parameter of which each rank has a part is gathered."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def metadata(self) -> list[_Named]:
        return [_Named(name, each.dtype, tuple(each.shape)) for name, each in self._module.named_parameters()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, each in self._module.named_parameters():
            yield name, each.full_tensor() if hasattr(each, "full_tensor") else each


TrainerInit: Any = getattr(base, "TrainerInitInfo", _TrainerInit)
TrainerEngine: Any = getattr(base, "TrainerWeightTransferEngine", _TrainerEngine)
ModuleSource: Any = getattr(base, "ModuleSource", _ModuleSource)
"""A trainer's source that yields the parameters of a module: vLLM's class, if it has one."""


@dataclass
class PoolTrainerInit(TrainerInit):  # type: ignore[misc]
    """How a trainer publishes."""

    backend: ClassVar[str] = LOAD_FORMAT

    #: The pool's name.
    pool: str
    #: Where the broker listens; by default as for ``Broker()``.
    directory: str | None = None
    #: The pool's device; by default the one that the sender's tensors are on.
    device: int | str | None = None


class PoolTrainer(TrainerEngine[PoolTrainerInit]):  # type: ignore[misc]
    """The trainer's side of weight transfer: publishes weights as versions of a pool, and notifies the engines.

    The client has the methods of vLLM's ``VLLMWeightSyncClient``, or in releases before it those of ``LLM``.
    """

    init_info_cls = PoolTrainerInit

    def __init__(self, init_info: PoolTrainerInit, *, client: Any, source: Any) -> None:
        if source is None:
            raise ValueError(f"backend {LOAD_FORMAT} sends all weights each time: give a source")
        if getattr(source, "held_names", lambda: None)() is not None:
            raise Unsupported(
                f"backend {LOAD_FORMAT}: ranks of this source have parts of the model, and the first one publishes all"
                f" of it; give a source that gathers, such as ModuleSource"
            )
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._init = init_info
        self._broker = Broker(init_info.directory) if self.is_sender else None

    @classmethod
    def trainer_init(cls, init_info: PoolTrainerInit, *, client: Any, source: Any = None) -> PoolTrainer:
        """Return an engine that can send; call it on every rank. Rank 0 tells the inference engines to be ready."""
        made = cls(init_info, client=client, source=source)
        if made.is_sender:
            client.init_weight_transfer_engine({})
        return made

    def send_weights(self) -> None:
        """Publish the source's tensors as the pool's next version, and update the engines; call it on every rank.

        The version is retired when the engines are updated, so that its memory is free for the trainer again.
        """
        if self._broker is None:
            for _ in self.source:  # gathering a tensor needs all ranks
                pass
            return
        version = self._publish(self._broker)
        start, finish = self.client.start_weight_update, self.client.finish_weight_update
        start(**({"is_checkpoint_format": False} if "is_checkpoint_format" in _takes(start) else {}))
        self.client.update_weights({"pool": self._init.pool, "version": version, "publication": uuid.uuid4().hex})
        finish(*([str(version)] if _takes(finish) else []))
        self._broker.retire(self._init.pool, version)

    def _publish(self, broker: Broker) -> int:
        tensors: Iterator[tuple[str, torch.Tensor]] = iter(self.source)
        first = next(tensors, None)
        if first is None:
            raise Invalid(f"the source of pool {self._init.pool!r} has no tensors; give one that yields weights")
        device = self._init.device
        if device is None:
            device = 0 if first[1].device.type == "cpu" else first[1].device.index
        layout = _layout(self.source.metadata())
        missing = {each.name for each in layout.tensors}
        with broker.create(self._init.pool, layout, devices=[device]) as draft:
            for name, tensor in chain((first,), tensors):
                if name not in draft:
                    raise Invalid(f"the source yields {name!r}, which its metadata() does not name")
                _fill(draft[name], tensor)
                missing.discard(name)
            if missing:
                raise Invalid(
                    f"the source names {min(missing)!r} and {len(missing) - 1} more in metadata() and does not yield"
                    f" them; pool {self._init.pool!r} stays as it is"
                )
            return draft.seal()

    def shutdown(self) -> None:
        """Close the connection to the broker; published versions stay."""
        if self._broker is not None:
            self._broker.close()


def _takes(method: Callable[..., object]) -> Collection[str]:
    """Return the names of a method's parameters in this release of vLLM."""
    return signature(method).parameters


def _layout(said: Iterable[Any]) -> Layout:
    """Return the layout of the tensors in a source's metadata."""
    if lacking := [each for each in said if each.dtype not in _NAMES]:
        raise Unsupported(f"pools have no dtype for {lacking[0].name!r}, which is {lacking[0].dtype}; convert it")
    return Layout.pack([(each.name, _NAMES[each.dtype], tuple(each.shape)) for each in said])


def _fill(target: SharedTensor, tensor: torch.Tensor) -> None:
    """Fill a draft's tensor from one of the same dtype and shape, on any device."""
    held = tensor.detach()
    if held.device.type != "cpu":
        held = held.to(from_dlpack(target).device)
    target.copy_from(held)


# -- sleep -------------------------------------------------------------------------------------------------

TAGS = frozenset({"weights", "kv_cache"})
"""The tags of memory that vLLM can wake separately."""


def sleep_by_pools(model_config: ModelConfig) -> None:
    """Replace vLLM's default sleep mode by this module's; vLLM's command line cannot choose one.

    Parameters that vLLM would preserve on level 2 are in the pool, which is read-only, so it must not write them.
    """
    if sleep_mode is not None and model_config.sleep_mode_backend == "cumem":
        model_config.sleep_mode_backend = LOAD_FORMAT
        if getattr(model_config, "sleep_preserve_parameter_names", None):
            model_config.sleep_preserve_parameter_names = []


if sleep_mode is not None:

    class PoolSleepMode(sleep_mode.CuMemBackend):  # type: ignore[misc]
        """vLLM's sleep mode, in which pools are unmapped, and not copied to the host and back.

        Each pool knows whether it sleeps. The state is RUNNING only if no pool and no memory of vLLM's own sleeps.
        """

        def __init__(self) -> None:
            super().__init__()
            #: Tags of vLLM's own memory that sleeps.
            self._asleep: frozenset[str] = frozenset()

        def suspend(self, level: int = 1) -> None:
            """Unmap the pools of this process's models, then suspend the memory of vLLM's allocator.

            Raises:
                CubrokerError: as :meth:`Pool.sleep`, with the pools' names; all are awake, except those in a note.
            """
            try:
                _for_each_pool("sleep", lambda model: held(model).pool.sleep())
                if current_platform.is_sleep_mode_available() and self._asleep != TAGS:
                    self._asleep = TAGS
                    super().suspend(1)  # level 2 would discard private tensors, which nothing loads again
            except BaseException as error:
                try:
                    self.resume()
                except (CubrokerError, RuntimeError) as left:
                    error.add_note(f"and it could not be undone: {left}")
                raise
            self._state = "SUSPENDED"

        def resume(self, tags: list[str] | None = None) -> None:
            """Resume the memory of vLLM's allocator, then map the pools again, with the versions that they had.

            If a version is gone because another was published, its pool wakes on the current one, with a warning in the
            log. What is awake stays awake; after a failure, the next call wakes the rest.

            Raises:
                CubrokerError: as :meth:`Pool.wake`, :func:`cubroker.integrations.runtime_pools.switch`, with the names
                    of the pools that still sleep; the others are awake.
            """
            self._state = "RESUMING"
            if wanted := self._asleep if tags is None else self._asleep & set(tags):
                super().resume(None if wanted == TAGS else sorted(wanted))
                self._state = "RESUMING"
                self._asleep -= wanted
            if tags is None or "weights" in tags:
                _for_each_pool("wake", _wake)
            if not self._asleep and not any(held(model).pool.asleep for model in models()):
                self._state = "RUNNING"


def _for_each_pool(verb: str, do: Callable[[nn.Module], None]) -> None:
    """Call ``do`` with every model that is on a pool; raise with the names of the pools for which it failed."""
    failed: dict[str, str] = {}
    kind: type[CubrokerError] = CubrokerError
    on_pools = models()
    for model in on_pools:
        try:
            do(model)
        except CubrokerError as error:
            kind, failed[held(model).pool.name] = type(error), error.message  # its traceback refers to the model
    if failed:
        told = "; ".join(f"{name}: {message}" for name, message in failed.items())
        raise kind(
            f"{len(failed)} of {len(on_pools)} pools cannot {verb}: {told}; all other pools are awake; fix the cause,"
            f" then {'suspend' if verb == 'sleep' else 'resume'} again"
        )


def _wake(model: nn.Module) -> None:
    mine = held(model)
    try:
        mine.pool.wake()
    except (NotFound, Retired) as error:
        before = mine.pool.version
        version = runtime_pools.switch(mine.broker, model, mine.pool, manifest=mine.manifest)
        log.warning("cubroker: %s woke on version %d, not %d: %s", mine.pool.name, version, before, error.message)
