"""The common part of the loaders of inference engines: ``--load-format cubroker``.

The first engine of a model loads with its own loader and publishes what each rank computes with. Then every engine,
including the first, uses the pool's memory as its parameters. The name of a pool contains a fingerprint of everything
that its bytes depend on, and the UUID of the device.

A bridge supplies functions that name the pool, load, publish and make a model. :func:`load_on_pool` calls them in
order; :func:`obtain` makes sure that one process of many loads and publishes. The options of an engine, which vLLM and
SGLang accept as ``--model-loader-extra-config``, in JSON, are:

``directory``
    where the broker listens; by default ``$CUBROKER_DIR``, else where a socket is found (:class:`cubroker.Broker`).
``pool``
    how names of pools begin; by default the engine's name.
``share``, ``durable``
    as for :meth:`cubroker.Broker.create`.
``mode``
    the same, as a text of three octal digits: ``"640"``. JSON has no octal numbers, so a number is refused.
``timeout``
    seconds to wait for another engine that loads the same model; by default 600.
``fallback``
    whether the engine's own loader is used if the broker or the pool cannot be; by default false: the engine fails.
``checkpoint``
    a text that identifies the checkpoint's bytes, such as its revision in a registry; the bytes are then not digested.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, get_args

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import fields

from cubroker.client.broker import Broker
from cubroker.client.devices import DeviceId
from cubroker.client.pool import Pool
from cubroker.integrations import fingerprint
from cubroker.protocol.errors import CubrokerError, Invalid, NotFound
from cubroker.protocol.fields import MAX_WAIT, MODE, parse_mode
from cubroker.protocol.messages import AUTO, SHARES

try:
    import torch
    from torch import nn

    from cubroker.integrations import runtime_pools
except ImportError as error:
    raise ImportError(
        f"cubroker.integrations.engine_loader needs PyTorch ({error}): pip install 'cubroker[torch]'"
    ) from error

# An engine runs for weeks. What it needs later is imported now: after an upgrade in place it would be refused.
for _name in ("digests", "draft", "follow", "publish", "synchronization"):
    import_module(f"cubroker.client.{_name}")

log = logging.getLogger(__name__)

LOAD_FORMAT = "cubroker"

PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""Methods that leave weights as they are, in every engine and release, except on CPUs with AMX."""

_HELD = "_cubroker"

_MODELS: weakref.WeakSet[nn.Module] = weakref.WeakSet()

_OPTIONS = f"--model-loader-extra-config of load format {LOAD_FORMAT}"

_SHARES = (AUTO, *SHARES)
_MODE = 'a text of three octal digits, as in "mode": "640", since JSON has no octal numbers'


class PoolOptions(Struct, frozen=True):
    """The options that an engine was given for its pools, by the names at the top of this module.

    Each type is followed by the words for it in an error.
    """

    pool: Annotated[str, "a text"]
    directory: Annotated[str | None, "a text"] = None
    share: Annotated[str, Meta(pattern=rf"^({'|'.join(_SHARES)})\Z"), f"one of {', '.join(_SHARES)}"] = AUTO
    durable: Annotated[bool | None, "true or false"] = None
    mode: Annotated[Annotated[str, Meta(pattern=rf"^{MODE}\Z")] | None, _MODE] = None
    timeout: Annotated[float, Meta(ge=0, le=MAX_WAIT), f"a number of seconds, up to {MAX_WAIT:g}"] = 600.0
    fallback: Annotated[bool, "true or false"] = False
    checkpoint: Annotated[str | None, "a text"] = None

    @classmethod
    def read(cls, given: Mapping[str, Any] | None, prefix: str) -> Self:
        """Read the options from an engine's configuration.

        Args:
            given: some of the options.
            prefix: the engine's default for ``pool``.

        Raises:
            ValueError: an option is unknown, or its value has another type.
        """
        given, types = given or {}, {field.name: field.type for field in fields(cls)}
        if unknown := [name for name in given if name not in types]:
            raise ValueError(f"{_OPTIONS} has no {', '.join(map(str, unknown))}")
        return cls(**{"pool": prefix} | {name: _converted(name, value, types[name]) for name, value in given.items()})

    @property
    def terms(self) -> dict[str, Any]:
        """The arguments of :meth:`Broker.publish` that the options set."""
        mode = None if self.mode is None else parse_mode(self.mode)
        return {"share": self.share, "durable": self.durable, "mode": mode}

    def pool_name(self, path: str, facts: Mapping[str, object], uuid: str) -> str:
        """Return the name of a rank's pool: the model, a fingerprint of what its tensors depend on, and the device."""
        return f"{fingerprint.label(self.pool, path)}{fingerprint.fingerprint(facts)}/{uuid}"

    def digest(self, path: str, revision: str | None, cache: str | None, download: Callable[[], object]) -> str:
        """Return a text that identifies a checkpoint's bytes.

        Args:
            path: a folder, or a name of the hub.
            revision: the revision in the hub.
            cache: the folder of the hub's files; None: the default one.
            download: downloads the checkpoint; called if ``path`` is not a folder.
        """
        if self.checkpoint is not None:
            return f"declared:{self.checkpoint}"
        if Path(path).is_dir():
            return fingerprint.checkpoint(path)
        from huggingface_hub import snapshot_download

        download()
        folder = snapshot_download(path, revision=revision, cache_dir=cache, local_files_only=True)
        return fingerprint.checkpoint(folder)


