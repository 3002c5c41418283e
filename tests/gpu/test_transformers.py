"""A language model that generates from weights that two processes share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.client.loading.loader import load
from tests.brokers import BrokerProcess
from tests.gpu.sharing import SHARES, gpu_broker, worker
from tests.gpu.worker import generated

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("this torch was built without CUDA", allow_module_level=True)
transformers = pytest.importorskip("transformers")  # takes a second


@pytest.fixture
def gpu() -> Iterator[tuple[BrokerProcess, Broker]]:
    with gpu_broker() as both:
        yield both


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


@SHARES
def test_two_processes_generate_the_same_tokens_from_one_copy(
    gpu: tuple[BrokerProcess, Broker], folder: Path, share: str
) -> None:
    process, broker = gpu
    load(broker, "llama", folder, share=share)
    use = ("generate", "llama", str(folder))
    with worker(process, *use) as one, worker(process, *use) as two:
        tokens = one.answer()
        assert two.answer() == tokens
        assert [(info.state, info.leases) for info in broker.pools()] == [("current", 2)]
    alone = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda").eval()
    assert generated(alone) == tokens
    assert [len(sequence) for sequence in tokens] == [32, 32]
