"""Models of the transformers library on the weights of a pool, without a copy."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any, NamedTuple, TypeVar

from cubroker.client.broker import Broker
from cubroker.client.devices import DeviceId
from cubroker.client.pool import Pool
from cubroker.integrations.runtime_manifest import some
from cubroker.protocol.errors import Invalid, NotFound

try:
    import torch
    from torch import nn

    from cubroker.integrations import runtime_pools
    from cubroker.integrations.torch import state_dict
except ImportError as error:
    raise ImportError(
        f"cubroker.integrations.transformers needs PyTorch ({error}): pip install 'cubroker[torch]'"
    ) from error

Model = TypeVar("Model", bound=nn.Module)

FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The types that a model can be made in, which for torch are those that can be its default."""

GENERATION = "generation_config.json"
"""The file with a generation config."""

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt", "vocab.json")
"""Files one of which every tokenizer has."""


class Pretrained(NamedTuple):
    """What :func:`from_pool` returns."""

    #: In evaluation mode, with the generation config of its folder; it keeps the memory mapped while it lives.
    model: Any
    #: None if the configuration's folder has none.
    tokenizer: Any


def from_pool(
    name: str,
    config: Any,
    *,
    auto: Any = None,
    broker: Broker | None = None,
    version: int | None = None,
    device: DeviceId | None = None,
    wait: float = 0.0,
    strict: bool = True,
    trust_remote_code: bool = False,
) -> Pretrained:
    """Return a model on the weights of a pool, and its tokenizer: ``AutoModel.from_pretrained`` without weight files.

    ::

        model, tokenizer = from_pool("llama", "/models/llama", device=0)

    It reads the configuration, the generation config and the tokenizer from the folder. It neither reads nor copies the
    weights: the pool was loaded by ``cubroker load``, published from a model, or is a runtime pool. If none of the
    weights has the dtype that the configuration names, the model is made in that of the weights, as by
    ``from_pretrained(..., dtype=...)``: buffers that are computed, and ``model.config.dtype``, have it too.

    Args:
        name: the pool.
        config: a folder or the name of a model of the hub, as for ``from_pretrained``; or a configuration: then the
            generation config and the tokenizer are read from the folder that it came from, if any.
        auto: the class that makes the model from its configuration, such as ``AutoModelForCausalLM``; by default the
            first of the architectures that the configuration names.
        broker: the session; by default a new one, opened by ``Broker()``.
        version: as for :meth:`Broker.attach`.
        device: as for :meth:`Broker.attach`.
        wait: as for :meth:`Broker.attach`.
        strict: as for :func:`attach_model`.
        trust_remote_code: as for ``from_pretrained``: whether code of the model's authors may run.

    Raises:
        NotFound: there is no such configuration; or as :meth:`Broker.attach`.
        Invalid: the configuration names no architecture of this release of transformers, and ``auto`` is not given; the
            generation config or the tokenizer exists and cannot be read; or as :func:`attach_model`.
        CubrokerError: as :meth:`Broker.attach`.
    """
    config, source = _configuration(config, trust_remote_code=trust_remote_code)
    with ExitStack() as stack:
        broker = broker or stack.enter_context(Broker())
        pool = stack.enter_context(broker.attach(name, version=version, device=device, wait=wait))
        with torch.device("meta"):
            model = _made(_in_dtype_of(pool, config), auto, trust_remote_code=trust_remote_code)
        if runtime_pools.MANIFEST in pool:
            runtime_pools.bind(model, pool, strict=strict).requires_grad_(False).eval()
        else:
            attach_model(model, pool, strict=strict)
    return Pretrained(_with_generation(model, source), _tokenizer(source, trust_remote_code=trust_remote_code))


def _configuration(config: Any, *, trust_remote_code: bool) -> tuple[Any, str]:
    """Return the configuration that was named or given, and its folder or name."""
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(config, PretrainedConfig):
        return config, config._name_or_path
    if not isinstance(config, str | os.PathLike):
        raise Invalid(f"the configuration of a model is a folder, a name or a PretrainedConfig, not {config!r}")
    source = os.fspath(config)
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code), source
    except (OSError, ValueError) as error:
        raise NotFound(f"no configuration of a model in {source!r}: {error}") from error


def _in_dtype_of(pool: Pool, config: Any) -> Any:
    """Return a configuration with the dtype of the weights; the given one, unless its dtype is none of theirs.

    As in ``from_pretrained`` for a checkpoint whose configuration names none, the first floating dtype counts.
    """
    stored = [FLOATS[spec.dtype] for spec in pool.layout.tensors if spec.dtype in FLOATS]
    key = "dtype" if hasattr(config, "dtype") else "torch_dtype"  # before transformers 4.56
    named = getattr(config, key)
    if not stored or named in stored or named in [str(dtype).removeprefix("torch.") for dtype in set(stored)]:
        return config
    config = deepcopy(config)  # it may be the caller's
    setattr(config, key, stored[0])
    return config


