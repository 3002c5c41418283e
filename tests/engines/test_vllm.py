"""Real vLLM engines on runtime pools, on emulated devices.

They run under ``$CUBROKER_VLLM_PYTHON``, by default the interpreter of the tests, and are skipped where that has no
vLLM. An engine takes seconds, and the import of vLLM up to a minute, so one process imports it for all engines.
``$CUBROKER_ENGINES`` says how many start at once, where several do: 3 by default. ``$CUBROKER_ENGINE_DEVICES`` may be
``cuda:0``: the engines then run on that GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import cubroker
from cubroker.client import Broker
from cubroker.integrations.fingerprint import checkpoint
from tests.brokers import BrokerProcess, eventually, serving, started
from tests.engines import interpreters

if TYPE_CHECKING:
    import transformers

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("CUBROKER_VLLM_PYTHON", sys.executable)
AT_ONCE = int(os.environ.get("CUBROKER_ENGINES", "3"))

DEVICES = os.environ.get("CUBROKER_ENGINE_DEVICES", "host:2@512MiB")
ON_GPU = DEVICES.startswith("cuda")
SMALL = DEVICES if ON_GPU else "host:1@64MiB"

VLLM = interpreters.package(PYTHON, "vllm")
pytestmark = [
    pytest.mark.skipif(VLLM is None, reason="there is no vLLM"),
    pytest.mark.timeout(1800),
]


def has(module: str, name: str) -> bool:
    """Whether a module of this vLLM has a name, by its source: to import vLLM takes up to a minute."""
    if VLLM is None:
        return False
    file = VLLM.joinpath(*module.split(".")).with_suffix(".py")
    return file.exists() and name in file.read_text()


SLEEPS = has("device_allocator.sleep_mode_backend", "SleepModeBackendFactory")
PROCESSED = has("model_executor.utils", "weights_already_processed")
UNPROCESSED = pytest.mark.skipif(PROCESSED, reason="this vLLM can")
ALONE = pytest.mark.skipif(ON_GPU, reason="it takes two GPUs, and runs on one")

Said = dict[str, Any]


class Engines:
    """Starts engines, those of one job at once, and jobs one after the other."""

    def __init__(self, folder: Path) -> None:
        with (ROOT / "pyproject.toml").open("rb") as file:
            plugins = tomllib.load(file)["project"]["entry-points"]["vllm.general_plugins"]
        metadata = folder / "cubroker-0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cubroker\nVersion: 0\n")
        lines = [f"{name} = {value}\n" for name, value in plugins.items()]
        (metadata / "entry_points.txt").write_text("".join(["[vllm.general_plugins]\n", *lines]))
        path = os.pathsep.join(map(str, (folder, Path(cubroker.__file__).parents[1], ROOT)))
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            [PYTHON, "-m", "tests.engines.engine_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": ""},
        )

    def ask(self, model: Path, format: str = "cubroker", **job: Any) -> None:
        """Start the engines of a job."""
        assert self._process.stdin is not None
        print(json.dumps({"model": str(model), "format": format, **job}), file=self._process.stdin, flush=True)

    def answer(self) -> Said:
        """Return what came of one engine."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(self.log())
        reply: Said = json.loads(line)
        return reply

    def log(self) -> str:
        """What the engines wrote, which is long."""
        self._log.seek(0)
        return self._log.read()

    def run(self, model: Path, format: str = "cubroker", **job: Any) -> Said:
        """Start one engine, and return what came of it."""
        self.ask(model, format, **job)
        return self.answer()

    def close(self) -> None:
        """Wait for the last engine."""
        self._process.communicate("")
        self._log.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("engines"))
    yield engines
    engines.close()


@pytest.fixture(scope="module")
def lender() -> Iterator[BrokerProcess]:
    with serving(DEVICES) as process:
        yield process


SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,
}


def llama(**terms: Any) -> transformers.PreTrainedModel:
    import transformers  # not when tests are collected that are skipped: it takes a second

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, **terms))


def tied() -> transformers.PreTrainedModel:
    return llama(tie_word_embeddings=True)


def mixture() -> transformers.PreTrainedModel:
    import transformers

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SHAPE, **experts))