def _converted(name: str, given: object, kind: Any) -> Any:
    """Return the value of an option; raises ``ValueError`` if the option does not allow it."""
    value = os.fspath(given) if isinstance(given, os.PathLike) else given  # from a program; JSON has no paths
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        shown = json.dumps(given, default=repr, skipkeys=True)
        raise ValueError(f"{_OPTIONS}: {name} is {shown}; give {get_args(kind)[-1]}") from None


class RankPool(NamedTuple):
    """The pool that a rank of an engine computes on."""

    name: str
    #: The broker's device, as this process counts them.
    device: int
    #: Torch's device.
    target: torch.device
    #: The model as the engine was told: a folder, or a name of the hub.
    path: str


class Held(NamedTuple):
    """The session and the pool that keep a model's tensors mapped, for as long as the model lives."""

    broker: Broker
    pool: Pool
    manifest: runtime_pools.Manifest
    rank: RankPool
    options: PoolOptions
    #: Loads another model of the kind from a pool with the checkpoint's own tensors; the engine does not know it.
    load_from: Callable[[Pool], nn.Module] | None = None


class Obtained(NamedTuple):
    """What :func:`obtain` returns."""

    model: nn.Module
    #: None if the engine's own loader was used instead.
    pool: Pool | None
    #: Whether this process loaded the model.
    loaded: bool


# -- models on pools ---------------------------------------------------------------------------------------


def hold(model: nn.Module, by: Held) -> None:
    """Store on a model what keeps its tensors mapped."""
    vars(model)[_HELD] = by
    _MODELS.add(model)


def find_held(model: nn.Module) -> Held | None:
    """Return what keeps a model's tensors mapped; None if another loader loaded the model."""
    found = vars(model).get(_HELD)
    return found if isinstance(found, Held) else None


def held(model: nn.Module) -> Held:
    """Return what keeps a model's tensors mapped.

    Raises:
        Invalid: the model has no pool, because another loader loaded it.
    """
    found = find_held(model)
    if found is None:
        raise Invalid(f"this {type(model).__name__} has no pool; start the engine with --load-format {LOAD_FORMAT}")
    return found


def models() -> list[nn.Module]:
    """Return the models of this process that are on pools."""
    return list(_MODELS)


# -- what loaders ask --------------------------------------------------------------------------------------


def place(broker: Broker, target: torch.device, rank: int) -> tuple[int, str]:
    """Return the index of a rank's device in this process, and its UUID; ranks use host devices in rotation."""
    devices = broker.driver.devices
    if target.type == "cpu":
        index = rank % len(devices)
    else:
        index = torch.accelerator.current_device_index() if target.index is None else target.index
    return index, devices[index].uuid


def configuration(config: Any) -> dict[str, Any]:
    """Return a model's configuration of transformers as plain data, without the path that it was read from."""
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    found.pop("_name_or_path", None)
    return found


def give_back(target: torch.device) -> None:
    """Free the device memory of tensors that nothing refers to any more."""
    gc.collect()
    if target.type != "cpu":
        torch.accelerator.empty_cache()


