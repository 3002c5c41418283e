"""The loader that gives SGLang its weights from runtime pools: ``--load-format cubroker``.

:mod:`cubroker.integrations.engine_loader` describes it, and the options in ``--model-loader-extra-config``.

SGLang has no registry of load formats. So the plugin adds the name to the choices of its command line, and hooks of
``sglang.srt.plugins`` do the rest:

- A configuration with that format gets the class of the loader, which SGLang accepts in place of a name.
- An update from disk with the running model's path switches to the current version of its pool, or with
  ``PATH@VERSION`` to another one.
- Other updates of weights are refused, because a pool's weights are read-only.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from cubroker.client.broker import Broker
from cubroker.client.pool import Pool
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

    from cubroker.integrations import engine_loader, runtime_pools
    from cubroker.integrations.engine_loader import LOAD_FORMAT, PLAIN, Obtained, PoolOptions, RankPool, find_held
except ImportError as error:
    raise ImportError(f"cubroker.integrations.sglang needs SGLang ({error}): pip install 'cubroker[sglang]'") from error

log = logging.getLogger("sglang.srt.cubroker")

PREFIX = "sglang"
"""How names of pools begin by default."""

PARALLEL = (
    *("tp_size", "tp_rank", "pp_size", "pp_rank", "dp_size", "attn_dp_size", "attn_cp_size", "moe_ep_size"),
    *("moe_ep_rank", "moe_dp_size", "moe_dp_rank", "moe_dense_tp_size", "enable_dp_lm_head"),
)
"""The attributes of the parallel layout that a rank's tensors depend on."""

ARGUMENTS = (
    *("attention_backend", "cpu_offload_gb", "enable_memory_saver", "kv_cache_dtype", "moe_a2a_backend"),
    *("moe_runner_backend", "torchao_config"),
)
"""Arguments of the server that its tensors may depend on, in addition to the model's configuration."""

NEUTRAL = (
    "SGLANG_API",
    "SGLANG_HOST",
    "SGLANG_LOG",
    "SGLANG_PLUGINS",
    "SGLANG_PORT",
    "SGLANG_RUN_ID",
    "SGLANG_TORCH_PROF",
)
"""Prefixes of variables of SGLang that no tensor depends on; all others are part of the fingerprint."""

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"


class SglangLoader(loaders.BaseModelLoader):  # type: ignore[misc]
    """SGLang's loader of runtime pools."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._options = PoolOptions.read(load_config.model_loader_extra_config, PREFIX)

    def download_model(self, model_config: ModelConfig) -> None:
        """Download the checkpoint, unless the option ``checkpoint`` is set: then only an engine that loads needs it."""
        if self._options.checkpoint is None:
            self._plain(model_config).download_model(model_config)

    def load_model(self, *, model_config: ModelConfig, device_config: DeviceConfig) -> nn.Module:
        """Return the model on the tensors of its pool; publish the pool first if it does not exist."""

        def load() -> nn.Module:
            plain = self._plain(model_config)
            model: nn.Module = plain.load_model(model_config=model_config, device_config=device_config)
            return model

        def publish(broker: Broker, rank: RankPool, model: nn.Module) -> None:
            _check(model, self._made(model_config).eval())
            restored = [name for name, _ in model.named_buffers()] if get_server_args().enable_memory_saver else []
            terms = self._options.terms
            runtime_pools.publish(broker, rank.name, model, private=restored, device=rank.device, **terms)

        def attach(pool: Pool) -> nn.Module:
            model = runtime_pools.bind(self._made(model_config), pool, strict=False)
            runtime_pools.refuse_meta(model, pool)
            return model

        def finish(got: Obtained) -> None:
            if got.pool is not None and not got.loaded:
                self.preloaded_weights_bytes = got.pool.nbytes  # allocated before this engine measured free memory

        return engine_loader.load_on_pool(
            self._options,
            log,
            identify=partial(self._rank_pool, model_config, torch.device(device_config.device)),
            load=load,
            publish=publish,
            attach=attach,
            finish=finish,
        )

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

    def _rank_pool(self, model_config: ModelConfig, target: torch.device, broker: Broker) -> RankPool:
        device, uuid = engine_loader.place(broker, target, get_parallel().tp_rank)
        path = str(model_config.model_path)
        return RankPool(self._options.pool_name(path, self._facts(model_config), uuid), device, target, path)

    def _facts(self, model_config: ModelConfig) -> dict[str, object]:
        """Return the facts that the tensors of this rank depend on."""
        parallel, arguments = get_parallel(), get_server_args()
        capability = current_platform.get_device_capability() if current_platform.is_cuda_alike() else None
        return {
            "format": runtime_pools.FORMAT,
            "engine": ["sglang", sglang.__version__, torch.__version__],
            "checkpoint": self._options.digest(
                model_config.model_path,
                model_config.revision,
                self.load_config.download_dir,
                lambda: self._plain(model_config).download_model(model_config),
            ),
            "config": engine_loader.configuration(model_config.hf_config),
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


CubrokerModelLoader = SglangLoader
"""The old name of :class:`SglangLoader`; the next version removes it."""


def _check(model: nn.Module, fresh: nn.Module) -> None:
    """Raise ``Unsupported`` if a new model with the same tensors could differ from the loaded one."""
    new = dict(fresh.named_modules())
    for name, module in model.named_modules():
        label, method = name or "the model", type(getattr(module, "quant_method", None)).__name__
        if method not in (*PLAIN, "NoneType"):
            raise Unsupported(
                f"{label} is computed by {method}, and it is not known which attributes other than tensors this method"
                f" sets; use another load format"
            )
        before, now = _scalars(new.get(name)), _scalars(module)
        if changed := sorted(key for key in now.keys() | before.keys() if now.get(key) != before.get(key)):
            raise Unsupported(
                f"{label} has set {', '.join(changed)} while it was loaded, and a pool holds only tensors; use another"
                f" load format"
            )


def _scalars(module: nn.Module | None) -> dict[str, object]:
    kinds = bool | int | float | str | None
    return {key: value for key, value in vars(module).items() if isinstance(value, kinds)} if module else {}


# -- what SGLang calls -----------------------------------------------------------------------------------


def register() -> None:
    """Register cubroker with SGLang: the entry point of ``sglang.srt.plugins``, called in every process."""
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
        config.load_format = SglangLoader
    verify(config)


def _updated_from_disk(
    update: Callable[..., tuple[bool, str]], updater: Any, model_path: str, *rest: Any, **options: Any
) -> tuple[bool, str]:
    """Map another version of the pool for the model, at the same addresses, between two steps of the engine."""
    held = find_held(updater.get_model())
    if held is None:
        return update(updater, model_path, *rest, **options)
    ours = held.rank.path
    path, mark, version = model_path.removeprefix(ours).partition("@")
    if not model_path.startswith(ours) or path or (mark and not version.isdecimal()):
        return False, (
            f"the weights of {ours} are those of pool {held.pool.name}, which is read-only: publish another version of"
            f" it, and update from {ours}, or from {ours}@VERSION"
        )
    try:
        number = runtime_pools.switch(held.broker, updater.get_model(), held.pool, int(version) if version else None)
    except CubrokerError as error:
        return False, error.message
    return True, f"The model has {held.pool.name}@{number}."


def _unless_shared(update: Callable[..., Any], updater: Any, *rest: Any, **options: Any) -> Any:
    held = find_held(updater.get_model())
    if held is None:
        return update(updater, *rest, **options)
    return False, (
        f"the weights of this model are those of pool {held.pool.name}, which is read-only: publish another version of"
        f" it, and update from disk, from {held.rank.path}"
    )
