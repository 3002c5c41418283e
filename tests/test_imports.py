"""Which package may import which, in the source and in a running interpreter."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ARROWS: dict[str, set[str]] = {
    "protocol": set(),
    "driver": {"driver.host"},
    "driver.host": {"driver"},
    "server.store": {"driver", "protocol"},
    "server.ledger": {"protocol"},
    "server.transport": {"driver", "protocol", "server", "server.ledger", "server.store"},
    "server.config": {"driver", "protocol", "server.ledger", "server.transport"},
    "server.devices": {"driver", "protocol", "server", "server.config", "server.ledger", "server.store"},
    "server.monitoring": {"protocol", "server.config", "server.ledger", "server.transport"},
    "server.keeper": {"protocol", "server", "server.store"},
    "server": {
        "driver",
        "protocol",
        "server.config",
        "server.devices",
        "server.ledger",
        "server.monitoring",
        "server.store",
        "server.transport",
    },
    "client.transport": {"client", "protocol"},
    "client.memory": {"client", "client.transport", "driver", "protocol"},
    "client": {"client.loading", "client.memory", "client.transport", "driver", "protocol"},
    "client.loading": {"client", "client.transport", "driver", "protocol"},
    "integrations": {"client", "protocol"},
    "integrations.cluster": {"client", "client.loading", "client.transport", "protocol"},
    "cli": {
        "client",
        "client.loading",
        "client.transport",
        "driver",
        "integrations",
        "integrations.cluster",
        "protocol",
        "server",
        "server.config",
        "server.keeper",
        "server.monitoring",
        "server.store",
        "server.transport",
    },
    "cli.doctor": {
        "cli",
        "client",
        "client.transport",
        "driver",
        "driver.host",
        "protocol",
        "server",
        "server.config",
        "server.transport",
    },
    "cubroker": {"cli", "client", "client.transport", "driver", "protocol"},
}
"""Each folder of the house, and the other folders whose modules it names, be it in a function or for type checkers.

An arrow that is not here is a new dependency: think twice, then add it. An arrow that nothing uses any more goes.
"""

ALIASES = {"cubroker.deprecated"}
"""Forwards old names of modules to the new ones: the only module whose arrows point up."""

TRANSPORT = ("zmq", "cuda", "asyncio", "socket", "selectors", "ssl")
"""What the protocol, which is pure data, has no use for."""


@cache
def house() -> dict[str, Path]:
    """The path of every module of cubroker, by its full name."""
    found: dict[str, Path] = {}
    for package in ("", *sorted({name.partition(".")[0] for name in ARROWS} - {"cubroker"})):
        spec = importlib.util.find_spec(f"cubroker.{package}".rstrip("."))
        assert spec is not None
        for root in map(Path, spec.submodule_search_locations or ()):
            for path in root.rglob("*.py") if package else root.glob("*.py"):
                parts = ("cubroker", package, *path.relative_to(root).with_suffix("").parts)
                found[".".join(part for part in parts if part not in ("", "__init__"))] = path
    return found


def sources(package: str) -> Iterator[tuple[str, Path]]:
    """Every module of ``cubroker.package``, by its full name."""
    return (pair for pair in house().items() if f"{pair[0]}.".startswith(f"cubroker.{package}."))


def folder(module: str) -> str:
    """The folder of a module: ``client.memory``; ``cubroker`` is the root itself."""
    package = module if house()[module].name == "__init__.py" else module.rpartition(".")[0]
    return package.removeprefix("cubroker.")


def named(source: str) -> Iterator[str]:
    """The names that a source imports, wherever it does: in functions and for type checkers, or by a text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (f"{node.module}." if node.module else "")
            yield from (f"{start}{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cubroker."):
            yield node.value


