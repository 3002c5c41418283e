"""A process whose package is replaced on disk keeps its code, and is told what it cannot import any more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cubroker.client import Broker
from cubroker.import_guard import ImportGuard
from cubroker.protocol import Layout
from tests.brokers import BrokerProcess, serving
from tests.replaced import PackageCopy

WEIGHT = np.arange(1024, dtype=np.float32)

WORKER = """
import sys
from cubroker import Broker, Unsupported

def refused(call, *args, **options):
    try:
        call(*args, **options)
    except Unsupported as error:
        return error.message
    raise AssertionError(call)

with Broker(sys.argv[1]) as broker, broker.attach("model", device=0) as pool:
    print("attached", flush=True)
    assert sys.stdin.readline()
    print(refused(broker.follow, "model"))
    print(refused(broker.lock, "model"))
    print(refused(broker.publish, "other", {}))
    print(refused(broker.attach, "both", device=0))  # its memory is mapped on the session's own thread
    with broker.attach("model", device=0) as again:
        assert again["weight"].numpy().sum() == pool["weight"].numpy().sum() == float(sys.argv[2])
    pool.sleep()
    pool.wake()
    assert pool["weight"].numpy().sum() == float(sys.argv[2])
    print([lease.pool for client in broker.clients() for lease in client.leases])
"""


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with serving() as process, Broker(process.directory) as client:
        client.publish("model", {"weight": WEIGHT}, share="vmm")
        with client.create(
            "both", Layout.pack([("weight", "F32", (1024,))]), devices=[0, 1], share="multicast"
        ) as draft:
            draft.seal()
        yield process


def test_a_worker_keeps_its_pools_and_is_told_to_restart_for_the_rest(broker: BrokerProcess, tmp_path: Path) -> None:
    package = PackageCopy(tmp_path)
    command = [sys.executable, "-c", WORKER, str(broker.directory), str(WEIGHT.sum())]
    with subprocess.Popen(
        command, env=package.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin
        assert worker.stdout
        assert worker.stdout.readline() == "attached\n"
        package.replace("client/synchronization.py")
        said, _ = worker.communicate("go on\n")
    assert not worker.returncode
    *refusals, leases = said.splitlines()
    for module, refusal in zip(("follow", "synchronization", "digests", "memory.multicast"), refusals, strict=True):
        assert refusal.startswith(f"cannot import cubroker.client.{module}: the files in {package.root} were replaced")
        assert refusal.endswith("restart this process")
    assert leases == "['model']"


def test_a_process_that_has_imported_no_errors_gets_an_import_error(tmp_path: Path) -> None:
    package = PackageCopy(tmp_path)
    script = "import cubroker, os; os.utime(cubroker.__file__); cubroker.Broker"
    result = subprocess.run([sys.executable, "-c", script], env=package.environ, stderr=subprocess.PIPE, text=True)
    assert "ImportError: cannot import cubroker.client: " in result.stderr


def test_a_reload_adds_no_finder_and_forgets_no_upgrade(tmp_path: Path) -> None:
    package = PackageCopy(tmp_path)
    script = "import cubroker, importlib, os, sys; before = [*sys.meta_path]; os.utime(cubroker.__file__); "
    script += "importlib.reload(cubroker); assert sys.meta_path == before, sys.meta_path; import cubroker.driver"
    result = subprocess.run([sys.executable, "-c", script], env=package.environ, stderr=subprocess.PIPE, text=True)
    assert "ImportError: cannot import cubroker.driver: " in result.stderr


def test_a_process_keeps_its_release_when_a_link_to_it_leads_to_another(tmp_path: Path) -> None:
    for release in ("1", "2"):
        (tmp_path / release).mkdir()
        package = PackageCopy(tmp_path / release)
    (link := tmp_path / "current").symlink_to("1")
    script = "import cubroker, os, sys; os.unlink(sys.argv[1]); os.symlink('2', sys.argv[1]); import cubroker.client; "
    script += "print(cubroker.client.__file__); os.utime(sys.argv[2]); import cubroker.driver"
    command = [sys.executable, "-c", script, str(link), str(tmp_path / "1" / "cubroker" / "__init__.py")]
    environ = package.environ | {"PYTHONPATH": str(link)}
    result = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert result.stdout == f"{tmp_path / '1' / 'cubroker' / 'client' / '__init__.py'}\n"
    assert "cannot import cubroker.driver: the files in " in result.stderr


def test_other_packages_are_imported_as_before(tmp_path: Path) -> None:
    (file := tmp_path / "__init__.py").touch()
    guard = ImportGuard("package", str(file))
    file.unlink()
    guard.find_spec("json", None)
    guard.find_spec("packages.module", None)
    with pytest.raises(ImportError, match=r"package\.module.* restart this process"):
        guard.find_spec("package.module", None)


def test_a_file_of_another_size_is_of_another_release_even_with_the_same_time(tmp_path: Path) -> None:
    (file := tmp_path / "__init__.py").touch()
    guard, before = ImportGuard("package", str(file)), file.stat().st_mtime_ns
    file.write_text("# another release")
    os.utime(file, ns=(before, before))
    with pytest.raises(ImportError, match="restart this process"):
        guard.find_spec("package.module", None)


def test_neither_a_link_from_another_environment_nor_an_archive_counts_as_an_upgrade(tmp_path: Path) -> None:
    (file := tmp_path / "__init__.py").touch()
    guard = ImportGuard("package", str(file))
    os.link(file, tmp_path / "elsewhere.py")
    guard.find_spec("package.module", None)
    ImportGuard("package", str(tmp_path / "packages.zip" / "__init__.py")).find_spec("package.module", None)
