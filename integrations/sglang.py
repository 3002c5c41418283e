"""SGLang takes its weights from runtime pools: ``--load-format cubroker``.

The first engine of a model loads as ever and publishes what each rank computes with; every engine, the first one too,
then has the pool's memory as its parameters. The name of a pool has a fingerprint of all that its bytes depend on, and
the UUID of the device.

``--model-loader-extra-config`` has, as JSON:

``directory``
    where the broker listens; by default ``$CUBROKER_DIR``, else this user's default.
``pool``
    how names of pools begin; by default ``sglang``.
``share``, ``durable``, ``mode``
    as for :meth:`cubroker.Broker.create`.
``timeout``
    seconds to wait for an engine that loads the same; by default 600.
``fallback``
    whether SGLang's own loader is used where the broker or the pool cannot be; by default false: the engine fails.
``checkpoint``
    what stands for the checkpoint's bytes, which are not digested then: its revision in a registry, say.

SGLang has no place where a load format could be registered. So the plugin adds the name to the choices of its command
line, and hooks by ``sglang.srt.plugins`` do the rest: a configuration with that format gets the class of the loader,
which SGLang accepts in place of a name; an update from disk, with the path of the model that runs, shows the current
version of its pool, or with ``PATH@VERSION`` another one; other updates of weights, which are read-only, are refused.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cubroker.client.broker import Broker
from cubroker.client.pool import Pool
from cubroker.integrations import fingerprint
from cubroker.protocol.errors import CubrokerError, Unsupported

try:
    import sglang
    import torch
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig, LoadFormat
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import loader as loaders
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import get_parallel, get_server_args
    from torch import nn

    from cubroker.integrations import runtime_pools
except ImportError as error:
    raise ImportError(f"cubroker.integrations.sglang needs SGLang ({error}): pip install 'cubroker[sglang]'") from error

log = logging.getLogger("sglang.srt.cubroker")

LOAD_FORMAT = "cubroker"

PREFIX = "sglang"
"""How names of pools begin by default."""

PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""Methods that leave weights as they are, but for CPUs with AMX."""

PARALLEL = (
    *("tp_size", "tp_rank", "pp_size", "pp_rank", "dp_size", "attn_dp_size", "attn_cp_size", "moe_ep_size"),
    *("moe_ep_rank", "moe_dp_size", "moe_dp_rank", "moe_dense_tp_size", "enable_dp_lm_head"),
)
"""What of the parallel layout a rank's tensors depend on."""

ARGUMENTS = (
    *("attention_backend", "cpu_offload_gb", "enable_memory_saver", "kv_cache_dtype", "moe_a2a_backend"),
    *("moe_runner_backend", "torchao_config"),
)
"""Arguments of the server that its tensors may depend on, besides the model's configuration."""

NEUTRAL = (
    "SGLANG_API",
    "SGLANG_HOST",
    "SGLANG_LOG",
    "SGLANG_PLUGINS",
    "SGLANG_PORT",
    "SGLANG_RUN_ID",
    "SGLANG_TORCH_PROF",
)
"""How variables of SGLang's begin that no tensor depends on; all others are part of the fingerprint."""

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_HELD = "_cubroker"


class Held(NamedTuple):
    """What a model's tensors are held by, for as long as the model lives."""

    broker: Broker
    pool: Pool
    #: Of the checkpoint that it was loaded from.
    path: str


