"""What ``cubroker doctor`` finds on GPUs."""

from __future__ import annotations

import json
from pathlib import Path

from cubroker.driver import checked_calls, load
from tests.brokers import eventually
from tests.unit.cli.processes import environment, run


def test_memory_of_every_gpu_is_shared_by_handle_and_by_descriptor(tmp_path: Path) -> None:
    done = run("doctor", "--json", "--directory", tmp_path / "nobody")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    driver = load("cuda")
    assert [device["uuid"] for device in document["devices"]] == [device.uuid for device in driver.devices]
    for device in document["devices"]:
        kinds = device["kinds"]
        assert kinds["ipc"]["works"], kinds["ipc"]
        assert kinds["vmm"]["works"], kinds["vmm"]
        assert kinds["events"]["works"], kinds["events"]
        physical = driver.create(device["index"], driver.granularity(device["index"]), fabric=True)
        assert kinds["fabric"]["works"] is (physical.export_fabric() is not None)
        physical.release()
        assert kinds["multicast"]["works"] is not True  # nobody tried
        reached = [other.index for other in driver.devices if other.index != device["index"]]
        access = [driver.peers.can_access(device["index"], other) for other in reached]
        assert kinds["peers"]["works"] is (any(access) if access else None)
    found = {finding["name"]: finding for finding in document["host"]}
    assert found["driver"]["works"]
    assert found["driver"]["why"].startswith(f"serves CUDA {driver.version // 1000}.")


def test_multicast_that_is_switched_off_is_explained(tmp_path: Path) -> None:
    env = environment(NCCL_NVLS_ENABLE="0")
    document = json.loads(run("doctor", "--json", "--directory", tmp_path / "nobody", env=env).stdout)
    objection = checked_calls.multicast_objection(env)
    assert objection is not None
    for device in document["devices"]:
        assert device["kinds"]["multicast"]["works"] is False
        assert device["kinds"]["multicast"]["why"] == objection[1]


def test_trials_leave_the_memory_as_it_was(tmp_path: Path) -> None:
    context = load("cuda").context(0)
    before = context.memory()[0]
    assert run("doctor", "--devices", "cuda:0", "--directory", tmp_path / "nobody").returncode == 0
    eventually(lambda: context.memory()[0] >= before, "the memory to be free again")


def test_gpus_that_are_hidden_are_found_to_be(tmp_path: Path) -> None:
    env = environment(CUDA_VISIBLE_DEVICES="")
    done = run("doctor", "--devices", "cuda", "--json", "--directory", tmp_path / "nobody", env=env)
    assert done.returncode == 1
    assert "CUDA_VISIBLE_DEVICES= hides every GPU" in json.loads(done.stdout)["host"][0]["why"]
