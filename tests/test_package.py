"""The root of the package: its public names, what importing it loads, and what cannot take its place."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cubroker
from cubroker.protocol.status import HIDDEN_ID


def python(*arguments: str, cwd: Path | None = None) -> str:
    return subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.PIPE, text=True, cwd=cwd).stdout


@pytest.mark.parametrize("name", cubroker.__all__)
def test_every_public_name_can_be_imported_from_the_root(name: str) -> None:
    assert getattr(cubroker, name)
    assert name in dir(cubroker)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Brokers'"):
        _ = cubroker.Brokers  # type: ignore[attr-defined]


def test_importing_the_root_loads_neither_zeromq_nor_cuda_nor_numpy() -> None:
    script = "import json, sys; before = set(sys.modules); import cubroker; "
    script += "print(json.dumps([*set(sys.modules) - before]))"
    loaded = json.loads(python("-c", script))
    assert "cubroker" in loaded
    heavy = {"zmq", "cuda", "numpy", "msgspec", "asyncio", "torch", "typing"}
    assert not heavy & {name.split(".")[0] for name in loaded}


def test_the_root_is_the_command_line_too() -> None:
    assert python("-m", "cubroker", "--version") == f"cubroker, version {cubroker.__version__}\n"


def test_a_folder_of_that_name_beside_a_script_is_not_imported_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "cubroker" / "client").mkdir(parents=True)
    (tmp_path / "cubroker" / "client" / "broker.py").write_text("raise SystemExit('the checkout was imported')\n")
    (tmp_path / "script.py").write_text("import cubroker; print(cubroker.Broker.__module__)\n")
    assert python("script.py", cwd=tmp_path) == "cubroker.client.broker\n"


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("cubroker.client.torch", "state_dict"),
        ("cubroker.client.transformers", "attach_model"),
        ("cubroker.client.loader", "load"),
        ("cubroker.client.verify", "verify"),
        ("cubroker.client.dtypes", "torch_dtypes"),
        ("cubroker.client.dtypes", "torch_names"),
        ("cubroker.client.events", "SharedEvent"),
        ("cubroker.client.ipc_events", "SharedEvent"),
        ("cubroker.client.named_arrays", "layout_in"),
        ("cubroker.client.process", "Closeable"),
        ("cubroker.client.sources", "describe"),
        ("cubroker.client.update", "differing"),
        ("cubroker.integrations.runtime", "bind"),
        ("cubroker.integrations.runtime", "obtain"),
        ("cubroker.protocol.directory", "default_directory"),
        ("cubroker.protocol.dtypes", "carrier"),
        ("cubroker.protocol.infos", "PoolInfo"),
        ("cubroker.protocol.limits", "check_pool_name"),
    ],
)
def test_a_module_that_has_moved_answers_to_its_old_name_and_warns(
    old: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)
    found: dict[str, Any] = {}
    with pytest.warns(DeprecationWarning, match=f"{re.escape(old)} is now cubroker."):
        exec(f"from {old} import {name}", found)
    assert found[name].__name__ == name


def test_a_name_that_has_another_one_in_its_new_module_is_found() -> None:
    with pytest.warns(DeprecationWarning, match=r"cubroker.protocol.infos is now cubroker\."):
        from cubroker.protocol.infos import NOBODY
    assert NOBODY == HIDDEN_ID
    with pytest.warns(DeprecationWarning, match=r"cubroker.protocol.dtypes is now cubroker\.protocol\.layout"):
        from cubroker.protocol.dtypes import NAMES, named
    assert named("bfloat16") == (NAMES["bfloat16"], 1)