@cache
def imports(module: str) -> set[str]:
    """The other modules of cubroker that a module names. ``from package import name`` is the package's, or a module."""
    found = set()
    for name in named(house()[module].read_text()):
        while name not in house() and "." in name:
            name = name.rpartition(".")[0]
        found.add(name)
    return found & house().keys() - {module}


def loaded_by(*modules: str) -> set[str]:
    """The modules that a fresh interpreter has loaded once it has imported ``modules``, beside those it starts with."""
    script = "import json, sys; before = set(sys.modules); " + "".join(f"import {module}; " for module in modules)
    result = subprocess.run(
        [sys.executable, "-c", f"{script}print(json.dumps(sorted(set(sys.modules) - before)))"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")},
    )
    return set(json.loads(result.stdout))


def under(loaded: set[str], *packages: str) -> set[str]:
    return {name for name in loaded if any(f"{name}.".startswith(f"{package}.") for package in packages)}


def modules_of(package: str) -> list[str]:
    return [name for name, _ in sources(package) if not name.endswith(".__main__")]


PURE = ("cubroker.protocol", "cubroker.server.ledger")
"""What the ledger is made of."""

CLOCKS = ("time", "threading", "concurrent", "os", "select", "logging")
"""What a ledger that is told everything has no use for either."""


def test_the_ledger_names_nothing_of_the_shell_around_it_no_socket_and_no_clock() -> None:
    ledger = {name: path.read_text() for name, path in sources("server") if name.startswith("cubroker.server.ledger")}
    foreign = {
        (module, name)
        for module, source in ledger.items()
        for name in named(source)
        if under({name}, "cubroker", *TRANSPORT, *CLOCKS) and not under({name}, *PURE)
    }
    assert len(ledger) > 15
    assert not foreign


def test_every_folder_of_the_house_has_its_arrows() -> None:
    assert {folder(module) for module in house()} == ARROWS.keys()


@pytest.mark.parametrize("name", ARROWS)
def test_a_folder_names_the_folders_below_it_and_no_other(name: str) -> None:
    arrows = {
        (folder(other), f"{module} imports {other}")
        for module in house().keys() - ALIASES
        if folder(module) == name
        for other in imports(module)
        if folder(other) != name
    }
    forbidden = sorted(what for target, what in arrows if target not in ARROWS[name])
    assert not forbidden, f"no arrow of {name} allows these imports"
    unused = sorted(ARROWS[name] - {target for target, _ in arrows})
    assert not unused, f"nothing in {name} imports from these folders: take them out of ARROWS"


def test_no_imports_go_in_a_circle_even_for_type_checkers() -> None:
    graph = {module: imports(module) for module in house().keys() - ALIASES}
    try:
        assert len(list(TopologicalSorter(graph).static_order())) >= len(graph)
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.slow
def test_no_import_is_relative() -> None:
    assert not [module for module, path in house().items() for name in named(path.read_text()) if name.startswith(".")]


def test_the_protocol_names_no_socket_no_event_loop_and_no_device_even_in_a_function() -> None:
    assert not under({name for _, path in sources("protocol") for name in named(path.read_text())}, *TRANSPORT)


def test_imports_are_seen_wherever_they_stand() -> None:
    source = """
import a.b
def f():
    from cubroker import server
    if TYPE_CHECKING:
        import cubroker.client as c
    from .. import driver
    import_module("cubroker.server.main")
"""
    assert set(named(source)) == {"a.b", "cubroker.server", "cubroker.client", "..driver", "cubroker.server.main"}


def test_the_protocol_loads_no_socket_no_event_loop_and_no_device() -> None:
    loaded = loaded_by(*modules_of("protocol"))
    assert "cubroker.protocol.messages" in loaded
    assert not under(loaded, *TRANSPORT)
    assert not under(loaded, "cubroker.driver", "cubroker.server", "cubroker.client", "cubroker.cli")


def test_the_driver_loads_nothing_else_of_cubroker_and_no_transport() -> None:
    loaded = loaded_by(*modules_of("driver"))
    assert "cubroker.driver" in loaded
    assert not under(
        loaded, "cubroker.protocol", "cubroker.server", "cubroker.client", "cubroker.cli", "zmq", "asyncio"
    )


def test_the_broker_process_never_loads_the_client_or_zeromq() -> None:
    loaded = loaded_by("cubroker.server.main")
    assert "cubroker.server.ledger.events" in loaded
    assert not under(loaded, "cubroker.client", "cubroker.cli", "zmq", "torch", "numpy")


def test_the_gateway_process_loads_no_device_no_event_loop_and_no_messages() -> None:
    loaded = loaded_by("cubroker.server.transport.gateway")
    assert "zmq" in loaded
    assert not under(loaded, "cubroker.protocol", "msgspec")
    assert not under(loaded, "cuda", "cubroker.driver", "cubroker.client", "cubroker.cli", "asyncio", "torch", "numpy")


def test_a_keeper_loads_no_device_no_event_loop_and_no_broker() -> None:
    loaded = loaded_by("cubroker.cli.main", "cubroker.cli.keep")
    assert "cubroker.server.keeper.keeper" in loaded
    assert not under(loaded, "zmq", "cuda", "cubroker.driver", "cubroker.client", "asyncio", "numpy")
    assert not under(loaded, "cubroker.server.ledger", "cubroker.server.broker", "multiprocessing", "rich", "torch")


def test_a_probe_loads_no_device_no_transport_and_no_arrays() -> None:
    loaded = loaded_by("cubroker.cli.main", "cubroker.cli.broker")
    assert "cubroker.client.transport.handshake" in loaded
    assert not under(loaded, "zmq", "cuda", "cubroker.driver", "asyncio", "numpy", "rich")


UNUSED = (
    *("draft", "publish", "delta", "loading", "digests", "synchronization", "follow"),
    "memory.multicast",
)
"""The modules of the client that a process which attaches to a pool of a published version has no use for."""

UNUSED_BELOW = ("host", "multicast", "peer_access", "kernels")
"""The same of the driver, on a GPU."""


def test_a_client_loads_no_server_no_framework_and_nothing_that_an_attach_does_not_use() -> None:
    loaded = loaded_by("cubroker.client.broker")
    assert "cubroker.client" in loaded
    assert not under(loaded, *(f"cubroker.client.{name}" for name in UNUSED))
    assert not under(loaded, *(f"cubroker.driver.{name}" for name in UNUSED_BELOW))
    assert not under(loaded, "cubroker.server", "cubroker.cli", "torch", "transformers", "safetensors")
    assert not under(loaded, "asyncio", "dataclasses", "msgpack", "difflib")


@pytest.mark.slow
def test_a_state_dict_takes_no_more_than_the_client_and_torch() -> None:
    loaded = loaded_by("cubroker.integrations.torch")
    assert not under(loaded, *(f"cubroker.client.{name}" for name in UNUSED))
    assert not under(loaded, *(f"cubroker.driver.{name}" for name in UNUSED_BELOW))


REFERENCE = re.compile(r":(?:mod|class|func|data|exc):`[~!]?(?:[^`<]*<)?(cubroker(?:\.\w+)+)>?`")
"""A module or one of its names, as docstrings refer to it."""


def test_what_docstrings_refer_to_is_there() -> None:
    stale = [
        f"{module}: {name}"
        for module, path in house().items()
        for name in REFERENCE.findall(path.read_text())
        if not _is_there(name)
    ]
    assert not stale


def _is_there(name: str) -> bool:
    """Whether a module of cubroker has that name, or defines, imports or assigns it."""
    module, _, last = name.rpartition(".")
    return name in house() or (module in house() and last in _names(module))


def _names(module: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(house()[module].read_text())))
    defined = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    imported = {
        alias.asname or alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    return defined | imported | {node.id for node in nodes if isinstance(node, ast.Name)}
