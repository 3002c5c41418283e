"""Commands that change something say which broker they found, unless its user has named it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import checkpoints
from tests.brokers import BrokerProcess
from tests.unit.cli.processes import run_as_guest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path / "x.safetensors", checkpoints.filled(checkpoints.ODD_SHAPES))


@pytest.mark.slow
def test_a_broker_that_was_found_is_said(broker: BrokerProcess, path: Path) -> None:
    here = broker.directory
    loaded = run_as_guest(here, "load", "x", path)
    assert loaded.stdout.startswith(f"x@1 on {here}: {len(checkpoints.ODD_SHAPES)} tensors, ")
    assert run_as_guest(here, "load", "x", path, "--if-absent").stdout.startswith(f"x@1 on {here}: already there (")
    retired = run_as_guest(here, "retire", "x")
    assert retired.stdout == f"x@1 on {here} is retired; its memory is freed now.\n"
    drained = run_as_guest(here, "drain")
    assert drained.stderr == f"the broker on {here} lends nothing new\n"
    assert drained.stdout == "Nothing is held any more. The broker lends nothing until: cubroker drain --off\n"
    assert run_as_guest(here, "drain", "--off").stdout == f"The broker on {here} lends again.\n"


@pytest.mark.slow
def test_a_broker_that_was_named_is_not_said_and_json_is_as_it_was(broker: BrokerProcess, path: Path) -> None:
    here = broker.directory
    for number, named in enumerate((["--directory", here], []), 1):
        variables = {} if named else {"CUBROKER_DIR": str(here)}
        loaded = run_as_guest(here, *named, "load", "x", path, **variables)
        assert (loaded.stderr, loaded.stdout[:5]) == ("loading x\n", f"x@{number}: ")
        retired = run_as_guest(here, "retire", "x", *named, **variables)
        assert retired.stdout == f"x@{number} is retired; its memory is freed now.\n"
        assert run_as_guest(here, *named, "drain", **variables).stderr == ""
        assert run_as_guest(here, *named, "drain", "--off", **variables).stdout == "The broker lends again.\n"
    assert run_as_guest(here, "load", "x", path, "--json").stderr == "loading x\n"
    retired = run_as_guest(here, "retire", "x", "--json")
    assert (retired.stderr, list(json.loads(retired.stdout))) == ("", ["schema", "name", "version", "leases"])
