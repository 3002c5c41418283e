"""What shells are offered, as they ask for it; ``tests/unit/deploy/test_generated.py`` has bash itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.protocol import Layout
from tests.brokers import BrokerProcess
from tests.unit.cli.processes import environment, run, run_as_guest

BASH = {"_CUBROKER_COMPLETE": "bash_complete"}


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
