from __future__ import annotations

import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from cubroker.client import Broker, Pool
from cubroker.client.loading.loader import load
from cubroker.client.loading.verify import verify
from cubroker.integrations import runtime_pools
from cubroker.integrations.transformers import attach_model, from_pool
from cubroker.protocol.errors import Invalid, NotFound
from tests.brokers import PATIENCE, eventually, serving
from tests.forkserver import TORCH, Forked
from tests.unit.integrations.embed_process import embed, meta_model

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GPT2 = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
LLAMA = {**SIZES, "num_key_value_heads": 2}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("BertModel", SIZES),
    ("BertForMaskedLM", SIZES),
    ("GPT2LMHeadModel", GPT2),
    ("LlamaForCausalLM", {**LLAMA, "rope_scaling": ROPE}),
    ("Qwen2ForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
]
"""Classes by name, and their configurations: transformers imports a class when it is asked for, in seconds."""


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.disable_progress_bar()


def fresh(kind: str, config: dict[str, Any]) -> Any:
    model = getattr(transformers, kind)
    return model(model.config_class(**config))


def made(kind: str, config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return fresh(kind, config).eval()


def empty(kind: str, config: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return fresh(kind, config)


def share(client: Broker, model: Any, folder: Path) -> Pool:
    model.save_pretrained(folder)
    load(client, "m", folder)
    return client.attach("m")


def write(tensors: dict[str, torch.Tensor], path: Path) -> Path:
    save_file(tensors, path)
    return path


def twins(model: nn.Module) -> set[tuple[str, ...]]:
    """Return the groups of names that stand for one parameter."""
    groups: dict[int, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)] = (*groups.get(id(parameter), ()), name)
    return set(groups.values())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "config"), MODELS)
def test_an_attached_model_is_the_saved_one(client: Broker, tmp_path: Path, kind: str, config: dict[str, Any]) -> None:
    original = made(kind, config)
    with share(client, original, tmp_path) as pool:
        model = empty(kind, config)
        assert attach_model(model, pool) is model
        theirs, ours = dict(original.named_parameters()), dict(model.named_parameters())
        assert all(torch.equal(theirs[name], ours[name]) for name in theirs | ours)
        theirs, ours = dict(original.named_buffers()), dict(model.named_buffers())
        assert all(torch.equal(theirs[name], ours[name]) for name in theirs | ours)
        assert twins(model) == twins(original)
        assert {parameter.data_ptr() for parameter in model.parameters()} <= {t.pointer for t in pool.values()}
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())
        tokens = torch.arange(48).reshape(2, 24)
        with torch.no_grad():
            assert torch.equal(original(tokens)[0], model(tokens)[0])
        del model, ours
    assert [info.leases for info in client.pools()] == [0]


@pytest.mark.slow
def test_attaching_in_inference_mode_or_on_meta_changes_nothing(client: Broker, tmp_path: Path) -> None:
    kind, config = MODELS[3]
    original = made(kind, config)
    with share(client, original, tmp_path) as pool, torch.inference_mode(), torch.device("meta"):
        model = attach_model(fresh(kind, config), pool)
    theirs, ours = dict(original.named_buffers()), dict(model.named_buffers())
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_a_base_models_file_fits_a_model_with_a_head_and_the_reverse(client: Broker, tmp_path: Path) -> None:
    headed = made("GPT2LMHeadModel", GPT2)
    with share(client, headed.transformer, tmp_path / "base") as pool:
        assert twins(attach_model(empty("GPT2LMHeadModel", GPT2), pool)) == twins(headed)
    with share(client, headed, tmp_path / "headed") as pool:
        base = attach_model(empty("GPT2Model", GPT2), pool)
    assert torch.equal(base.wte.weight, headed.transformer.wte.weight)


def test_a_checkpoint_with_different_bytes_for_tied_parameters_unties_them(client: Broker, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in made("GPT2LMHeadModel", GPT2).state_dict().items()}
    state["lm_head.weight"] += 1
    save_file(state, tmp_path / "m.safetensors")
    load(client, "m", tmp_path)
    with client.attach("m") as pool:
        model = attach_model(empty("GPT2LMHeadModel", GPT2), pool)
    assert torch.equal(model.lm_head.weight, state["lm_head.weight"])
    assert torch.equal(model.transformer.wte.weight, state["transformer.wte.weight"])


