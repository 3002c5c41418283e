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
from cubroker.integrations import engine_loader, runtime_pools
from cubroker.integrations.engine_loader import Held, PoolOptions, RankPool
from cubroker.integrations.torch import state_dict
from cubroker.protocol.errors import CubrokerError, Invalid, Unavailable, Unsupported
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
        rank = RankPool(name, 0, torch.device("cpu"), "/models/linear")
        options = PoolOptions("vllm", timeout=60.0, share="vmm")
        engine_loader.hold(self.model, Held(broker, self.pool, manifest, rank, options, self.load_from))
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
        self.model = self.transfer = None
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


@pytest.mark.slow
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


# -- sleep -------------------------------------------------------------------------------------------------


@pytest.fixture
def backend(live: Any) -> Any:
    return live.PoolSleepMode()


def test_an_engine_sleeps_and_wakes_by_tags(backend: Any, engines: Callable[..., Engine]) -> None:
    engine = engines()
    for level in (1, 2):
        backend.suspend(level)
        assert (backend.state(), engine.pool.asleep, backend.allocator.mapped) == ("SUSPENDED", True, set())
        backend.suspend(level)  # again: nothing is left to do
        backend.resume(["kv_cache"])
        assert (backend.state(), engine.pool.asleep, backend.allocator.mapped) == ("RESUMING", True, {"kv_cache"})
        backend.resume(["weights"])
        assert (backend.state(), engine.number, backend.allocator.mapped) == ("RUNNING", 0.0, {"weights", "kv_cache"})
        backend.resume()


def test_each_pool_wakes_by_itself_and_a_second_resume_wakes_the_rest(
    backend: Any, client: Broker, name: str, engines: Callable[..., Engine]
) -> None:
    """The second pool is gone, and then of another structure, so that the engine cannot go to its current version."""
    other = f"{name}-draft"
    runtime_pools.publish(client, other, model_of(torch.full((8, 8), 2.0)), share="vmm")
    one, two = engines(), engines(other)
    backend.suspend()
    client.publish(other, weights(3.0), share="vmm")
    for _ in range(2):
        with pytest.raises(Invalid, match=f"1 of 2 pools cannot wake.*: {other}: .*resume again") as caught:
            backend.resume()
        assert (backend.state(), one.pool.asleep, two.pool.asleep) == ("RESUMING", False, True)
        assert (one.number, backend.allocator.mapped) == (0.0, {"weights", "kv_cache"})
        del caught
    runtime_pools.publish(client, other, model_of(torch.full((8, 8), 4.0)), share="vmm")
    backend.resume()
    assert (backend.state(), one.number, two.number) == ("RUNNING", 0.0, 4.0)


def test_an_engine_of_which_one_pool_cannot_sleep_stays_awake(
    backend: Any, client: Broker, name: str, engines: Callable[..., Engine]
) -> None:
    other = f"{name}-draft"
    runtime_pools.publish(client, other, model_of(torch.full((8, 8), 2.0)), share="ipc")
    one, two = engines(), engines(other)
    with pytest.raises(Unsupported, match=f"1 of 2 pools cannot sleep.*: {other}: .*ipc"):
        backend.suspend()
    assert (backend.state(), one.number, two.number) == ("RUNNING", 0.0, 2.0)
    assert backend.allocator.mapped == {"weights", "kv_cache"}
    backend.resume()
    two.close()
    gc.collect()
    backend.suspend()
    assert (backend.state(), one.pool.asleep) == ("SUSPENDED", True)
    backend.resume()


