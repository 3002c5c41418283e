"""The loader that gives vLLM its weights from runtime pools: ``--load-format cubroker``.

:mod:`cubroker.integrations.engine_loader` describes it, and the options in ``--model-loader-extra-config``. The code
tests whether vLLM has an attribute, and does not compare release numbers.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from cubroker.client.broker import Broker
from cubroker.client.pool import Pool
from cubroker.integrations import fingerprint
from cubroker.protocol.errors import CubrokerError, Invalid, Unsupported

try:
    import torch
    import vllm
    import vllm.envs
    from torch import nn
    from vllm.config import CompilationMode, ModelConfig, VllmConfig
    from vllm.config.load import LoadConfig
    from vllm.distributed import get_dp_group, get_pp_group, get_tp_group
    from vllm.model_executor import utils as model_utils
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    from cubroker.integrations import engine_loader, runtime_pools, vllm_live
    from cubroker.integrations.engine_loader import LOAD_FORMAT, PLAIN, Obtained, PoolOptions, RankPool, held
    from cubroker.integrations.torch import state_dict
    from cubroker.integrations.vllm_live import switch
except ImportError as error:
    raise ImportError(f"cubroker.integrations.vllm needs vLLM ({error}): pip install 'cubroker[vllm]'") from error

log = logging.getLogger("vllm.cubroker")  # below vLLM's own logger, which has handlers

__all__ = ["PoolCheckpointLoader", "VllmLoader", "held", "preload", "register", "switch"]

NEUTRAL = (
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "LOCAL_RANK",
    "NO_COLOR",
    "VLLM_API_",
    "VLLM_CACHE_ROOT",
    "VLLM_CONFIG_ROOT",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_DEBUG_",
    "VLLM_DO_NOT_TRACK",
    "VLLM_DP_MASTER_",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_HOST_IP",
    "VLLM_LOGGING_",
    "VLLM_LOG_",
    "VLLM_NO_USAGE_STATS",
    "VLLM_OBJECT_STORAGE_",
    "VLLM_PORT",
    "VLLM_RPC_",
    "VLLM_USAGE_",
    "VLLM_WORKER_MULTIPROC_METHOD",
)
"""Prefixes of variables of vLLM that no tensor depends on, in addition to those that its keys of compiled code omit.

All others that vLLM lists are part of the fingerprint. Variables that it does not list, such as those by which its
processes find each other, are not."""

PACKED = "PREPACK"
"""A part of the names of variables that control the packing of weights; keys of compiled code omit those."""

PROCESSED: Any = getattr(model_utils, "weights_already_processed", None)
"""vLLM's context in which post-processing leaves tensors alone; None if this vLLM has none."""

ATTRIBUTES = ("has_own_embed_tokens", "has_own_lm_head")
"""Attributes that vLLM sets on a draft model as it loads: which embeddings are the draft model's own."""

PREFIX = "vllm"
"""How names of pools begin by default."""