def test_tied_parameters_that_are_stored_in_two_dtypes_keep_both(client: Broker, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in made("GPT2LMHeadModel", GPT2).state_dict().items()}
    state["lm_head.weight"] = state["lm_head.weight"].double()
    save_file(state, tmp_path / "m.safetensors")
    load(client, "m", tmp_path)
    with client.attach("m") as pool:
        model = attach_model(empty("GPT2LMHeadModel", GPT2), pool)
    assert (model.lm_head.weight.dtype, model.transformer.wte.weight.dtype) == (torch.float64, torch.float32)


def test_names_that_only_one_side_has_are_refused_unless_told_otherwise(client: Broker, tmp_path: Path) -> None:
    state = made("GPT2LMHeadModel", GPT2).state_dict()
    del state["lm_head.weight"]
    bias = state.pop("transformer.ln_f.bias")
    save_file(state | {f"extra.{n}": torch.zeros(1) for n in range(6)}, tmp_path / "m.safetensors")
    load(client, "m", tmp_path)
    with client.attach("m") as pool:
        says = r"GPT2LMHeadModel \(missing in the pool: 'transformer.ln_f.bias'; only in the pool: .* and 1 more"
        with pytest.raises(Invalid, match=says):
            attach_model(empty("GPT2LMHeadModel", GPT2), pool)
        with pytest.raises(Invalid, match=r"'transformer.ln_f.bias' of GPT2LMHeadModel would stay on the meta device"):
            attach_model(empty("GPT2LMHeadModel", GPT2), pool, strict=False)
        prepared = empty("GPT2LMHeadModel", GPT2)
        prepared.transformer.ln_f.bias = nn.Parameter(bias)
        assert torch.equal(attach_model(prepared, pool, strict=False).transformer.ln_f.bias, bias)


def test_another_shape_is_refused(client: Broker, tmp_path: Path) -> None:
    with share(client, made("GPT2LMHeadModel", GPT2), tmp_path) as pool:
        other = {**GPT2, "vocab_size": 98}
        with pytest.raises(Invalid, match=r"pool 'm' does not fit GPT2LMHeadModel: .*size mismatch"):
            attach_model(empty("GPT2LMHeadModel", other), pool)


@pytest.mark.slow
def test_parameters_that_checkpoints_lack_are_computed(client: Broker, tmp_path: Path) -> None:
    """Positions of Marian, which are sines, are parameters that it neither trains nor saves."""
    config = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 99, "pad_token_id": 0}
    kind = transformers.MarianMTModel
    original = made("MarianMTModel", config | heads).to(torch.bfloat16)
    tokens = torch.arange(24).reshape(2, 12)
    with share(client, original, tmp_path) as pool:
        assert not any("embed_positions" in name for name in pool)
        expected = kind.from_pretrained(tmp_path, torch_dtype=torch.bfloat16).eval()
        model, _ = from_pool("m", tmp_path, broker=client)
        with torch.no_grad():
            theirs = expected(tokens, decoder_input_ids=tokens).logits
            assert torch.equal(model(tokens, decoder_input_ids=tokens).logits, theirs)
        model = None