def test_an_allocator_that_fails_leaves_a_state_from_which_all_wakes(
    backend: Any, engines: Callable[..., Engine]
) -> None:
    engine = engines()
    backend.allocator.broken = True
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        backend.suspend()
    assert caught.value.__notes__ == ["and it could not be undone: CUDA Error: out of memory"]
    assert (backend.state(), engine.pool.asleep) == ("RESUMING", True)
    backend.allocator.broken = False
    backend.resume()
    assert (backend.state(), engine.number, backend.allocator.mapped) == ("RUNNING", 0.0, {"weights", "kv_cache"})
    backend.suspend()
    backend.allocator.broken = True
    with pytest.raises(RuntimeError, match="out of memory"):
        backend.resume()
    assert (backend.state(), engine.pool.asleep) == ("RESUMING", True)
    backend.allocator.broken = False
    backend.resume()
    assert (backend.state(), engine.number, backend.allocator.mapped) == ("RUNNING", 0.0, {"weights", "kv_cache"})


# -- the trainer -------------------------------------------------------------------------------------------


class Source:
    """Says one thing and yields another."""

    def __init__(self, said: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> None:
        self._said, self._given = said, given

    def metadata(self) -> list[vllm_stub.Meta]:
        return [vllm_stub.Meta(name, each.dtype, tuple(each.shape)) for name, each in self._said.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._given.items())


class Unheard:
    """What a trainer calls where no engine goes to the version, which stays with that."""

    version = 0

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.version = update_info["version"]
        raise Unavailable("no engine is there")

    def finish_weight_update(self) -> None:
        pass


def send(live: Any, lender: BrokerProcess, name: str, source: Source) -> int:
    init = live.PoolTrainerInit(pool=name, directory=str(lender.directory), rank=0)
    engines = Unheard()
    trainer = live.PoolTrainer(init, client=engines, source=source)
    try:
        with pytest.raises(Unavailable, match="no engine is there"):
            trainer.send_weights()
    finally:
        trainer.shutdown()
    assert engines.version
    return engines.version


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


class NewClient:
    """What vLLM 0.32 has trainers call, for engines of this process."""

    def __init__(self, transfer: Any) -> None:
        self.transfer = transfer
        self.steps: list[Any] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.transfer.init_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self.steps.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.transfer.update_weights(update_info)

    def finish_weight_update(self, version: str | None = None) -> None:
        self.steps.append(version)


class OldClient(NewClient):
    """The same of vLLM 0.24."""

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:  # type: ignore[override]
        self.steps.append(is_checkpoint_format)

    def finish_weight_update(self) -> None:  # type: ignore[override]
        self.steps.append(None)


@pytest.mark.parametrize(("old", "steps"), [(False, ["start", "1", "start", "2"]), (True, [False, None] * 2)])
def test_a_trainer_sends_by_what_this_vllm_has(
    monkeypatch: pytest.MonkeyPatch,
    lender: BrokerProcess,
    client: Broker,
    name: str,
    engines: Callable[..., Engine],
    old: bool,
    steps: list[Any],
) -> None:
    live = vllm_stub.live(monkeypatch, old=old)
    live.register()
    engine, model = engines(), model_of(weights(1.0)["weight"])
    engine.transfer = live.PoolWeightTransfer(engine.model)
    told = (OldClient if old else NewClient)(engine.transfer)
    source = f"{name}-policy"
    init = live.PoolTrainerInit(pool=source, directory=str(lender.directory), rank=0)
    trainer = live.PoolTrainer.trainer_init(init, client=told, source=live.ModuleSource(model))
    other = live.PoolTrainer.trainer_init(live.PoolTrainerInit(pool=source, rank=1), client=None, source=[])
    for number in (1.0, 2.0):
        model.weight.data.fill_(number)
        trainer.send_weights()
        other.send_weights()
        assert engine.number == number
    assert told.steps == steps
    assert source not in {pool.name for pool in client.pools()}, "its memory is the trainer's again"
    trainer.shutdown()
    other.shutdown()


def test_a_source_of_which_ranks_have_parts_is_refused(live: Any, name: str) -> None:
    source = live.ModuleSource(nn.Linear(2, 2))
    source.held_names = lambda: ["weight"]
    with pytest.raises(Unsupported, match="ranks of this source have parts of the model"):
        live.PoolTrainer(live.PoolTrainerInit(pool=name, rank=0), client=None, source=source)


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