def made(folder: Path, seed: int, kind: Callable[[], transformers.PreTrainedModel] = llama) -> Path:
    torch.manual_seed(seed)
    kind().to(torch.bfloat16).save_pretrained(folder)
    return folder


def hollowed(model: Path, folder: Path) -> Path:
    """A copy whose weights are a header and zeros."""
    shutil.copytree(model, folder)
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    header = data[: 8 + int.from_bytes(data[:8], "little")]
    weights.write_bytes(header + bytes(len(data) - len(header)))
    return folder


def quantized(
    model: Path, config: dict[str, Any], pack: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
) -> Path:
    """Replace the weights of all linear layers but the last by what ``pack`` makes of them."""
    state = load_file(model / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        packed |= pack(name.removesuffix("weight"), tensor) if "proj" in name else {name: tensor}
    save_file(packed, model / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**described, "quantization_config": config}))
    return model


def fp8(model: Path) -> Path:
    def pack(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, columns = (size // 128 for size in tensor.shape)
        blocks = tensor.float().view(rows, 128, columns, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        whole = (blocks / scale[:, None, :, None]).view(tensor.shape).to(torch.float8_e4m3fn)
        return {name + "weight": whole, name + "weight_scale_inv": scale}

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return quantized(model, config, pack)


def awq(model: Path) -> Path:
    def pack(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, columns = tensor.shape  # a random integer is eight weights
        whole, zeros = (
            torch.randint(-(1 << 31), 1 << 31, (size, rows // 8)).int() for size in (columns, columns // 64)
        )
        return {
            name + "qweight": whole,
            name + "qzeros": zeros,
            name + "scales": torch.rand(columns // 64, rows).half(),
        }

    return quantized(
        model, {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}, pack
    )


def adapter(folder: Path) -> Path:
    """A LoRA adapter of the queries and values."""
    folder.mkdir(parents=True)
    tensors = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for part, size in (("q_proj", 256), ("v_proj", 128)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(8, 256).bfloat16() / 16
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(size, 8).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    terms = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(terms))
    return folder


def names(lender: BrokerProcess) -> list[tuple[str, int]]:
    with Broker(lender.directory) as broker:
        return sorted((pool.name, pool.version) for pool in broker.pools() if pool.state == "current")


def test_engines_on_a_pool_say_what_a_plain_engine_says_and_read_no_weights(
    engines: Engines, lender: BrokerProcess, tmp_path: Path
) -> None:
    """The second engine's checkpoint has no weights; then the running engine goes to a second version."""
    model = made(tmp_path / "model", 0)
    hollow = hollowed(model, tmp_path / "hollow" / "model")
    extra = {"directory": str(lender.directory), "checkpoint": checkpoint(model)}
    looked = ["said", "placed", "tensors"]
    plain = engines.run(model, "auto", do=looked)
    first = engines.run(model, extra=extra, do=looked)
    ((pool, version),) = names(lender)
    assert version == 1
    second = engines.run(hollow, extra=extra, do=[*looked, "accounted", "published", "still", "switched", "after"])
    assert "error" not in {**plain, **first, **second}, second
    assert first["said"] == plain["said"]
    assert second["said"] == plain["said"]
    (there,) = plain["placed"]
    for engine in (first, second):
        assert engine["placed"] == [{"inside": there["total"], "writable": 0, "total": there["total"]}]
        assert list(engine["tensors"]) == list(plain["tensors"])
        for name, facts in engine["tensors"].items():  # a compiler tells none of them from the plain engine's
            assert {**facts, "aligned": 0} == {**plain["tensors"][name], "aligned": 0}, name
    told, size = second["accounted"]
    assert told == size >= there["total"]
    assert (second["published"], second["switched"]) == (2, [2])
    assert second["still"] == plain["said"]
    assert second["after"] != plain["said"]
    assert names(lender) == [(pool, 2)]
    assert engines.run(hollow, extra=extra)["said"] == second["after"]


def test_weights_that_a_trainer_publishes_reach_running_engines(
    engines: Engines, lender: BrokerProcess, tmp_path: Path
) -> None:
    """By vLLM's own weight transfer; the trainer has the checkpoint's tensors, and one engine of all converts them."""
    before, trained = made(tmp_path / "policy", 10), made(tmp_path / "trained", 11)
    extra = {"directory": str(lender.directory)}
    backend = {"weight_transfer_config": {"backend": "cubroker"}}
    known = {name for name, _ in names(lender)}
    with Broker(lender.directory) as broker:
        version = broker.publish("steps", load_file(trained / "model.safetensors"))
    update = {"pool": "steps", "version": version, "wait": 10.0}
    steps = ["said", "met", "transferred", "after"]
    engines.ask(before, extra=extra, engine=backend, copies=AT_ONCE, update=update, do=steps)
    found = [engines.answer() for _ in range(AT_ONCE)]
    wanted = [engines.run(model, "auto")["said"] for model in (before, trained)]
    assert [[engine.get("said"), engine.get("after")] for engine in found] == [wanted] * AT_ONCE, found
    assert [version for name, version in names(lender) if name not in known and name != "steps"] == [2]

    lacking = engines.run(before, extra=extra, engine=backend, update={"pool": "none"}, do=["said", "transferred"])
    assert "'none'" in lacking["error"]
    other = engines.run(before, "auto", engine=backend, update={"version": 1}, do=["transferred"])
    assert "has no pool; start the engine with --load-format cubroker" in other["error"]


def test_a_trainer_sends_its_weights_by_the_interface_of_vllm(
    engines: Engines, lender: BrokerProcess, tmp_path: Path
) -> None:
    before, trained = made(tmp_path / "policy", 10), made(tmp_path / "trained", 11)
    extra = {"directory": str(lender.directory)}
    backend = {"weight_transfer_config": {"backend": "cubroker"}}
    wanted = [engines.run(model, "auto")["said"] for model in (before, trained)]
    there_and_back = engines.run(
        trained, extra=extra, engine=backend, trained=str(before), do=["said", "trained", "after", "placed"]
    )
    assert [there_and_back.get("said"), there_and_back.get("after")] == wanted[::-1], there_and_back
    assert [each["inside"] == each["total"] for each in there_and_back["placed"]] == [True]
    assert "policy" not in {name for name, _ in names(lender)}, "its memory is the trainer's again"
    compiled = {**backend, "enforce_eager": False, "compilation_config": {"backend": "eager"}}
    steps = ["modules", "trained", "left"]
    kept = engines.run(trained, extra=extra, engine=compiled, trained=str(before), do=steps)
    assert kept.get("left", kept) == kept.get("modules"), "a model that was only loaded from stays"


@pytest.mark.skipif(not SLEEPS, reason="this vLLM has no backends of sleep mode")
def test_an_engine_sleeps_without_its_pool_and_wakes_where_it_was(
    engines: Engines, lender: BrokerProcess, tmp_path: Path
) -> None:
    model = made(tmp_path / "sleeper", 20)
    with serving(SMALL) as alone:
        extra = {"directory": str(alone.directory)}
        steps = ["said", "slept", "asleep", "resumed", "woken", "placed"]
        found = engines.run(model, extra=extra, do=steps)
        assert found.get("woken") == found.get("said", found)
        assert found["slept"] == [0]
        assert found["resumed"] == 1
        (awake,), (asleep,) = found["placed"], found["asleep"]
        assert (awake["inside"], asleep["inside"]) == (awake["total"], 0)
        steps = ["said", "published", "slept", "resumed", "after"]
        gone = engines.run(model, extra=extra, level=2, do=steps)
        assert gone.get("resumed", gone) == 2
        assert engines.run(model, extra=extra)["said"] == gone["after"] != gone["said"]


def test_a_model_that_was_preloaded_is_only_attached_to(
    engines: Engines, lender: BrokerProcess, tmp_path: Path
) -> None:
    model = made(tmp_path / "preloaded", 3)
    terms = ["--skip-tokenizer-init", "--max-model-len", "128", "--dtype", "bfloat16", "--enforce-eager"]
    extra = {"checkpoint": "third"}
    done = engines.run(
        model,
        preload=[
            *("--json", "--directory", str(lender.directory), *terms, "--max-num-seqs", "4"),
            *("--distributed-executor-backend", "uni", "--model-loader-extra-config", json.dumps(extra)),
        ],
    )
    assert done.get("status") == 0, done
    assert [pool["tensors"] > 20 for pool in json.loads(done["printed"])] == [True]
    before = names(lender)
    hollow = hollowed(model, tmp_path / "hollow" / "preloaded")
    attached = engines.run(hollow, extra={**extra, "directory": str(lender.directory)})
    assert attached["said"] == engines.run(model, "auto")["said"]
    assert names(lender) == before


def test_two_fine_tunes_never_meet_and_an_engine_without_a_broker_falls_back_only_if_told(
    engines: Engines, lender: BrokerProcess, tmp_path: Path
) -> None:
    one, other = made(tmp_path / "model", 1), made(tmp_path / "other" / "model", 2)
    before = set(names(lender))
    extra = {"directory": str(lender.directory)}
    said = [engines.run(model, extra=extra).get("said") for model in (one, other, one)]
    assert None not in said
    assert said[0] == said[2] != said[1]
    assert len(set(names(lender)) - before) == 2
    absent = {"directory": str(tmp_path / "absent")}
    assert "no broker serves" in engines.run(one, extra=absent)["error"]
    assert engines.run(one, extra={**absent, "fallback": True})["said"] == said[0]
    assert "has no other" in engines.run(one, extra={"other": 1})["error"]


@pytest.mark.parametrize(
    ("kind", "terms"),
    [
        pytest.param(mixture, {}, marks=pytest.mark.skipif(not PROCESSED, reason="this vLLM cannot"), id="a mixture"),
        pytest.param(tied, {}, id="tied embeddings"),
        pytest.param(llama, {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}, marks=ALONE, id="ranks"),
    ],
)
def test_models_of_other_kinds_are_equal_to_the_bit(
    engines: Engines,
    lender: BrokerProcess,
    tmp_path: Path,
    kind: Callable[[], transformers.PreTrainedModel],
    terms: dict[str, Any],
) -> None:
    model = made(tmp_path / "model", 30, kind)
    extra = {"directory": str(lender.directory), "checkpoint": f"{checkpoint(model)} {terms}"}
    plain = engines.run(model, "auto", engine=terms)
    known = names(lender)
    first = engines.run(model, extra=extra, engine=terms)
    hollow = hollowed(model, tmp_path / "hollow" / "model")
    second = engines.run(hollow, extra=extra, engine=terms, do=["said", "placed"])
    assert [first.get("said"), second.get("said")] == [plain["said"]] * 2, (first, second)
    for rank in second["placed"]:
        assert rank["inside"] == rank["total"] > 0
        assert rank["writable"] == 0
    assert len(names(lender)) - len(known) == len(second["placed"])


@ALONE
def test_each_rank_of_a_pipeline_has_a_pool_of_its_own(engines: Engines, lender: BrokerProcess, tmp_path: Path) -> None:
    """They say nothing here: on a CPU, vLLM 0.32 cannot compute in a pipeline, with a pool or without."""
    model = made(tmp_path / "model", 35)
    extra = {"directory": str(lender.directory)}
    known = set(names(lender))
    terms = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    ranks = [engines.run(model, extra=extra, engine=terms, do=["placed"]).get("placed") for _ in range(2)]
    assert ranks[0] == ranks[1], ranks
    assert [rank["inside"] == rank["total"] > rank["writable"] == 0 for rank in ranks[0]] == [True] * 2
    assert [version for _, version in set(names(lender)) - known] == [1, 1]


def test_an_adapter_is_computed_with_on_a_pool(engines: Engines, lender: BrokerProcess, tmp_path: Path) -> None:
    model, adapted = made(tmp_path / "model", 40), str(adapter(tmp_path / "adapter"))
    terms = {"enable_lora": True, "max_lora_rank": 8}
    plain = engines.run(model, "auto", engine=terms, adapter=adapted)
    extra = {"directory": str(lender.directory)}
    pools = [engines.run(model, extra=extra, engine=terms, adapter=adapted, do=["said", "placed"]) for _ in range(2)]
    assert [engine.get("said") for engine in pools] == [plain["said"]] * 2, pools
    assert plain["said"] != engines.run(model, "auto", engine=terms)["said"]


EIGHT_BITS = pytest.mark.skipif(
    not (ON_GPU or torch.cpu._is_amx_tile_supported()), reason="vLLM computes fp8 on processors with AMX alone"
)


@EIGHT_BITS
@pytest.mark.skipif(not PROCESSED, reason="this vLLM cannot take weights that it has processed")
def test_a_model_of_eight_bits_is_equal_to_the_bit(engines: Engines, lender: BrokerProcess, tmp_path: Path) -> None:
    model = fp8(made(tmp_path / "model", 50))
    extra = {"directory": str(lender.directory)}
    plain = engines.run(model, "auto")
    pools = [engines.run(model, extra=extra) for _ in range(2)]
    assert [engine.get("said") for engine in pools] == [plain["said"]] * 2, (plain, pools)


@pytest.mark.parametrize(
    ("kind", "pack", "module"),
    [
        pytest.param(llama, awq, "self_attn.qkv_proj", id="four bits"),
        pytest.param(llama, fp8, "self_attn.qkv_proj", marks=[EIGHT_BITS, UNPROCESSED], id="eight bits"),
        pytest.param(mixture, None, "mlp.experts.routed_experts", marks=UNPROCESSED, id="a mixture"),
    ],
)
def test_a_method_that_cannot_take_its_own_weights_is_refused_by_name(
    engines: Engines,
    lender: BrokerProcess,
    tmp_path: Path,
    kind: Callable[[], transformers.PreTrainedModel],
    pack: Callable[[Path], Path] | None,
    module: str,
) -> None:
    model = made(tmp_path / "model", 51, kind)
    model = pack(model) if pack else model
    extra = {"directory": str(lender.directory)}
    known = names(lender)
    plain = engines.run(model, "auto")
    refused = engines.run(model, extra=extra)["error"]
    assert f"model.layers.0.{module} is computed by" in refused, (plain, refused)
    assert "and this vLLM" in refused
    assert "use another load format" in refused
    assert engines.run(model, extra={**extra, "fallback": True}).get("said") == plain["said"]
    assert names(lender) == known


def test_engines_at_once_load_once_and_one_that_dies_hands_over(
    engines: Engines, lender: BrokerProcess, tmp_path: Path
) -> None:
    model = made(tmp_path / "model", 60)
    known = set(names(lender))
    extra = {"directory": str(lender.directory)}
    engines.ask(model, extra=extra, copies=AT_ONCE + 1, once=str(tmp_path / "once"))
    os.kill(engines.answer()["pid"], signal.SIGKILL)  # it has a draft that is full
    found = [engines.answer() for _ in range(AT_ONCE + 1)]
    killed = [engine for engine in found if engine.get("error") == "killed by signal 9"]
    rest = [engine.get("said") for engine in found if engine not in killed]
    assert len(killed) == 1, found
    assert rest == [engines.run(model, "auto")["said"]] * AT_ONCE, found
    assert [version for _, version in set(names(lender)) - known] == [1]


class KeptBroker(BrokerProcess):
    """A broker under ``cubroker keep``."""

    def command(self) -> list[str]:
        return [sys.executable, "-m", "cubroker", "keep", "--", *super().command()]

    def spawn(self, log: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def broker(self) -> int:
        """The process of the broker."""
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[0])


def test_an_engine_serves_on_when_the_broker_is_killed_and_the_next_one_attaches(
    engines: Engines, tmp_path: Path
) -> None:
    model, pipe = made(tmp_path / "model", 70), tmp_path / "pipe"
    os.mkfifo(pipe)
    with started(lambda directory: KeptBroker(directory, SMALL)) as kept:
        extra = {"directory": str(kept.directory), "durable": True, "checkpoint": "kept"}
        engines.ask(model, extra=extra, pipe=str(pipe), do=["said", "waited", "again"])
        with pipe.open("w"):  # the engine serves
            before = kept.broker()
            os.kill(before, signal.SIGKILL)
            eventually(lambda: kept.log().count("cubroker: serving on ") == 2, "the next broker")
            assert kept.broker() != before
        found = engines.answer()
        assert found.get("again") == found["said"], found
        hollow = hollowed(model, tmp_path / "hollow" / "model")
        assert engines.run(hollow, extra=extra)["said"] == found["said"]
        assert [version for _, version in names(kept)] == [1]
