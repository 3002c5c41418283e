"""Weights that change: the trainer and its rollout workers, and the ways that docs/live-weights.md tells apart."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from cubroker import Broker, NotFound, Pool, Retired, Unsupported, aio
from tests.brokers import PATIENCE, BrokerProcess, eventually
from tests.forkserver import TORCH, Forked
from tests.sampling import WHOLE
from tests.unit.examples.test_examples import EXAMPLES, WEIGHTS, Here, here
from tests.unit.server.configured import configured

__all__ = ["here"]

POLICY = "examples/policy"
VERSIONS = 20 if WHOLE else 5


def started_example(broker: BrokerProcess, example: str, argument: str) -> subprocess.Popen[str]:
    program = ["-c", "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"]
    return Forked(
        [*program, str(EXAMPLES / example), argument],
        preload=TORCH,
        measured=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"CUBROKER_DIR": str(broker.directory)},
    )


def said(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return out.splitlines()


@pytest.mark.slow
def test_two_workers_take_each_version_of_a_trainer_in_place(lender: BrokerProcess, client: Broker) -> None:
    processes = [started_example(lender, "rollout.py", worker) for worker in "ab"]
    try:
        eventually(lambda: len(client.look().waiters) == 2, "both workers to wait for the first version")
        processes.append(started_example(lender, "trainer.py", str(VERSIONS)))
        *workers, trainer = map(said, processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    *rounds, end = trainer
    published = [re.match(r"version (\d+): loss", line) for line in rounds]
    numbers = [int(match[1]) for match in published if match]
    assert len(numbers) == len(rounds) == VERSIONS
    # One, if both workers have always left the last version before the trainer looks.
    assert re.fullmatch(f"{POLICY}@{numbers[-1]} is current; versions held at a time: [12] at most", end)
    for worker, lines in zip("ab", workers, strict=True):
        assert lines == [
            *(f"{worker}: version {number}, 50 batches as the trainer's" for number in numbers),
            f"{worker}: {VERSIONS} versions, one model, the same addresses",
        ]


def test_a_worker_ends_when_its_outputs_are_those_of_other_weights(
    lender: BrokerProcess, client: Broker, here: Here
) -> None:
    shapes = {"0.weight": (512, 64), "0.bias": (512,), "2.weight": (8, 512), "2.bias": (8,)}
    shapes |= {"probe.input": (4, 64), "probe.output": (4, 8)}
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    version = client.publish(POLICY, arrays | {"probe.left": np.array(0)})
    with pytest.raises(SystemExit, match=f"^a: version {version}: the outputs are not the trainer's"):
        here.run(lender, EXAMPLES / "rollout.py", "a")
    gc.collect()  # the traceback has the worker's tensors


# -- which way -----------------------------------------------------------------------------------------


def weights(number: float) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float32]]]:
    return {"weight": np.full(8, number, np.float32)}


def test_a_rolling_update_has_both_versions_until_the_old_one_is_closed(client: Broker, name: str) -> None:
    client.publish(name, weights(1))
    with client.attach(name) as old:
        client.publish(name, {"weight": np.zeros(3, np.float32), "bias": np.zeros(1, np.float32)})  # another layout
        with client.attach(name) as fresh:
            assert (old.version, fresh.version) == (1, 2)
            assert old["weight"].numpy().tolist() == [1] * 8
            assert sorted(fresh) == ["bias", "weight"]


def test_an_adapter_in_a_pool_of_its_own_changes_under_a_base_that_stays(client: Broker, name: str) -> None:
    client.publish(f"{name}/base", weights(1))
    client.publish(f"{name}/adapter", {"lora": np.zeros(2, np.float32)})
    with client.attach(f"{name}/base") as base, client.attach(f"{name}/adapter") as adapter:
        weight, lora = base["weight"].numpy(), adapter["lora"].numpy()
        client.publish(f"{name}/adapter", {"lora": np.ones(2, np.float32)})
        assert next(adapter.follow(switch=True)) == 2
        assert (lora.tolist(), weight.tolist(), base.version) == ([1, 1], [1] * 8, 1)
        client.publish(f"{name}/adapter", {"lora": np.ones(4, np.float32)})
        with pytest.raises(Unsupported, match="lora"):
            adapter.switch()
        del weight, lora


def test_a_canary_uses_the_new_version_and_goes_back_while_new_workers_attach_to_the_old_one(name: str) -> None:
    with configured("keep = 1") as lender, Broker(lender.directory) as broker:
        broker.publish(name, weights(1))
        with broker.attach(name, version=1) as canary:
            weight = canary["weight"].numpy()
            broker.publish(name, weights(2))
            assert (canary.switch(2), weight[0]) == (2, 2)
            with broker.attach(name, version=1) as worker:  # kept by the setting alone
                assert worker["weight"].numpy()[0] == 1
            assert (canary.switch(1), weight[0]) == (1, 1)
            del weight


def test_without_a_lease_or_the_setting_an_older_version_is_gone(client: Broker, name: str) -> None:
    for number in (1, 2):
        client.publish(name, weights(number))
    with pytest.raises((NotFound, Retired)):
        client.attach(name, version=1)


def test_an_older_version_that_is_published_again_reaches_those_who_follow(client: Broker, name: str) -> None:
    client.publish(name, weights(1))
    with client.attach(name) as good, client.attach(name) as follower:
        weight, versions = follower["weight"].numpy(), follower.follow(switch=True)
        client.publish(name, weights(2))
        assert (next(versions), weight[0]) == (2, 2)
        assert client.publish(name, good) == 3
        assert (next(versions), weight[0]) == (3, 1)
        del weight


# -- samples -------------------------------------------------------------------------------------------


def sample(heading: str, number: int = 0) -> dict[str, Any]:
    """What a sample of the page defines, once it was run; samples are counted from each heading."""
    section = WEIGHTS.read_text().partition(f"\n{heading}\n")[2]
    found = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[number]
    names: dict[str, Any] = {}
    exec(compile(found, heading, "exec"), names)
    return names


@pytest.fixture
def policy(lender: BrokerProcess, client: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """A session, a first version of the pool that the samples name, and their broker."""
    monkeypatch.setenv("CUBROKER_DIR", str(lender.directory))
    client.publish("policy", weights(1))
    yield client
    gc.collect()
    client.retire("policy")
    eventually(lambda: not client.pools(), "the end of the last lease")


def test_the_sample_of_an_update_shares_what_has_not_changed(
    lender: BrokerProcess, client: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBROKER_DIR", str(lender.directory))
    sample("### Updates")
    with client.attach("policy") as pool:
        assert (pool["embed"].numpy()[0], pool["head"].numpy()[0]) == (0, 1)
    client.retire("policy")
    eventually(lambda: not client.pools(), "its memory to be freed")


def test_the_sample_without_a_copy_publishes_what_it_wrote(
    lender: BrokerProcess, client: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUBROKER_DIR", str(lender.directory))
    sample("## Without a copy")
    assert capsys.readouterr().out == "256.0\n"
    with client.attach("policy") as pool:
        assert pool["weight"].numpy().tolist() == [1] * 256
    client.retire("policy")
    eventually(lambda: not client.pools(), "its memory to be freed")


def test_the_sample_of_a_switch_serves_the_next_version_from_the_same_arrays(policy: Broker) -> None:
    served = []

    def step(arrays: dict[str, Any]) -> bool:
        served.append((arrays["weight"].ctypes.data, arrays["weight"][0]))
        if len(served) < 3:
            policy.publish("policy", weights(len(served) + 1))
        return len(served) < 3

    sample("## Switch")["serve"](step)
    assert [value for _, value in served] == [1, 2, 3]
    assert len({address for address, _ in served}) == 1


def test_the_sample_of_following_by_switches_has_each_version_in_the_same_arrays(policy: Broker) -> None:
    seen = []

    def step(version: int, arrays: dict[str, Any]) -> bool:
        seen.append((version, arrays["weight"][0], arrays["weight"].ctypes.data))
        if len(seen) < 3:
            policy.publish("policy", weights(len(seen) + 1))
        return len(seen) < 3

    sample("## Follow", 2)["work"](step)
    first = policy.attach("policy").version - 2
    assert [each[:2] for each in seen] == [(first, 1), (first + 1, 2), (first + 2, 3)]
    assert len({address for *_, address in seen}) == 1


def test_the_sample_of_following_attaches_to_each_version(policy: Broker) -> None:
    used = []

    def use(pool: Pool) -> None:
        used.append(pool["weight"].numpy()[0])
        if len(used) == 3:
            raise Stop
        policy.publish("policy", weights(len(used) + 1))

    with pytest.raises(Stop):
        sample("## Follow")["run"](use)
    assert used == [1, 2, 3]


def test_the_sample_of_following_does_so_in_an_event_loop(policy: Broker) -> None:
    used = []

    async def use(pool: Pool) -> None:
        used.append(pool["weight"].numpy()[0])
        if len(used) == 3:
            raise Stop
        await asyncio.to_thread(policy.publish, "policy", weights(len(used) + 1))

    with pytest.raises(Stop):
        asyncio.run(sample("## Follow", 1)["run"](policy, use))
    assert used == [1, 2, 3]


def test_the_sample_of_asyncio_serves_pools_and_takes_new_adapters(policy: Broker) -> None:
    policy.publish("adapter", weights(7))
    told = []

    async def step(pools: Sequence[aio.Pool], extra: aio.Pool, version: int | None) -> bool:
        told.append((pools[0]["weight"].numpy()[0], extra["weight"].numpy()[0], version))
        if len(told) == 1:
            await asyncio.to_thread(policy.publish, "adapter", weights(8))
        return len(told) < 2

    asyncio.run(sample("## asyncio")["serve"](["policy"], step))
    assert told == [(1, 7, 1), (1, 7, 2)]
    policy.retire("adapter")


def test_the_sample_of_reconnecting_goes_on_with_the_next_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    with configured("") as process:
        monkeypatch.setenv("CUBROKER_DIR", str(process.directory))
        with Broker() as broker:
            broker.publish("policy", weights(1))
        seen = []

        def step(pool: Pool) -> bool:
            seen.append(pool["weight"].numpy()[0])
            if len(seen) == 1:
                process.kill()
                process.start()
                with Broker() as broker:
                    broker.publish("policy", weights(2))
                eventually(lambda: pool.lost, "the pool to be lost")
            return len(seen) < 2

        sample("## Reconnect")["work"](step)
        assert seen == [1, 2]


class Stop(Exception):
    """Ends a sample that goes on for ever."""