def _made(config: Any, auto: Any, *, trust_remote_code: bool) -> Any:
    """Make a model from a configuration, with the dtype of that, which computed buffers need as well as parameters.

    ``_from_config`` is what ``from_config`` of the auto classes calls. A class alone makes models of torch's default
    dtype.
    """
    import transformers

    if auto is not None:
        options = {"trust_remote_code": trust_remote_code} if hasattr(auto, "_model_mapping") else {}
        make = getattr(auto, "from_config", None) or getattr(auto, "_from_config", auto)
        return make(config, **options)
    names = config.architectures or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        raise Invalid(
            f"the configuration names {_some(names)} as architecture, and transformers {transformers.__version__} has"
            f" no such class; say with `auto` what makes the model, such as auto=AutoModelForCausalLM"
        )
    return kind._from_config(config)


def _with_generation(model: Any, source: str) -> Any:
    """Set the generation config of the configuration's folder, if it has one, on a model that can generate."""
    from transformers import GenerationConfig

    if getattr(model, "can_generate", lambda: False)() and _has(source, GENERATION):
        with _read("generation config", source):
            model.generation_config = GenerationConfig.from_pretrained(source)
    return model


def _tokenizer(source: str, *, trust_remote_code: bool) -> Any:
    """Return the tokenizer in the configuration's folder; None if it has none."""
    from transformers import AutoTokenizer

    if not _has(source, *TOKENIZERS):
        return None
    with _read("tokenizer", source):
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)


def _has(source: str, *files: str) -> bool:
    """Whether a folder, or a model of the hub, has one of these files; False if the folder or model is gone."""
    from transformers.utils import has_file

    try:
        return bool(source) and any(has_file(source, file) for file in files)
    except (OSError, ValueError):  # there is no such folder, or no such model
        return False


@contextmanager
def _read(what: str, source: str) -> Iterator[None]:
    """Raise ``Invalid``, with what was read, in place of what libraries raise as they read an existing file."""
    try:
        yield
    except Exception as error:  # the tokenizers library raises just that
        raise Invalid(f"the {what} of {source!r} cannot be read: {' '.join(str(error).split())}") from error


def attach_model(model: Model, pool: Pool, *, strict: bool = True) -> Model:
    """Give a model that was made on the meta device the weights of ``pool``, without copying them.

    ::

        with torch.device("meta"):
            model = AutoModel.from_config(AutoConfig.from_pretrained(folder))
        attach_model(model, pool)

    The pool may have names that transformers, since release 5, renames when it loads a checkpoint. Parameters have the
    pool's dtypes, not the model's. Parameters that the model ties to each other stay tied, unless the pool has
    different values for them, or the same in two dtypes or on two devices. Buffers that checkpoints lack (rotary
    frequencies, position ids) are computed by the model's own ``_init_weights``, as ``from_pretrained`` does it; so are
    parameters that the model neither trains nor expects in checkpoints (the positions of ``MarianMTModel``). Afterwards
    the model is in evaluation mode and no parameter requires a gradient: shared weights are not trained.

    Args:
        model: a model made under ``torch.device("meta")``; it is changed in place, also if this fails.
        pool: its weights. The model keeps the memory mapped while it lives.
        strict: whether a name that only the model or only the pool has is an error. Otherwise the pool's other names
            are left out, and tensors that the pool lacks must have been given a value before.

    Returns:
        ``model``, for convenience.

    Raises:
        Invalid: names or shapes of model and pool do not match, or a tensor would stay without data.
    """
    state = _renamed(model, pool)
    twins = _complete_twins(model, state)
    _compute_absent(model, state, next(iter(state.values())).device if state else torch.device("cpu"))
    model.requires_grad_(False)
    try:
        missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    except RuntimeError as error:
        raise Invalid(
            f"pool {pool.name!r} does not fit {type(model).__name__}: {' '.join(str(error).split())}"
        ) from error
    _tie(model, twins)
    if strict:
        _refuse_differences(model, pool, missing, unexpected)
    if left := runtime_pools.on_meta(model):
        raise Invalid(
            f"{_some(left)} of {type(model).__name__} would stay on the meta device: pool {pool.name!r} lacks them and"
            f" the model's _init_weights does not compute them; give them values before attaching"
        )
    return model.eval()


def _renamed(model: nn.Module, pool: Pool) -> dict[str, torch.Tensor]:
    """Return the tensors of a pool by the names that ``model`` has for them.

    Many checkpoints are older than their model's class and have other names. Transformers renames their tensors as it
    loads them, since release 5 by rules that can be asked for. It also has rules that compute other tensors, such as
    one of all experts; these are not applied, since that would be a copy.
    """
    state, names = state_dict(pool), model.state_dict()
    if state.keys() <= names.keys():
        return state
    prefix = getattr(model, "base_model_prefix", "")
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:
        return _prefixed(prefix, names, state)
    if not isinstance(model, PreTrainedModel):
        return _prefixed(prefix, names, state)
    rules = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    found: dict[str, str] = {}
    for name in sorted(state):  # some rules apply only after a name that sorts before theirs
        renamed, _ = rename_source_key(name, rules, [], prefix or None, names)
        if renamed not in names:  # the rules are for older names
            renamed, _ = rename_source_key(name, [], [], prefix or None, names)
        first = found.setdefault(renamed, name)
        if not _same(state[first], state[name]):
            raise Invalid(
                f"pool {pool.name!r} has two tensors for {renamed!r} of {type(model).__name__}: {first!r} and {name!r},"
                f" which differ; publish the loaded model's state_dict instead"
            )
    return {renamed: state[name] for renamed, name in found.items()}