class CubrokerModelLoader(loaders.BaseModelLoader):  # type: ignore[misc]
    """SGLang's loader of runtime pools."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        extra = dict(load_config.model_loader_extra_config or {})
        self._directory: str | None = extra.pop("directory", None)
        self._prefix = str(extra.pop("pool", PREFIX))
        self._timeout = float(extra.pop("timeout", 600.0))
        self._fallback = bool(extra.pop("fallback", False))
        self._checkpoint: str | None = extra.pop("checkpoint", None)
        self._terms = {key: extra.pop(key) for key in ("share", "durable", "mode") if key in extra}
        if extra:
            raise ValueError(f"--model-loader-extra-config of load format {LOAD_FORMAT} has no {', '.join(extra)}")

    def download_model(self, model_config: ModelConfig) -> None:
        """Download the checkpoint, unless ``checkpoint`` stands for it: then only an engine that loads needs it."""
        if self._checkpoint is None:
            self._plain(model_config).download_model(model_config)

    def load_model(self, *, model_config: ModelConfig, device_config: DeviceConfig) -> nn.Module:
        """Return the model on the tensors of its pool, after it was published if need be."""
        began = time.perf_counter()
        target = torch.device(device_config.device)

        def load() -> nn.Module:
            plain = self._plain(model_config)
            model: nn.Module = plain.load_model(model_config=model_config, device_config=device_config)
            return model

        try:
            broker = Broker(self._directory)
            device, uuid = _place(broker, target)
            name = self._name(model_config, uuid)
        except CubrokerError as error:
            if not self._fallback:
                raise
            log.warning("SGLang's own loader is used, and no pool: %s", error)
            return load()

        def publish(model: nn.Module) -> None:
            _check(model, self._made(model_config).eval())
            restored = [name for name, _ in model.named_buffers()] if get_server_args().enable_memory_saver else []
            runtime_pools.publish(broker, name, model, private=restored, device=device, **self._terms)

        def attach(pool: Pool) -> nn.Module:
            model = runtime_pools.bind(self._made(model_config), pool, strict=False)
            runtime_pools.refuse_meta(model, pool)
            return model

        got = runtime_pools.obtain(
            broker,
            name,
            load=load,
            publish=publish,
            attach=attach,
            device=device,
            timeout=self._timeout,
            fallback=self._fallback,
        )
        if got.pool is None:
            broker.close()
            return got.model
        if got.loaded:
            _give_back(target)
        else:
            self.preloaded_weights_bytes = got.pool.nbytes  # it was there before this engine measured what is free
        vars(got.model)[_HELD] = Held(broker, got.pool, model_config.model_path)
        how, size = "published" if got.loaded else "attached to", got.pool.nbytes / (1 << 20)
        seconds = time.perf_counter() - began
        log.info("cubroker: %s %s@%d, %.1f MiB, in %.3f s", how, name, got.pool.version, size, seconds)
        return got.model.eval()

    # -- how ---------------------------------------------------------------------------------------

    def _plain(self, model_config: ModelConfig) -> Any:
        plain = dataclasses.replace(self.load_config, load_format=LoadFormat.AUTO, model_loader_extra_config={})
        return loaders.get_model_loader(plain, model_config)

    def _made(self, model_config: ModelConfig) -> nn.Module:
        """Make the model on the meta device."""
        quantization = loaders._get_quantization_config(model_config, self.load_config)
        with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
            model: nn.Module = loaders._initialize_model(model_config, self.load_config, quantization)
        return model

    def _name(self, model_config: ModelConfig, uuid: str) -> str:
        label = fingerprint.label(self._prefix, str(model_config.model_path))
        return f"{label}{fingerprint.fingerprint(self._facts(model_config))}/{uuid}"

    def _facts(self, model_config: ModelConfig) -> dict[str, object]:
        """Return all that the tensors of this rank depend on."""
        config = json.loads(model_config.hf_config.to_json_string(use_diff=False))
        config.pop("_name_or_path", None)
        parallel, arguments = get_parallel(), get_server_args()
        capability = current_platform.get_device_capability() if current_platform.is_cuda_alike() else None
        return {
            "format": runtime_pools.FORMAT,
            "engine": ["sglang", sglang.__version__, torch.__version__],
            "checkpoint": self._digest(model_config),
            "config": config,
            "dtype": str(model_config.dtype),
            "quantization": model_config.quantization,
            "parallel": {key: getattr(parallel, key) for key in PARALLEL},
            "arguments": {key: getattr(arguments, key, None) for key in ARGUMENTS},
            "draft": [bool(getattr(model_config, "is_draft_model", False)), self.load_config.draft_model_idx],
            "platform": [current_platform.device_name, str(capability)],
            "variables": {
                key: value
                for key, value in sorted(os.environ.items())
                if key.startswith("SGLANG_") and not key.startswith(NEUTRAL)
            },
        }

    def _digest(self, model_config: ModelConfig) -> str:
        if self._checkpoint is not None:
            return f"declared:{self._checkpoint}"
        if Path(model_config.model_path).is_dir():
            return fingerprint.checkpoint(model_config.model_path)
        from huggingface_hub import snapshot_download

        self._plain(model_config).download_model(model_config)
        folder = snapshot_download(
            model_config.model_path,
            revision=model_config.revision,
            cache_dir=self.load_config.download_dir,
            local_files_only=True,
        )
        return fingerprint.checkpoint(folder)


def _place(broker: Broker, target: torch.device) -> tuple[int, str]:
    """Return the device of this rank, as this process counts them, and its UUID; host devices take turns."""
    devices = broker.driver.devices
    if target.type == "cpu":
        index = get_parallel().tp_rank % len(devices)
    else:
        index = torch.accelerator.current_device_index() if target.index is None else target.index
    return index, devices[index].uuid


def _check(model: nn.Module, fresh: nn.Module) -> None:
    """Raise ``Unsupported`` for a loaded model that a new one with the same tensors would not be equal to."""
    new = dict(fresh.named_modules())
    for name, module in model.named_modules():
        label, method = name or "the model", type(getattr(module, "quant_method", None)).__name__
        if method not in (*PLAIN, "NoneType"):
            raise Unsupported(
                f"{label} is computed by {method}, and which attributes beside tensors that sets is not known; use"
                f" another load format"
            )
        before, now = _scalars(new.get(name)), _scalars(module)
        if changed := sorted(key for key in now.keys() | before.keys() if now.get(key) != before.get(key)):
            raise Unsupported(
                f"{label} has set {', '.join(changed)} as it was loaded, and a pool holds tensors alone; use another"
                f" load format"
            )


def _scalars(module: nn.Module | None) -> dict[str, object]:
    kinds = bool | int | float | str | None
    return {key: value for key, value in vars(module).items() if isinstance(value, kinds)} if module else {}


def _give_back(target: torch.device) -> None:
    """Give the memory of tensors that nothing refers to any more back to the device."""
    gc.collect()
    if target.type != "cpu":
        torch.accelerator.empty_cache()


# -- what SGLang calls -----------------------------------------------------------------------------------


def register() -> None:
    """Make cubroker known to SGLang: the entry point of ``sglang.srt.plugins``, called in every process."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if LOAD_FORMAT not in choices.LOAD_FORMAT_CHOICES:
        choices.add_load_format_choices([LOAD_FORMAT])
    HookRegistry.register(
        "sglang.srt.configs.load_config.LoadConfig._verify_load_format", _with_our_loader, HookType.AROUND
    )
    HookRegistry.register(f"{_UPDATER}.update_weights_from_disk", _updated_from_disk, HookType.AROUND)
    for update in ("update_weights_from_tensor", "load_weights_from_distributed", "update_weights_from_ipc"):
        HookRegistry.register(f"{_UPDATER}.{update}", _unless_shared, HookType.AROUND)


