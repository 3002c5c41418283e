"""Names, versions, sizes and devices as they are typed, and as shells complete them.

``tests/unit/deploy/test_generated.py`` has bash itself.
"""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from cubroker.cli import options
from cubroker.cli.options import Reference, find_devices
from cubroker.client import Broker
from cubroker.protocol import Layout
from cubroker.protocol.errors import Invalid, NotFound
from cubroker.protocol.status import DeviceInfo
from tests.brokers import BrokerProcess
from tests.unit.cli.processes import environment, run, run_as_guest

DEVICES = [DeviceInfo(index, uuid, "GPU", 0, 0, 0, 0) for index, uuid in ((0, "GPU-aa11"), (1, "GPU-aa22"))]

BASH = {"_CUBROKER_COMPLETE": "bash_complete"}


@pytest.mark.parametrize(
    ("given", "expected"), [("llama", Reference("llama", None)), ("a/b.c@12", Reference("a/b.c", 12))]
)
def test_a_version_follows_an_at_sign(given: str, expected: Reference) -> None:
    assert options.reference(given) == expected


@pytest.mark.parametrize("given", ["", "@1", "llama@", "llama@0", "llama@x", "llama@1@2", "llama@²", "-x", "a b"])
def test_what_is_no_reference_is_wrong_usage(given: str) -> None:
    with pytest.raises(click.BadParameter):
        options.reference(given)


def test_sizes_have_units() -> None:
    assert options.size("2MiB") == 2 << 20
    with pytest.raises(click.BadParameter, match="is no size"):
        options.size("much")


def test_devices_are_a_list_without_gaps_or_repetitions() -> None:
    assert options.device_list("0, GPU-aa22") == ("0", "GPU-aa22")
    for wrong in ("", "0,", "0,0"):
        with pytest.raises(click.BadParameter):
            options.device_list(wrong)


def test_devices_are_found_by_index_uuid_and_beginning_of_a_uuid() -> None:
    assert find_devices(["1", "GPU-aa11"], DEVICES) == ["GPU-aa22", "GPU-aa11"]
    assert find_devices(["GPU-aa2"], DEVICES) == ["GPU-aa22"]
    assert find_devices(["cuda:1", "gpu-AA1"], DEVICES) == ["GPU-aa22", "GPU-aa11"]


@pytest.mark.parametrize("choice", ["2", "GPU-bb", "GPU-aa"])
def test_an_unknown_or_ambiguous_device_is_refused_with_the_known_ones(choice: str) -> None:
    with pytest.raises(NotFound, match=r"0 \(GPU, GPU-aa11\), 1 \(GPU, GPU-aa22\)"):
        find_devices([choice], DEVICES)


def test_one_device_under_two_names_is_refused() -> None:
    with pytest.raises(Invalid, match="twice"):
        find_devices(["0", "GPU-aa11"], DEVICES)


# -- completion ----------------------------------------------------------------------------------------


def test_pools_are_those_of_the_broker_that_commands_find(broker: BrokerProcess) -> None:
    with Broker(broker.directory) as client:
        client.create("llama", Layout.pack([("x", "U8", (5,))])).seal()
    assert "llama@1" in run_as_guest(broker.directory, "ls").stdout
    done = run_as_guest(broker.directory, **BASH, COMP_LINE="cubroker show ll")
    assert (done.stdout, done.stderr) == ("plain,llama\n", "")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("metr", ["metrics.listen=", "metrics.mode=", "metrics.group=", "metrics.token_file=", "metrics.public="]),
        ("trust_root=", ["trust_root=false", "trust_root=true"]),
        ("log.level=w", ["log.level=warning"]),
        ("keep=", []),
        ("kept=", []),
    ],
)
def test_settings_are_offered_by_key_and_those_that_are_words_by_value(typed: str, offered: list[str]) -> None:
    done = run(env=environment(**BASH, COMP_LINE=f"cubroker serve --set {typed}"))
    assert done.stdout.split() == [f"plain,{each}" for each in offered]


@pytest.mark.parametrize("line", ["cubroker show ", "cubroker load x --device ", "cubroker top --device 0"])
def test_without_a_broker_nothing_is_offered_and_nothing_said(tmp_path: Path, line: str) -> None:
    done = run(env=environment(**BASH, COMP_LINE=line, CUBROKER_DIR=str(tmp_path / "nobody")))
    assert (done.stdout.strip(), done.stderr) == ("", "")