def _prefixed(prefix: str, names: Collection[str], state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name the tensors as a model does: the pool may be a base model's and the model have a head, or the reverse."""
    prefix = f"{prefix}."
    has, wants = (any(name.startswith(prefix) for name in side) for side in (state, names))
    if has == wants:
        return state
    renamed = {name: prefix + name if wants else name.removeprefix(prefix) for name in state}
    return {renamed[name] if renamed[name] in names else name: tensor for name, tensor in state.items()}


def _complete_twins(model: nn.Module, state: dict[str, torch.Tensor]) -> list[list[str]]:
    """Return the groups of names that share one parameter; if ``state`` has one name of a group, add the others."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    twins = []
    for names in groups.values():
        stored = [state[name] for name in names if name in state]
        if len(names) > 1 and stored and all(_same(stored[0], other) for other in stored[1:]):
            state.update(dict.fromkeys(names, stored[0]))
            twins.append(names)
    return twins


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one may replace the other; torch cannot compare tensors on two devices, as in a sharded pool."""
    if (one.device, one.dtype, one.shape) != (other.device, other.dtype, other.shape):
        return False
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)


def _tie(model: nn.Module, twins: list[list[str]]) -> None:
    for first, *others in twins:
        parameter = model.get_parameter(first)
        for name in others:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, parameter)


def _compute_absent(model: nn.Module, state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Compute the buffers that no checkpoint has, and the parameters that ``state`` lacks and the model does not train.

    The latter only if the model says that checkpoints may lack them. ``_init_weights`` initialises other parameters
    too. This runs while they are on the meta device, so that it cannot reach the shared bytes. It computes on the CPU,
    as ``from_pretrained`` does, and copies the result in.
    """
    untrained = {name for name, each in model.named_parameters() if not each.requires_grad and name not in state}
    needed = set(_without(sorted(untrained), getattr(model, "_keys_to_ignore_on_load_missing", None)))
    fixed = {id(model.get_parameter(name)) for name in untrained - needed}
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        for owner, module in _owned(model, None):
            constants = [(name, each) for name, each in module.named_parameters(recurse=False) if id(each) in fixed]
            lost = {name: each for name, each in (*_non_persistent(module), *constants) if each.is_meta}
            if not lost:
                continue
            made = {name: _empty_like(each, device) for name, each in lost.items()}
            _set(module, made)
            owner._init_weights(module)
            # One that was neither written to nor replaced has no value: back to meta, to be reported.
            left = [name for name, each in made.items() if getattr(module, name) is each and each._version == 0]
            _set(module, {name: lost[name] for name in left})


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_like(tensor, device=device)
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


def _set(module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        setattr(module, name, tensor)


def _owned(module: nn.Module, owner: Any) -> Iterator[tuple[Any, nn.Module]]:
    """Yield every module below a pretrained model, with the innermost such model that it belongs to."""
    owner = module if hasattr(module, "_init_weights") else owner
    if owner is not None:
        yield owner, module
    for child in module.children():
        yield from _owned(child, owner)


def _non_persistent(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name in module._non_persistent_buffers_set:
        buffer = module._buffers[name]
        if buffer is not None:
            yield name, buffer


def _refuse_differences(model: nn.Module, pool: Pool, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Raise ``Invalid`` for names that one side lacks, except those that the model declares irrelevant."""
    # Older versions of a library stored buffers that are computed today, some of them once per layer.
    computed = {
        ".".join(f"{path}.{name}".lstrip(".").split(".")[-2:])
        for path, module in model.named_modules()
        for name, _ in _non_persistent(module)
    }
    missing = _without(missing, getattr(model, "_keys_to_ignore_on_load_missing", None))
    unexpected = _without(unexpected, getattr(model, "_keys_to_ignore_on_load_unexpected", None))
    unexpected = [name for name in unexpected if ".".join(name.split(".")[-2:]) not in computed]
    if missing or unexpected:
        raise Invalid(
            f"pool {pool.name!r} does not fit {type(model).__name__} (missing in the pool: {_some(missing)}; only in"
            f" the pool: {_some(unexpected)}); attach the pool of this model (of a checkpoint that transformers"
            f" converts when it loads it, publish the loaded model's state_dict), or give strict=False"
        )


def _without(names: Sequence[str], patterns: Sequence[str] | None) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]


def _some(names: Sequence[str]) -> str:
    return some([repr(name) for name in names])