def _with_our_loader(verify: Callable[[LoadConfig], None], config: LoadConfig) -> None:
    if config.load_format == LOAD_FORMAT:
        config.load_format = CubrokerModelLoader
    verify(config)


def _updated_from_disk(
    update: Callable[..., tuple[bool, str]], updater: Any, model_path: str, *rest: Any, **options: Any
) -> tuple[bool, str]:
    """Show another version of the pool to the model, at the same addresses, between two steps of the engine."""
    held = vars(updater.get_model()).get(_HELD)
    if held is None:
        return update(updater, model_path, *rest, **options)
    path, mark, version = model_path.removeprefix(held.path).partition("@")
    if not model_path.startswith(held.path) or path or (mark and not version.isdecimal()):
        return False, (
            f"the weights of {held.path} are those of pool {held.pool.name}, which is read-only: publish another"
            f" version of it, and update from {held.path}, or from {held.path}@VERSION"
        )
    try:
        number = runtime_pools.switch(held.broker, updater.get_model(), held.pool, int(version) if version else None)
    except CubrokerError as error:
        return False, error.message
    return True, f"The model has {held.pool.name}@{number}."


def _unless_shared(update: Callable[..., Any], updater: Any, *rest: Any, **options: Any) -> Any:
    held = vars(updater.get_model()).get(_HELD)
    if held is None:
        return update(updater, *rest, **options)
    return False, (
        f"the weights of this model are those of pool {held.pool.name}, which is read-only: publish another version of"
        f" it, and update from disk, from {held.path}"
    )
