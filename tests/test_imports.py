"""Which package may import which, in the source and in a running interpreter."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ARROWS = {
    "protocol": {"protocol"},
    "driver": {"driver"},
    "server": {"server", "protocol", "driver"},
    "client": {"client", "protocol", "driver"},
    "cli": {"cli", "server", "client", "protocol", "driver"},
}
"""Each package, and those whose modules it may name."""

TRANSPORT = ("zmq", "cuda", "asyncio", "socket", "selectors", "ssl")
"""What the protocol, which is pure data, has no use for."""


def sources(package: str) -> Iterator[tuple[str, Path]]:
    """Every module of ``cubroker.package``, by its full name."""
    spec = importlib.util.find_spec(f"cubroker.{package}")
    assert spec is not None
    for folder in map(Path, spec.submodule_search_locations or ()):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join(("cubroker", package, *(part for part in parts if part != "__init__"))), path


def named(source: str, *, run: bool = False) -> Iterator[str]:
    """The modules that a source names: imports wherever they stand, even in functions and for type checkers only.

    With ``run`` only those that are run: not those for type checkers.
    """
    tree = ast.parse(source)
    for node in running(tree) if run else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            if node.module:
                yield from (f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names)


def running(node: ast.AST) -> Iterator[ast.AST]:
    """What of a source is run, now or when a function is called."""
    typed = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    for child in node.orelse if typed else ast.iter_child_nodes(node):
        yield child
        yield from running(child)


def crossings(package: str) -> list[str]:
    """The imports of ``package`` that no arrow allows."""
    allowed = {f"cubroker.{name}" for name in ARROWS[package]}
    return [
        f"{module}: {name}"
        for module, path in sources(package)
        for name in named(path.read_text())
        if name.startswith(("cubroker.", "."))
        if not any(f"{name}.".startswith(f"{prefix}.") for prefix in allowed)
    ]


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


PURE = ("cubroker.protocol", "cubroker.server.ledger", "cubroker.server.store.damaged")
"""What the ledger is made of, and the error that it has in common with the journal."""

CLOCKS = ("time", "threading", "concurrent", "os", "select", "logging")
"""What a ledger that is told everything has no use for either."""


def test_the_ledger_names_nothing_of_the_shell_around_it_no_socket_and_no_clock() -> None:
    ledger = {name: path.read_text() for name, path in sources("server") if ".ledger" in name}
    foreign = {
        (module, name)
        for module, source in ledger.items()
        for name in named(source)
        if under({name}, "cubroker", *TRANSPORT, *CLOCKS) and not under({name}, *PURE)
    }
    assert len(ledger) > 20
    assert not foreign


@pytest.mark.parametrize("package", ARROWS)
def test_no_source_names_a_module_against_the_arrows(package: str) -> None:
    assert list(sources(package))
    assert crossings(package) == []


def test_no_imports_that_are_run_go_in_a_circle() -> None:
    modules = {name: path for package in ARROWS for name, path in sources(package)}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = modules.keys() & set(named(path.read_text(), run=True))
        # `from package import module` names both, and means the module.
        graph[module] = {name for name in found if not any(other.startswith(f"{name}.") for other in found)}
    assert len(list(TopologicalSorter(graph).static_order())) == len(modules)


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
"""
    assert {"a.b", "cubroker.server", "cubroker.client", ".."} <= set(named(source))
    assert {"a.b", "cubroker.server", ".."} <= set(named(source, run=True))
    assert "cubroker.client" not in set(named(source, run=True))


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
    loaded = loaded_by("cubroker.server.run")
    assert "cubroker.server.ledger.events" in loaded
    assert not under(loaded, "cubroker.client", "cubroker.cli", "zmq", "torch", "numpy")


def test_the_gateway_process_loads_no_device_and_no_event_loop() -> None:
    loaded = loaded_by("cubroker.server.gateway")
    assert "zmq" in loaded
    assert not under(loaded, "cuda", "cubroker.driver", "cubroker.client", "cubroker.cli", "asyncio", "torch", "numpy")


def test_a_keeper_loads_no_device_no_event_loop_and_no_broker() -> None:
    loaded = loaded_by("cubroker.cli.main", "cubroker.cli.keep")
    assert "cubroker.server.store.keeper" in loaded
    assert not under(loaded, "zmq", "cuda", "cubroker.driver", "cubroker.client", "asyncio", "numpy")
    assert not under(loaded, "cubroker.server.ledger", "cubroker.server.broker", "multiprocessing", "rich", "torch")


def test_a_probe_loads_no_device_no_transport_and_no_arrays() -> None:
    loaded = loaded_by("cubroker.cli.main", "cubroker.cli.ping")
    assert "cubroker.client.hello" in loaded
    assert not under(loaded, "zmq", "cuda", "cubroker.driver", "asyncio", "numpy", "rich")


def test_a_client_loads_no_server_and_no_framework() -> None:
    loaded = loaded_by("cubroker.client.broker")
    assert "cubroker.client" in loaded
    assert not under(loaded, "cubroker.server", "cubroker.cli", "torch", "transformers", "safetensors")
