"""What loaders of engines share: options, who loads, and what holds a model's pool."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cubroker.client import Broker
from cubroker.client.pool import Pool
from cubroker.integrations import engine_loader, runtime_pools
from cubroker.integrations.engine_loader import Obtained, PoolOptions, RankPool
from cubroker.protocol.errors import Invalid, NotFound, TimedOut, Unavailable
from tests.brokers import BrokerProcess, eventually
from tests.forkserver import TORCH
from tests.replaced import PackageCopy
from tests.unit.client.conftest import begun
from tests.unit.client.scripts import start
from tests.unit.integrations import runtime_process
from tests.unit.integrations.runtime_process import CONSUMED, meta
from tests.unit.integrations.test_runtime_pools import loaded, same

log = logging.getLogger("engine")


class Bridge:
    """What a bridge says of an engine, on emulated devices."""

    def __init__(self, lender: BrokerProcess, name: str, **options: Any) -> None:
        self.options = PoolOptions.read({"directory": str(lender.directory), **options}, "engine")
        self.name = name
        self.steps: list[str] = []
        self.failing = ""

    def step(self, name: str) -> None:
        self.steps.append(name)
        if name == self.failing:
            raise RuntimeError(f"{name} failed")

    def identify(self, broker: Broker) -> RankPool:
        self.step("identify")
        device, _ = engine_loader.place(broker, torch.device("cpu"), 0)
        return RankPool(self.name, device, torch.device("cpu"), "/models/runtime")

    def load(self) -> nn.Module:
        self.step("load")
        return loaded()

    def publish(self, broker: Broker, rank: RankPool, model: nn.Module) -> None:
        self.step("publish")
        runtime_pools.publish(broker, rank.name, model, consumed=CONSUMED, device=rank.device, **self.options.terms)

    def attach(self, pool: Pool) -> nn.Module:
        self.step("attach")
        return runtime_pools.bind(meta(), pool, strict=False)

    def finish(self, got: Obtained) -> None:
        self.step("finish")

    def run(self) -> nn.Module:
        return engine_loader.load_on_pool(
            self.options,
            log,
            identify=self.identify,
            load=self.load,
            publish=self.publish,
            attach=self.attach,
            finish=self.finish,
        )


def sessions(client: Broker) -> int:
    return len(client.clients())


def test_a_model_holds_its_pool_and_its_connection_until_it_is_gone(
    client: Broker, lender: BrokerProcess, name: str
) -> None:
    before = sessions(client)
    bridge = Bridge(lender, name, share="vmm")
    first, second = bridge.run(), bridge.run()
    assert bridge.steps == ["identify", "load", "publish", "finish", "identify", "attach", "finish"]
    same(first, second)
    assert not first.training
    assert {first, second} <= set(engine_loader.models())
    found = engine_loader.held(second)
    assert (found.pool.name, found.pool.version, found.rank.path) == (name, 1, "/models/runtime")
    assert sessions(client) == before + 2
    del first, second, found
    gc.collect()
    eventually(lambda: sessions(client) == before, "the sessions of models that are gone")


@pytest.mark.parametrize("step", ["identify", "load", "publish", "attach", "finish"])
def test_an_error_at_any_step_leaves_no_connection(client: Broker, lender: BrokerProcess, name: str, step: str) -> None:
    if step == "attach":
        runtime_pools.publish(client, name, loaded(), consumed=CONSUMED, share="vmm")
    before = sessions(client)
    bridge = Bridge(lender, name, share="vmm")
    bridge.failing = step
    with pytest.raises(RuntimeError, match=f"{step} failed") as caught:
        bridge.run()
    del caught
    gc.collect()
    eventually(lambda: sessions(client) == before, "the session of a load that has failed")


def test_an_engine_without_a_broker_uses_its_own_loader_only_if_told(
    lender: BrokerProcess, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    absent = {"directory": str(lender.directory / "absent")}
    with pytest.raises(Unavailable):
        Bridge(lender, name, **absent).run()
    bridge = Bridge(lender, name, **absent, fallback=True)
    model = bridge.run()
    assert bridge.steps == ["load"]
    assert engine_loader.find_held(model) is None
    with pytest.raises(Invalid, match="this Runtime has no pool; start the engine with --load-format cubroker"):
        engine_loader.held(model)
    assert "no pool is used; the engine's own loader loads the model: " in caplog.text


def test_options_are_those_of_the_documentation_and_no_others() -> None:
    given = {"pool": "mine", "timeout": 5, "fallback": True, "checkpoint": "v1", "share": "vmm", "mode": "600"}
    options = PoolOptions.read(given, "engine")
    assert options == PoolOptions("mine", timeout=5.0, fallback=True, checkpoint="v1", share="vmm", mode="600")
    assert options.terms == {"share": "vmm", "durable": None, "mode": 0o600}
    assert PoolOptions.read({"directory": Path("/run/b")}, "engine").directory == "/run/b"
    assert options.digest("/models/none", None, None, pytest.fail) == "declared:v1"
    assert PoolOptions.read(None, "engine") == PoolOptions("engine")
    with pytest.raises(ValueError, match="of load format cubroker has no pools, waits"):
        PoolOptions.read({"pools": 1, "waits": 2}, "engine")
    for mode, bits in (("444", 0o444), ("0o444", 0o444), (None, None)):
        assert PoolOptions.read({"mode": mode}, "engine").terms["mode"] == bits


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        (444, 'mode is 444; give a text of three octal digits, as in "mode": "640", since JSON has no octal numbers'),
        (True, "mode is true; give a text"),
        (["640"], r'mode is \["640"\]; give a text'),
        ("rw", 'mode is "rw"; give a text of three octal digits'),
        ("640\n", r'mode is "640\\n"; give a text'),
        ("", 'mode is ""; give a text'),
    ],
)
def test_a_mode_is_a_text_since_json_has_no_octal_numbers(mode: object, says: str) -> None:
    with pytest.raises(ValueError, match=f"of load format cubroker: {says}"):
        PoolOptions.read({"mode": mode}, "engine")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"pool": 7}, "pool is 7; give a text"),
        ({"pool": {(1,): 2}}, "pool is {}; give a text"),
        ({"directory": True}, "directory is true; give a text"),
        ({"share": "vm"}, 'share is "vm"; give one of auto, ipc, vmm, multicast'),
        ({"durable": "no"}, 'durable is "no"; give true or false'),
        ({"timeout": None}, "timeout is null; give a number of seconds, up to 604800"),
        ({"timeout": "5"}, 'timeout is "5"; give'),
        ({"timeout": -1}, "timeout is -1; give"),
        ({"timeout": nan}, "timeout is NaN; give"),
        ({"fallback": "false"}, 'fallback is "false"; give true or false'),
        ({"fallback": None}, "fallback is null; give true or false"),
        ({"checkpoint": 1.5}, "checkpoint is 1.5; give a text"),
    ],
    ids=str,
)
def test_an_option_of_another_type_is_named(given: dict[str, object], says: str) -> None:
    """A text such as "false" was taken as true, and null was an error without a name."""
    with pytest.raises(ValueError, match=f"of load format cubroker: {says}"):
        PoolOptions.read(given, "engine")


# -- who loads ---------------------------------------------------------------------------------------------


def obtained(broker: Broker, name: str, load: Callable[[], nn.Module] = loaded, **terms: Any) -> Obtained:
    return runtime_process.obtain(broker, name, load, **terms)


def refuse() -> nn.Module:
    raise Unavailable("no disk")


def test_the_first_loads_and_publishes_and_the_next_one_binds(client: Broker, name: str) -> None:
    first = obtained(client, name)
    assert first.loaded
    second = obtained(client, name, refuse)
    assert not second.loaded
    same(first.model, second.model)
    assert first.model.get_parameter("embed.weight").data_ptr() != 0
    for each in (first, second):
        assert each.pool is not None
        each.pool.close()


def test_an_engine_that_is_told_to_falls_back_to_its_own_loader(
    client: Broker, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.publish(name, {"a": torch.zeros(4)})
    with pytest.raises(Invalid, match="no runtime pool"):
        obtained(client, name)
    got = obtained(client, name, fallback=True)
    assert (got.pool, got.loaded) == (None, True)
    same(got.model, loaded())
    assert "is not used; the engine's own loader loads the model: pool" in caplog.text
    client.retire(name)
    with client.lock(name), pytest.raises(TimedOut, match="has the lock"):
        obtained(client, name, timeout=0.0)
    with pytest.raises(Unavailable, match="no disk"):
        obtained(client, name, refuse)
    with pytest.raises(NotFound):
        client.attach(name)


WORKER = """
from tests.unit.integrations.runtime_process import work
work(directory, sys.argv[2])
"""


def said(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


def go_on(worker: subprocess.Popen[str]) -> None:
    assert worker.stdin is not None
    print(file=worker.stdin, flush=True)


@pytest.mark.slow
def test_eight_engines_at_once_load_once_and_a_loader_that_dies_hands_over(
    client: Broker, lender: BrokerProcess, name: str
) -> None:
    eight = [start(lender, WORKER, name, measured=False, preload=TORCH) for _ in range(8)]
    workers = {worker.pid: worker for worker in eight}

    def loader() -> subprocess.Popen[str]:
        holders: list[int] = []

        def look() -> bool:  # one that was killed may have its lock for a moment
            holders[:] = [each.pid for each in client.clients() if each.locks and each.pid in workers]
            return bool(holders)

        eventually(look, "a process that loads")
        (pid,) = holders
        worker = workers[pid]
        assert said(worker) == "loading"
        return worker

    def kill(worker: subprocess.Popen[str]) -> None:
        os.kill(worker.pid, signal.SIGKILL)
        workers.pop(worker.pid).communicate()

    try:
        kill(loader())  # before it has anything
        second = loader()
        go_on(second)
        assert said(second) == "publishing"
        eventually(lambda: any((pool.name, pool.state) == (name, "draft") for pool in client.pools()), "its draft")
        kill(second)  # with a draft half full
        third = loader()
        for _ in range(2):
            go_on(third)
        assert said(third) == "publishing"
        told = [begun(lambda each=each: said(each)) for each in workers.values()]  # type: ignore[misc]
        total = f"{sum(tensor.double().sum().item() for tensor in loaded().state_dict().values()):.6f}"
        assert sorted(each.result() for each in told) == sorted([f"loaded {total}", *[f"bound {total}"] * 5])
        assert [(pool.version, pool.leases) for pool in client.pools() if pool.name == name] == [(1, 6)]
    finally:
        for worker in workers.values():
            worker.kill()
            worker.communicate()
    eventually(lambda: [pool.leases for pool in client.pools() if pool.name == name] == [0], "their leases to end")


@pytest.mark.slow
def test_an_engine_needs_no_import_after_its_start_that_an_upgrade_would_refuse(tmp_path: Path) -> None:
    package = PackageCopy(tmp_path)
    script = """
import os, cubroker, cubroker.integrations.engine_loader
os.utime(cubroker.__file__)
from cubroker.client import digests, draft, follow, publish, synchronization
"""
    subprocess.run([sys.executable, "-c", script], env=package.environ, check=True)