def load_on_pool(
    options: PoolOptions,
    log: logging.Logger,
    *,
    identify: Callable[[Broker], RankPool],
    load: Callable[[], nn.Module],
    publish: Callable[[Broker, RankPool, nn.Module], object],
    attach: Callable[[Pool], nn.Module],
    finish: Callable[[Obtained], object],
    load_from: Callable[[Pool], nn.Module] | None = None,
    accepts: Collection[str] = (),
) -> nn.Module:
    """Return an engine's model on the tensors of its pool; publish the pool first if it does not exist.

    The model holds the pool and the connection to the broker. After any error the connection is closed.

    Args:
        options: the engine's.
        log: the engine's.
        identify: names the pool of this rank.
        load: as for :func:`obtain`.
        publish: the same.
        attach: the same.
        finish: makes what a bound model needs in addition to tensors; not called if there is no pool.
        load_from: as in :class:`Held`.
        accepts: as for :func:`obtain`.

    Raises:
        CubrokerError: as :func:`obtain`, or no broker serves. With ``fallback`` the engine's own loader is used then.
    """
    began = time.perf_counter()
    with ExitStack() as undo:
        found = _identified(options, log, identify, undo)
        if found is None:
            return load()
        broker, rank = found
        got = obtain(
            broker,
            rank.name,
            load=load,
            publish=partial(publish, broker, rank),
            attach=attach,
            device=rank.device,
            timeout=options.timeout,
            fallback=options.fallback,
            accepts=accepts,
        )
        if got.pool is None:
            return got.model
        finish(got)
        if got.loaded:
            give_back(rank.target)
        hold(got.model, Held(broker, got.pool, runtime_pools.read_manifest(got.pool), rank, options, load_from))
        undo.pop_all()
    how, size = "published" if got.loaded else "attached to", got.pool.nbytes / (1 << 20)
    seconds = time.perf_counter() - began
    log.info("cubroker: %s %s@%d, %.1f MiB, in %.3f s", how, rank.name, got.pool.version, size, seconds)
    return got.model.eval()


def _identified(
    options: PoolOptions, log: logging.Logger, identify: Callable[[Broker], RankPool], undo: ExitStack
) -> tuple[Broker, RankPool] | None:
    """Return a session, which ``undo`` ends, and the pool of this rank; None if the engine's own loader is to load."""
    try:
        broker = undo.enter_context(Broker(options.directory))
        return broker, identify(broker)
    except CubrokerError as error:
        if not options.fallback:
            raise
        log.warning("cubroker: no pool is used; the engine's own loader loads the model: %s", error.message)
        undo.close()
        return None


# -- who loads ---------------------------------------------------------------------------------------------


def obtain(
    broker: Broker,
    name: str,
    *,
    load: Callable[[], nn.Module],
    publish: Callable[[nn.Module], object],
    attach: Callable[[Pool], nn.Module],
    device: DeviceId | None = None,
    timeout: float = 600.0,
    fallback: bool = False,
    accepts: Collection[str] = (),
) -> Obtained:
    """Bind a runtime pool; if it does not exist, load and publish it, or wait for the process that does.

    A lock (:meth:`Broker.lock`) makes sure that one process loads. If that process dies, the next one loads.

    Each rank's pool has its own lock, so one rank of an engine may load while another attaches. Therefore ``load`` must
    not wait for other ranks: the ranks of two engines could wait for each other until the timeout. The default loaders
    of vLLM 0.32 and SGLang 0.5.23 do not wait; each rank reads its part of the files on its own.

    Args:
        broker: the session.
        name: the pool.
        load: the engine's own loader, post-processing included.
        publish: publishes what ``load`` has returned, by :func:`runtime_pools.publish`, as ``name`` and for ``device``.
        attach: makes a module and binds the pool to it.
        device: the device to attach on.
        timeout: seconds to wait for the process that loads.
        fallback: whether an error of publishing or binding is logged, and this process uses what ``load`` returns;
            otherwise the error is raised.
        accepts: as for :func:`runtime_pools.bind`, when what ``load`` has returned is bound.

    Raises:
        TimedOut: another process was loading for ``timeout`` seconds.
        CubrokerError: as :meth:`Broker.attach`, ``publish`` and ``attach``.
    """
    model: nn.Module | None = None
    try:
        pool = _attached(broker, name, device)
        if pool is None:
            with broker.lock(name, timeout=timeout):
                pool = _attached(broker, name, device)
                if pool is None:
                    model = load()
                    publish(model)
        if pool is None:
            assert model is not None
            pool = broker.attach(name, device=device)
            return Obtained(runtime_pools.bind(model, pool, accepts=accepts), pool, loaded=True)
        return Obtained(attach(pool), pool, loaded=False)
    except CubrokerError as error:
        if not fallback:
            raise
        log.warning("runtime pool %s is not used; the engine's own loader loads the model: %s", name, error.message)
        return Obtained(load() if model is None else model, None, loaded=True)


def _attached(broker: Broker, name: str, device: DeviceId | None) -> Pool | None:
    with suppress(NotFound):
        return broker.attach(name, device=device)
    return None