class Frozen(nn.Module):
    """A module whose buffer, and whose parameter that is not trained, nothing can compute again."""

    _keys_to_ignore_on_load_missing = ("fixed",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("unused", None, persistent=False)
        self.scale = torch.ones(())


class Forgetful(Frozen):
    def _init_weights(self, module: nn.Module) -> None:
        """Leave both as they are."""


@pytest.mark.parametrize("kind", [Frozen, Forgetful])
def test_what_nobody_computes_again_is_named(client: Broker, tmp_path: Path, kind: type[Frozen]) -> None:
    save_file({"weight": torch.ones(3)}, tmp_path / "m.safetensors")
    load(client, "m", tmp_path)
    with client.attach("m") as pool:
        with torch.device("meta"):
            model = kind()
        with pytest.raises(
            Invalid, match=rf"'fixed', 'table', 'scale' of {kind.__name__} would stay on the meta device"
        ):
            attach_model(model, pool)
        ready = kind()
        assert torch.equal(attach_model(ready, pool).weight, torch.ones(3))
        assert torch.equal(ready.table, torch.arange(3.0))


class Expecting(nn.Module):
    """A module with a parameter that is not trained, but expected in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)

    def _init_weights(self, module: nn.Module) -> None:
        self.fixed.fill_(5.0)


def test_a_parameter_that_checkpoints_should_have_is_not_computed(client: Broker, tmp_path: Path) -> None:
    save_file({"weight": torch.ones(3)}, tmp_path / "m.safetensors")
    load(client, "m", tmp_path)
    with client.attach("m") as pool:
        with torch.device("meta"):
            model = Expecting()
        with pytest.raises(Invalid, match="'fixed' of Expecting would stay on the meta device"):
            attach_model(model, pool, strict=False)


def test_a_pool_may_have_buffers_that_the_model_computes(client: Broker, tmp_path: Path) -> None:
    save_file({"weight": torch.ones(3), "table": torch.zeros(3)}, tmp_path / "m.safetensors")
    load(client, "m", tmp_path)
    with client.attach("m") as pool:
        assert torch.equal(attach_model(Frozen(), pool).table, torch.arange(3.0))


@pytest.mark.slow
def test_a_checkpoint_that_is_converted_when_it_is_loaded_is_published_converted(
    client: Broker, tmp_path: Path
) -> None:
    config = {**LLAMA, "num_local_experts": 2}
    original = made("MixtralForCausalLM", config)
    with (
        share(client, original, tmp_path) as pool,
        pytest.raises(Invalid, match="publish the loaded model's state_dict"),
    ):
        attach_model(empty("MixtralForCausalLM", config), pool)
    save_file(original.state_dict(), tmp_path / "converted.safetensors")
    load(client, "m", tmp_path / "converted.safetensors")
    with client.attach("m") as pool:
        model = attach_model(empty("MixtralForCausalLM", config), pool)
        tokens = torch.arange(24).reshape(1, 24)
        with torch.no_grad():
            assert torch.equal(original(tokens)[0], model(tokens)[0])
        del model


LLAVA = {
    "text_config": {"model_type": "llama", **LLAMA},
    "vision_config": {"model_type": "clip_vision_model", **SIZES, "image_size": 8, "patch_size": 4},
}


def test_a_checkpoint_fits_by_the_names_that_transformers_has_today(client: Broker, tmp_path: Path) -> None:
    older, today = "language_model.model.embed_tokens.weight", "model.language_model.embed_tokens.weight"
    original = made("LlavaForConditionalGeneration", LLAVA)
    with share(client, original, tmp_path) as pool:
        assert older in pool
        assert today not in pool
        model = attach_model(empty("LlavaForConditionalGeneration", LLAVA), pool)
        assert model.get_parameter(today).data_ptr() == pool[older].pointer
        tokens = torch.arange(24).reshape(1, 24)
        with torch.no_grad():
            assert torch.equal(original(tokens).logits, model(tokens).logits)
        del model


def test_a_module_around_a_model_has_no_other_names(client: Broker, tmp_path: Path) -> None:
    with torch.device("meta"):
        outer = nn.ModuleDict({"inner": fresh("LlavaForConditionalGeneration", LLAVA)})
    made("LlavaForConditionalGeneration", LLAVA).save_pretrained(tmp_path)
    load(client, "m", tmp_path)
    with client.attach("m") as pool, pytest.raises(Invalid, match=r"does not fit ModuleDict .*missing in the pool"):
        attach_model(outer, pool)


def test_two_tensors_for_one_name_have_to_be_the_same(client: Broker, tmp_path: Path) -> None:
    older, today = "language_model.model.embed_tokens.weight", "model.language_model.embed_tokens.weight"
    made("LlavaForConditionalGeneration", LLAVA).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    load(client, "m", write({**stored, today: stored[older].clone()}, tmp_path / "same.safetensors"))
    with client.attach("m") as pool:
        attach_model(empty("LlavaForConditionalGeneration", LLAVA), pool)
    load(client, "m", write({**stored, today: stored[older] + 1}, tmp_path / "other.safetensors"))
    words = f"two tensors for '{today}' of LlavaForCond.*: '{older}' and '{today}', which differ"
    with client.attach("m") as pool, pytest.raises(Invalid, match=words):
        attach_model(empty("LlavaForConditionalGeneration", LLAVA), pool)


QWEN2_VL = {
    "text_config": {**LLAMA, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
    "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4},
}


def test_a_rule_for_older_names_does_not_hide_a_name_of_today(client: Broker) -> None:
    of_head, of_base = "model.visual.blocks.0.attn.proj.bias", "visual.blocks.0.attn.proj.bias"
    client.publish("m", made("Qwen2VLForConditionalGeneration", QWEN2_VL).state_dict())
    with client.attach("m") as pool:
        model = attach_model(empty("Qwen2VLModel", QWEN2_VL), pool, strict=False)
        assert model.get_parameter(of_base).data_ptr() == pool[of_head].pointer
        del model


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_embed_with_shared_weights_exactly_as_with_the_file(minilm: Path) -> None:
    expected = embed(transformers.AutoModel.from_pretrained(minilm).eval(), minilm).numpy().tobytes()
    with serving("host:1@256MiB") as broker, Broker(broker.directory) as client, ExitStack() as undo:
        load(client, "minilm", minilm)
        other = Forked(
            ["-m", "tests.unit.integrations.embed_process", str(broker.directory), "minilm", str(minilm)],
            preload=TORCH,
            measured=False,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        undo.enter_context(other)
        undo.callback(other.kill)
        with client.attach("minilm") as pool:
            model = attach_model(meta_model(minilm), pool)
            assert embed(model, minilm).numpy().tobytes() == expected
            assert other.stdout is not None
            assert other.stdout.readline().strip() == expected.hex()
            (info,) = client.pools()
            assert (info.leases, info.version) == (2, 1)
            del model
        assert other.communicate(timeout=PATIENCE)[0] == ""
        assert other.returncode == 0
        assert verify(client, "minilm", minilm).differences == ()


# -- in one call -------------------------------------------------------------------------------------------


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with a model that generates otherwise than by default, and a tokenizer."""
    model = made("LlamaForCausalLM", LLAMA)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path)
    words = {word: number for number, word in enumerate(["[UNK]", "to", "be", "or", "not"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_model_and_its_tokenizer_come_from_a_pool_and_a_folder_without_weights(
    client: Broker, name: str, llama: Path
) -> None:
    expected = transformers.LlamaForCausalLM.from_pretrained(llama).eval()
    load(client, name, [llama])
    (llama / "model.safetensors").unlink()
    model, tokenizer = from_pool(name, llama, broker=client)
    assert type(model) is transformers.LlamaForCausalLM
    assert model.generation_config.max_new_tokens == 7
    tokens = tokenizer("to be or not", return_tensors="pt")["input_ids"]
    assert tokens.tolist() == [[1, 2, 3, 4]]
    assert torch.equal(model.generate(tokens, do_sample=False), expected.generate(tokens, do_sample=False))
    base, _ = from_pool(name, model.config, broker=client, auto=transformers.AutoModel, strict=False)
    assert torch.equal(base(tokens).last_hidden_state, expected.model(tokens).last_hidden_state)
    model = base = None


@pytest.mark.slow
def test_buffers_that_are_computed_have_the_dtype_of_the_configuration_or_of_the_weights(
    client: Broker, name: str, tmp_path: Path
) -> None:
    """M2M100 adds such a buffer to its activations: if it is F32, the next layer, which is BF16, refuses the sum.

    Weights of another dtype than the configuration's are a model as from_pretrained makes it with ``dtype=``.
    """
    config = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 99}
    made("M2M100ForConditionalGeneration", config | heads).to(torch.bfloat16).save_pretrained(tmp_path)
    load(client, name, [tmp_path])
    given = transformers.AutoConfig.from_pretrained(tmp_path)
    tokens = torch.arange(24).reshape(2, 12)
    for dtype in (torch.bfloat16, torch.float32):
        kind = transformers.M2M100ForConditionalGeneration
        expected = kind.from_pretrained(tmp_path, torch_dtype=dtype).eval()
        client.publish(name, expected)
        for auto in (None, kind, transformers.AutoModelForSeq2SeqLM):
            for config in (tmp_path, given):
                model, _ = from_pool(name, config, broker=client, auto=auto)
                with torch.no_grad():
                    ours, theirs = (each(tokens, decoder_input_ids=tokens)[0] for each in (model, expected))
                    assert torch.equal(ours, theirs)
                assert {buffer.dtype for buffer in model.buffers()} == {buffer.dtype for buffer in expected.buffers()}
                assert model.config.dtype == dtype
                assert given.dtype == torch.bfloat16
                model = None


def test_a_runtime_pool_of_a_model_serves_as_well(client: Broker, name: str, llama: Path) -> None:
    expected = transformers.LlamaForCausalLM.from_pretrained(llama).eval()
    runtime_pools.publish(client, name, expected)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (llama / file).unlink(missing_ok=True)
    model, tokenizer = from_pool(name, str(llama), broker=client)
    assert tokenizer is None
    tokens = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(model(tokens).logits, expected(tokens).logits)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model = None


def test_a_session_of_its_own_stays_as_long_as_the_model(
    client: Broker, name: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(client, name, [llama])
    monkeypatch.setenv("CUBROKER_DIR", str(client.directory))
    model, _ = from_pool(name, llama)
    assert [pool.leases for pool in client.pools() if pool.name == name] == [1]
    del model
    eventually(lambda: [pool.leases for pool in client.pools() if pool.name == name] == [0], "the end of the lease")


def test_what_lies_broken_beside_the_configuration_is_told(client: Broker, name: str, llama: Path) -> None:
    load(client, name, [llama])
    for file, what in (("tokenizer.json", "tokenizer"), ("generation_config.json", "generation config")):
        (llama / file).write_text("{")
        with pytest.raises(Invalid, match=f"the {what} of '{llama}' cannot be read"):
            from_pool(name, llama, broker=client)


def test_a_model_of_the_hub_may_have_no_tokenizer(
    client: Broker, name: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(client, name, [llama])
    revision = tmp_path / "hub" / "models--org--tiny" / "snapshots" / ("a" * 40)
    revision.mkdir(parents=True)
    refs = revision.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(revision.name)
    for file in ("config.json", "generation_config.json"):
        shutil.copy(llama / file, revision)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    config = transformers.AutoConfig.from_pretrained("org/tiny")
    config.name_or_path = "/a/folder/that/is/gone"
    for what, most in (("org/tiny", 7), (config, None)):
        model, tokenizer = from_pool(name, what, broker=client)
        assert type(model) is transformers.LlamaForCausalLM
        assert model.generation_config.max_new_tokens == most
        assert tokenizer is None
        model = None


def test_what_makes_no_model_is_told(client: Broker, name: str, llama: Path, tmp_path: Path) -> None:
    load(client, name, [llama])
    with pytest.raises(NotFound, match="no configuration of a model in"):
        from_pool(name, tmp_path / "absent", broker=client)
    with pytest.raises(NotFound, match="no pool is named"):
        from_pool(f"{name}-absent", llama, broker=client)
    with pytest.raises(Invalid, match="not 7"):
        from_pool(name, 7, broker=client)
    for architectures, words in (([], "names nothing as"), (["OtherForCausalLM"], "names 'OtherForCausalLM' as")):
        config = transformers.LlamaConfig(**LLAMA, architectures=architectures)
        with pytest.raises(Invalid, match=words):
            from_pool(name, config, broker=client)
    config = transformers.LlamaConfig(**LLAMA)
    model, tokenizer = from_pool(name, config, broker=client, auto=transformers.LlamaForCausalLM)
    assert tokenizer is None
    assert model.generation_config is not None
    model = None
