from __future__ import annotations

import json
import os
import re
import time
from datetime import datetime
from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.protocol import Layout
from cubroker.protocol.errors import NotFound
from tests.brokers import BrokerProcess, eventually
from tests.unit.cli.processes import run

LAYOUT = Layout.pack([("x", "U8", (5,))])


@pytest.fixture
def fresh(broker: BrokerProcess) -> Path:
    """Where a broker serves that has seen nothing yet, and counts from 1."""
    return broker.directory


def told(directory: Path, subject: str) -> list[tuple[float, str]]:
    done = run("story", subject, "--directory", directory)
    assert (done.returncode, done.stderr) == (0, "")
    found = [line.split("  ", 1) for line in done.stdout.splitlines()]
    return [(datetime.fromisoformat(when).timestamp(), text) for when, text in found]


@pytest.mark.slow
def test_the_story_of_a_pool_says_what_happened_when_in_plain_words(fresh: Path) -> None:
    began = int(time.time())
    with Broker(fresh) as broker:
        with broker.create("llama", LAYOUT) as draft:
            draft.seal()
        broker.retire("llama")
        who = f"session {broker.session} (pid {os.getpid()}, uid {os.getuid()})"
        eventually(lambda: "gone" in broker.story("llama")[-1].text, "the memory to be free")
    lines = told(fresh, "llama")
    assert [text for _, text in lines][-7:] == [
        f"request 1 of {who} stopped waiting",
        "version 1 is current: its writer sealed it",
        f"{who} retires version 1",
        "version 1 is retired: a user retired it",
        "version 1 is ended: no lease holds it, and it is not to be kept",
        "memory 1 is being freed: its version ended",
        "memory 1 is gone: the device freed it",
    ]
    assert all(began <= when <= time.time() for when, _ in lines)


@pytest.mark.slow
def test_the_story_of_a_session_that_has_ended_says_what_it_held_and_what_it_was_refused(fresh: Path) -> None:
    with Broker(fresh) as broker:
        broker.create("llama", LAYOUT).seal()
        with pytest.raises(NotFound):
            broker.attach("lama")
        number = broker.session
    eventually(lambda: told(fresh, str(number))[-1][1] == "it ended", "the session to end")
    texts = [text for _, text in told(fresh, str(number))]
    assert texts[:3] == [
        f"process {os.getpid()} of user {os.getuid()} joined",
        "lease 1 on llama@1 began",
        "lease 1 on llama@1 ended",
    ]
    assert re.fullmatch(r"Attach was refused \(not_found\): no pool is named 'lama'; did you mean llama\?", texts[3])
    assert told(fresh, "llama@1") == told(fresh, "llama")
    misspelt = run("story", "lama", "--directory", fresh)
    assert misspelt.stderr == "cubroker: nothing is known of a pool lama; did you mean llama?\n"


def test_in_json_times_are_seconds(directory: Path) -> None:
    with Broker(directory) as broker:
        done = run("story", str(broker.session), "--json", "--directory", directory)
    (line,) = json.loads(done.stdout)
    assert line["text"] == f"process {os.getpid()} of user {os.getuid()} joined"
    assert abs(line["time"] - time.time()) < 3600


@pytest.mark.parametrize(("subject", "status"), [("nobody", 1), ("99", 1), ("no name", 2), ("9" * 5000, 2)])
def test_what_is_not_known_is_refused_in_one_line(directory: Path, subject: str, status: int) -> None:
    done = run("story", subject, "--directory", directory)
    assert (done.returncode, done.stdout) == (status, "")
    assert "Traceback" not in done.stderr
