"""What engines of vLLM do with pools while they run, where vLLM itself is a stub; tests/engines has real engines."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from cubroker.client import Broker
from cubroker.client.pool import Pool
from cubroker.integrations import runtime_pools
from cubroker.integrations.torch import state_dict
from cubroker.protocol.errors import CubrokerError, Invalid, Unsupported
from tests.brokers import BrokerProcess
from tests.unit.integrations import vllm_stub


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Any:
    return vllm_stub.live(monkeypatch)


def model_of(weight: torch.Tensor) -> nn.Module:
    model = nn.Linear(8, 8, bias=False)
    model.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return model


def weights(number: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((8, 8), number)}


class Engine:
    """An engine on a runtime pool, with a session of its own."""

    def __init__(self, live: Any, broker: Broker, name: str) -> None:
        self.converted = 0
        self.pool = broker.attach(name)
        with torch.device("meta"):
            model = nn.Linear(8, 8, bias=False)
        self.model = runtime_pools.bind(model, self.pool)
        manifest = runtime_pools.read_manifest(self.pool)
        live.hold(
            self.model, live.Held(broker, self.pool, manifest, self.load_from, lambda: None, 60.0, {"share": "vmm"})
        )
        self.transfer = live.PoolWeightTransfer(self.model)

    def load_from(self, source: Pool) -> nn.Module:
        self.converted += 1
        return model_of(state_dict(source)["weight"])

    def update(self, pool: str, version: int | None = None) -> None:
        self.transfer.update_weights({"pool": pool, "version": version})

    @property
    def number(self) -> float:
        return float(self.model.weight[0, 0])

    def close(self) -> None:
        del self.model, self.transfer
        self.pool.close()


@pytest.fixture
def engines(live: Any, lender: BrokerProcess, client: Broker, name: str) -> Iterator[Callable[..., Engine]]:
    """Starts engines on the pool ``name``, whose weights are zeros at first."""
    runtime_pools.publish(client, name, model_of(weights(0.0)["weight"]), share="vmm")
    running: list[tuple[Engine, Broker]] = []

    def start(pool: str = name) -> Engine:
        broker = Broker(lender.directory)
        running.append((Engine(live, broker, pool), broker))
        return running[-1][0]

    yield start
    gc.collect()  # tracebacks of errors refer to models
    for engine, broker in running:
        engine.close()
        broker.close()


def current(client: Broker, name: str) -> int:
    return client.describe(name)[0].version


# -- weight transfer ---------------------------------------------------------------------------------------


def test_an_update_is_converted_once_however_often_it_is_given(
    client: Broker, name: str, engines: Callable[..., Engine]
) -> None:
    source = f"{name}-policy"
    one, two = engines(), engines()
    client.publish(source, weights(1.0))
    for _ in range(2):
        one.update(source)
    two.update(source, 1)
    assert (one.number, two.number) == (1.0, 1.0)
    assert (one.converted, two.converted, current(client, name)) == (1, 0, 2)


def test_an_update_that_comes_late_does_not_make_older_weights_current(
    client: Broker, name: str, engines: Callable[..., Engine]
) -> None:
    source = f"{name}-policy"
    one, two, three = engines(), engines(), engines()
    client.publish(source, weights(1.0))
    with client.attach(source):  # an engine still has to see it
        one.update(source, 1)
        three.update(source, 1)
        client.publish(source, weights(2.0))
        one.update(source, 2)
        two.update(source, 1)  # as another engine has it still
        assert (one.number, two.number, three.number) == (2.0, 1.0, 1.0)
        assert (two.converted, current(client, name)) == (0, 3)
        two.update(source, 2)
        three.update(source, 2)
        with pytest.raises(Invalid, match=rf"'{source}'@1 is older than version 2, which the current version of"):
            two.update(source, 1)
        assert (two.number, two.converted, current(client, name)) == (2.0, 0, 3)
        client.retire(source, 2)
        with pytest.raises(Invalid, match="update to version 2 instead"):
            three.update(source, 1)
    client.publish(source, weights(3.0))
    three.update(source)
    assert (three.number, current(client, name)) == (3.0, 4)


def test_numbers_that_begin_again_after_a_restart_are_not_older(
    live: Any, client: Broker, name: str, engines: Callable[..., Engine]
) -> None:
    source = f"{name}-policy"
    client.publish(source, weights(1.0))
    with client.attach(source) as pool:
        before = live._Origin.of(pool, "before")._replace(version=6)
    runtime_pools.publish(
        client, name, model_of(weights(6.0)["weight"]), source=live._ORIGIN.pack(*before), share="vmm"
    )
    engine = engines()
    engine.update(source)
    assert (engine.number, engine.converted, current(client, name)) == (1.0, 1, 3)


# -- the trainer -------------------------------------------------------------------------------------------


class Source:
    """Says one thing and yields another."""

    def __init__(self, said: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> None:
        self._said, self._given = said, given

    def metadata(self) -> list[vllm_stub.Meta]:
        return [vllm_stub.Meta(name, each.dtype, tuple(each.shape)) for name, each in self._said.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._given.items())


def send(live: Any, lender: BrokerProcess, name: str, source: Source) -> int:
    init = live.PoolTrainerInit(pool=name, directory=str(lender.directory), rank=0)
    trainer = live.PoolTrainer(init, client=None, source=source)
    try:
        version: int = trainer._publish(trainer._broker)
        return version
    finally:
        trainer.shutdown()


def test_a_trainer_publishes_what_its_source_yields(
    live: Any, lender: BrokerProcess, client: Broker, name: str
) -> None:
    given = {
        "a": nn.Parameter(torch.arange(32.0).reshape(4, 8).to(torch.bfloat16)),
        "b": torch.arange(6.0).reshape(2, 3).t(),
    }
    assert send(live, lender, name, Source(given, given)) == 1
    with client.attach(name) as pool:
        found = state_dict(pool)
        assert all(torch.equal(found[key], each) for key, each in given.items())
        del found


@pytest.mark.parametrize(
    ("given", "words", "kind"),
    [
        ({}, "has no tensors", Invalid),
        ({"a": torch.ones(4, 8, dtype=torch.bfloat16)}, r"names 'b' and 1 more in metadata\(\) and does not", Invalid),
        ({"a": torch.ones(1)}, r"'a' .* is BF16 \(4, 8\), and the .* is F32 \(1,\)", Invalid),
        ({"a": torch.ones(4, 8)}, r"'a' .* is BF16 \(4, 8\), and the .* is F32 \(4, 8\)", Invalid),
        ({"z": torch.ones(1)}, r"yields 'z', which its metadata\(\) does not name", Invalid),
        (None, "no dtype for 'a', which is torch.bits8", Unsupported),
    ],
)
def test_a_source_that_does_not_yield_what_it_names_publishes_nothing(
    live: Any,
    lender: BrokerProcess,
    client: Broker,
    name: str,
    given: dict[str, torch.Tensor] | None,
    words: str,
    kind: type[CubrokerError],
) -> None:
    said = {"a": torch.ones(4, 8, dtype=torch.bfloat16), "b": torch.ones(2), "c": torch.ones(3)}
    if given is None:
        said = given = {"a": torch.empty(1, dtype=torch.bits8)}
    with pytest.raises(kind, match=words):
        send(live, lender, name, Source(said, given))
    assert name not in {pool.name for pool in client.pools() if pool.state != "draft"}