class VllmLoader(BaseModelLoader):  # type: ignore[misc]
    """vLLM's loader of runtime pools."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._options = PoolOptions.read(load_config.model_loader_extra_config, PREFIX)

    # -- what vLLM calls ---------------------------------------------------------------------------

    def download_model(self, model_config: ModelConfig) -> None:
        """Download the checkpoint, unless the option ``checkpoint`` is set: then only an engine that loads needs it."""
        if self._options.checkpoint is None:
            self._plain().download_model(model_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Refuse: weights in a pool are changed by publishing another version."""
        raise NotImplementedError("weights of a pool are read-only; publish a new version, and switch to it")

    def get_external_weight_memory(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of the pool, which this process does not own; 0 if the pool does not exist yet."""
        try:
            with Broker(self._options.directory) as broker:
                return broker.describe(self._rank_pool(vllm_config, vllm_config.model_config, broker).name)[0].nbytes
        except CubrokerError:
            return 0

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        """Return the model on the tensors of its pool; publish the pool first if it does not exist."""
        target = self._target(vllm_config)
        if target.type == "cpu":
            _compute_on_the_weights_themselves()

        def load() -> nn.Module:
            plain: nn.Module = self._plain().load_model(vllm_config, model_config, prefix=prefix)
            return plain

        def publish(broker: Broker, rank: RankPool, model: nn.Module) -> None:
            _check_quantization(model)
            with runtime_pools.writes(model) as written:
                _finish(model, model_config, target)
            runtime_pools.publish(
                broker,
                rank.name,
                model,
                written=written,
                private=[name for name, _ in model.named_buffers()] if _sleeps(model_config) else [],
                attributes={name: bool(getattr(model, name)) for name in ATTRIBUTES if hasattr(model, name)},
                device=rank.device,
                **self._options.terms,
            )

        def attach(pool: Pool) -> nn.Module:
            with set_default_torch_dtype(model_config.dtype):
                with torch.device("meta"):
                    model: nn.Module = initialize_model(
                        vllm_config=vllm_config, model_config=model_config, prefix=prefix
                    )
                _check_quantization(model)
                runtime_pools.bind(model, pool, strict=False, accepts=ATTRIBUTES)
                _finish(model, model_config, target)
            runtime_pools.refuse_meta(model, pool)
            return model

        def finish(got: Obtained) -> None:
            if got.loaded:
                _finish(got.model, model_config, target)  # its earlier results refer to the tensors that were replaced
            if _sleeps(model_config):
                vllm_live.sleep_by_pools(model_config)

        def load_from(source: Pool) -> nn.Module:
            loader = PoolCheckpointLoader(self.load_config, source)
            made: nn.Module = loader.load_model(_apart(vllm_config), model_config, prefix)
            return made

        return engine_loader.load_on_pool(
            self._options,
            log,
            identify=partial(self._rank_pool, vllm_config, model_config),
            load=load,
            publish=publish,
            attach=attach,
            finish=finish,
            load_from=load_from,
            accepts=ATTRIBUTES,
        )

    # -- how ---------------------------------------------------------------------------------------

    def _plain(self) -> DefaultModelLoader:
        plain = dataclasses.replace(self.load_config, load_format="auto", model_loader_extra_config={})
        return DefaultModelLoader(plain)

    def _target(self, vllm_config: VllmConfig) -> torch.device:
        return torch.device(self.load_config.device or vllm_config.device_config.device)

    def _rank_pool(self, vllm_config: VllmConfig, model_config: ModelConfig, broker: Broker) -> RankPool:
        target, path = self._target(vllm_config), str(model_config.model)
        device, uuid = engine_loader.place(broker, target, get_tp_group().rank)
        return RankPool(
            self._options.pool_name(path, self._facts(vllm_config, model_config), uuid), device, target, path
        )

    def _facts(self, vllm_config: VllmConfig, model_config: ModelConfig) -> dict[str, object]:
        """Return the facts that the tensors of this rank depend on."""
        parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
        groups = {"tp": get_tp_group(), "pp": get_pp_group(), "dp": get_dp_group()}
        capability = current_platform.get_device_capability() if current_platform.is_cuda_alike() else None
        parts = ("kernel_config", "attention_config", "lora_config", "offload_config")
        configs: dict[str, Any] = {key: getattr(vllm_config, key, None) for key in parts}
        kernels = {key: part.compute_hash() for key, part in configs.items() if hasattr(part, "compute_hash")}
        return {
            "format": runtime_pools.FORMAT,
            "engine": ["vllm", vllm.__version__, torch.__version__],
            "checkpoint": self._options.digest(
                model_config.model,
                model_config.revision,
                self.load_config.download_dir,
                lambda: self._plain().download_model(model_config),
            ),
            "config": engine_loader.configuration(model_config.hf_config),
            "dtype": str(model_config.dtype),
            "quantization": model_config.quantization,
            "quantization_config": getattr(model_config, "quantization_config", None),
            "groups": {name: [group.rank_in_group, group.world_size] for name, group in groups.items()},
            "experts": [parallel.enable_expert_parallel, getattr(parallel, "enable_eplb", False)],
            "draft": speculative is not None and model_config is speculative.draft_model_config,
            "sleep": _sleeps(model_config),
            "platform": [current_platform.device_type, list(capability) if capability else None],
            "kernels": kernels,
            "variables": _variables(),
        }


CubrokerModelLoader = VllmLoader
"""The old name of :class:`VllmLoader`; the next version removes it."""


def _variables() -> dict[str, str]:
    """Return the variables of the environment that tensors may depend on."""
    known = vllm.envs.environment_variables
    told = known if (factors := getattr(vllm.envs, "compile_factors", None)) is None else factors()
    counts = [key for key in known if key in told or PACKED in key]
    return {key: os.environ[key] for key in sorted(counts) if key in os.environ and not key.startswith(NEUTRAL)}


class PoolCheckpointLoader(BaseModelLoader):  # type: ignore[misc]
    """Loads a model from a pool with the checkpoint's own tensors, as vLLM loads it from files."""

    def __init__(self, load_config: LoadConfig, source: Pool) -> None:
        super().__init__(load_config)
        self._source = source

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing: the tensors are in memory."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load the model's weights from the pool.

        Raises:
            Invalid: the pool lacks parameters of the model.
        """
        take: Any = model.load_weights
        loaded = take(state_dict(self._source).items())
        if loaded is not None and model_config.quantization is None:
            lacking = [name for name, _ in model.named_parameters() if name not in loaded]
            if lacking:
                raise Invalid(
                    f"pool {self._source.name!r}@{self._source.version} is no checkpoint of {type(model).__name__}: it"
                    f" has nothing for {lacking[0]!r} and {len(lacking) - 1} more; publish all tensors by the names"
                    f" that the checkpoint's files have"
                )


def _apart(vllm_config: VllmConfig) -> VllmConfig:
    """Return a configuration whose models are not registered with engine or compiler, which would keep them alive."""
    compilation = copy.copy(vllm_config.compilation_config)
    compilation.mode = CompilationMode.NONE
    compilation.static_forward_context = {}
    if hasattr(compilation, "static_all_moe_layers"):
        compilation.static_all_moe_layers = []
    apart = copy.copy(vllm_config)
    apart.compilation_config = compilation
    return apart


def register() -> None:
    """Register cubroker with vLLM: the entry point of ``vllm.general_plugins``, called in every process.

    It registers a load format and, if this vLLM has them, backends of weight transfer and of sleep mode.
    """
    from vllm.model_executor.model_loader import register_model_loader

    register_model_loader(LOAD_FORMAT)(VllmLoader)
    vllm_live.register()


def preload(model: str, arguments: Sequence[str] = (), directory: Path | None = None) -> str:
    """Start an engine, which publishes its pools unless they exist, and end it; returns the prefix of the pools' names.

    Args:
        model: a folder, or a name of the hub.
        arguments: the arguments of ``vllm serve`` with which other engines will attach.
        directory: where the broker listens, if the arguments do not say so.

    Raises:
        CubrokerError: the broker or the pool cannot be used.
        SystemExit: vLLM does not know an argument.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    register()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(["--model", model, *arguments, "--load-format", LOAD_FORMAT])
    options = EngineArgs.from_cli_args(parsed)
    extra = dict(options.model_loader_extra_config or {})
    if directory is not None:
        extra.setdefault("directory", str(directory))
    options.model_loader_extra_config = extra
    engine = LLMEngine.from_engine_args(options)
    engine.engine_core.shutdown()
    return fingerprint.label(str(extra.get("pool", PREFIX)), model)


def _finish(model: nn.Module, model_config: ModelConfig, target: torch.device) -> None:
    """Have post-processing make everything except tensors, from tensors that it has processed before."""
    processed: AbstractContextManager[object] = nullcontext() if PROCESSED is None else PROCESSED()
    with processed:
        process_weights_after_loading(model, model_config, target)


def _check_quantization(model: nn.Module) -> None:
    """Raise ``Unsupported`` for quantization methods that would process processed weights again."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        kind = type(method).__name__
        takes = getattr(method, "supports_pre_processed_weights", kind in PLAIN)
        if method is not None and not takes:
            raise Unsupported(
                f"{name or 'the model'} is computed by {kind}, and this vLLM ({vllm.__version__}) cannot take weights"
                f" that it has processed; use another load format, or a vLLM where this method can"
            )


def _sleeps(model_config: ModelConfig) -> bool:
    """Whether the engine may sleep: on level 2, vLLM saves all buffers, and writes them when it wakes."""
    return bool(getattr(model_config, "enable_sleep_mode", False))


def _compute_on_the_weights_themselves() -> None:
    """Turn off oneDNN, with which vLLM packs weights on a CPU into other memory; without it vLLM uses them in place."""
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False
