"""Fetching and following as a program calls them: with a process of their own, and NIXL in it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from math import inf
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from cubroker.client import Broker
from cubroker.integrations.cluster import fetch as fetching
from cubroker.integrations.cluster import messages
from cubroker.integrations.cluster.fetch import fetch, follow
from cubroker.integrations.cluster.messages import CurrentVersion, Fetched, Open, PeerRefusal
from cubroker.protocol.errors import CubrokerError, Denied, Invalid, NotFound, Unavailable, Unsupported
from tests.brokers import BrokerProcess, eventually, serving
from tests.cluster import ENGINE, ExporterProcess, exporting, need_engine
from tests.unit.integrations.cluster.hosts import HOST, LAYOUT, Certificates, children, content, publish
from tests.unit.integrations.cluster.liar import lying
from tests.unit.integrations.cluster.test_fetch_process import version
from tests.unit.server.processes import alive

need_engine()


@pytest.fixture(scope="module")
def source() -> Iterator[BrokerProcess]:
    """The broker of another host."""
    with serving() as process:
        yield process


@pytest.fixture(scope="module")
def exporter(source: BrokerProcess, certificates: Certificates) -> Iterator[ExporterProcess]:
    with exporting(source.directory, certificates.host) as process:
        yield process


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENGINE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fetching, "PAUSES", (0.05, 0.2))


def held(directory: Path, name: str) -> bytes:
    with Broker(directory) as broker, broker.attach(name, device=0) as pool:
        pool.check()
        return pool["a"].tobytes() + pool["b"].tobytes()


def processes() -> list[int]:
    """The processes that fetch for this one."""
    return children(fetching.MODULE)


@pytest.mark.slow
def test_a_version_comes_over_and_says_how_far_it_is(
    source: BrokerProcess, exporter: ExporterProcess, certificates: Certificates, directory: Path, name: str
) -> None:
    publish(source.directory, name)
    reports: list[tuple[int, int]] = []
    options: dict[str, Any] = {"directory": directory, "certificates": certificates.host}
    done = fetch(name, [exporter.address], progress=lambda *each: reports.append(each), **options)
    assert (done.fetched, done.version, done.sources) == (True, 1, (exporter.address,))
    assert reports[-1] == (LAYOUT.nbytes, LAYOUT.nbytes)
    assert held(directory, name) == content()
    again = fetch(name, [exporter.address], if_absent=True, owner=os.getuid(), **options)
    assert (again.fetched, again.version) == (False, 1)
    with pytest.raises(NotFound, match=f"{exporter.address}: .*has no {name}@9"):
        fetch(name, [exporter.address], version=9, **options)
    assert not processes()


@pytest.mark.slow
def test_versions_are_followed_over_the_end_of_their_source(
    source: BrokerProcess, certificates: Certificates, directory: Path, name: str
) -> None:
    with socket.create_server((HOST, 0)) as server:
        address = f"{HOST}:{server.getsockname()[1]}"
    failures: list[CubrokerError] = []
    found: list[Fetched] = []
    publish(source.directory, name, seed=1)
    versions = follow(
        name, [address], directory=directory, certificates=certificates.host, failed=failures.append, patience=5.0
    )
    with exporting(source.directory, certificates.host, listen=address):
        assert next(versions).version == 1

    def next_one() -> None:
        found.append(next(versions))

    thread = Thread(target=next_one)
    thread.start()
    eventually(lambda: len(failures) > 2, "the source to be missed")
    with exporting(source.directory, certificates.host, listen=address):  # the same version: nothing new
        publish(source.directory, name, seed=2)
        thread.join()
        assert [each.version for each in found] == [2]
        assert held(directory, name) == content(2)
        versions.close()  # type: ignore[attr-defined]
    # The first version may have ended between its announcement and its fetch.
    assert {type(each) for each in failures if not isinstance(each, Unavailable)} <= {NotFound}


def test_errors_that_do_not_pass_end_what_follows(certificates: Certificates, directory: Path, name: str) -> None:
    options: dict[str, Any] = {"directory": directory, "certificates": certificates.host}
    for refused, error in ((PeerRefusal("denied", "not you"), Denied), (b"\0\0\0\1\xc1", Invalid)):
        with lying(certificates.host, {"PeerHello": refused}) as liar, pytest.raises(error):
            next(follow(name, [str(liar.address)], **options))
    with pytest.raises(Unavailable, match="no host is known"):
        next(follow(name, [], **options))
    with pytest.raises(Invalid, match="cannot name a pool"):
        next(follow("a b", ["gpu-1"], **options))
    with pytest.raises(NotFound, match=r"ca\.pem"):
        next(follow(name, ["gpu-1"], certificates=directory))


def test_the_users_whose_version_is_accepted_are_in_the_order(
    certificates: Certificates, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[messages.Order] = []

    def carry_out(order: messages.Order, *_: object) -> Fetched:
        orders.append(order)
        return Fetched("m", 1, 1, 1, 0.0, 0.0, (), fetched=True)

    monkeypatch.setattr(fetching, "carry_out", carry_out)
    monkeypatch.setenv("CUBROKER_OWNER", "7")
    options: dict[str, Any] = {"directory": directory, "certificates": certificates.host, "if_absent": True}
    fetch("m", ["gpu-1"], owner=[1, 2], **options)
    fetch("m", ["gpu-1"], **options)
    assert [order.owners for order in orders] == [(1, 2), (7,)]


def test_what_follows_goes_to_the_next_host_and_yields_only_what_is_new(
    certificates: Certificates, directory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = iter([False, True, False, True])
    orders: list[messages.Order] = []

    def carry_out(order: messages.Order, progress: object) -> Fetched:
        assert order.if_changed
        orders.append(order)
        return Fetched(name, 1, 1, 1, 0.0, 0.0, (), next(outcomes))

    monkeypatch.setattr(fetching, "carry_out", carry_out)

    def news(_: object, send: Any) -> None:
        for number in (1, 1, 2, 2, 3, 3, 4):  # repeated, so that this side notices a host that is gone
            send(messages.frame(CurrentVersion(number)))
            eventually(lambda number=number: len(orders) >= number, "the version to be fetched")

    failures: list[CubrokerError] = []
    with (
        lying(certificates.host, {"WatchPool": PeerRefusal("unavailable", "not now")}) as one,
        lying(certificates.host, {"WatchPool": news}) as two,
    ):
        peers = [str(one.address), str(two.address)]
        with closing(  # type: ignore[type-var]
            follow(name, peers, directory=directory, certificates=certificates.host, failed=failures.append)
        ) as versions:
            assert [next(versions).fetched for _ in range(2)] == [True, True]
        assert [(order.version, order.leader) for order in orders] == [(n, str(two.address)) for n in (1, 2, 3, 4)]
    assert [each.message for each in failures] == ["not now"]


# -- the process -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_that_is_killed_is_an_error(certificates: Certificates, directory: Path, name: str) -> None:
    with lying(certificates.host) as liar:
        liar.opens(None, name)

        def kill() -> None:
            eventually(lambda: liar.asked(Open), "the fetch")
            (pid,) = processes()
            os.kill(pid, signal.SIGKILL)

        thread = Thread(target=kill)
        thread.start()
        why = f"the process that fetched {name} was ended by SIGKILL: the engine failed, or was killed; `cubroker ls`"
        with pytest.raises(Unavailable, match=why):
            fetch(name, [str(liar.address)], directory=directory, certificates=certificates.host)
        thread.join()


CALLER = """
import sys
from cubroker.integrations.cluster.fetch import fetch
name, address, directory, certificates = sys.argv[1:]
fetch(name, [address], directory=directory, certificates=certificates, patience=600.0)
"""


@pytest.mark.slow
def test_with_the_caller_the_process_and_the_draft_end(certificates: Certificates, directory: Path, name: str) -> None:
    with lying(certificates.host) as liar, Broker(directory) as broker:
        liar.opens(version(metadata=b"garbage"), name)
        arguments = [name, str(liar.address), str(directory), str(certificates.host)]
        with subprocess.Popen([sys.executable, "-c", CALLER, *arguments]) as caller:
            try:  # there is a draft before its writer has the lease
                eventually(lambda: any(client.leases for client in broker.clients()), "the writer of the draft")
                (writer,) = [client.pid for client in broker.clients() if client.leases]
                assert [pool.state for pool in broker.pools()] == ["draft"]
            finally:
                caller.kill()
        eventually(lambda: not broker.pools(), "the draft to go")
        eventually(lambda: not alive(writer), "the process to end")


@pytest.mark.parametrize(
    ("number", "name_of_it"), [(signal.SIGSEGV, "SIGSEGV"), (signal.SIGRTMIN + 1, f"signal {signal.SIGRTMIN + 1}")]
)
def test_a_signal_that_ends_the_process_is_named(
    certificates: Certificates,
    directory: Path,
    name: str,
    number: int,
    name_of_it: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "killed.py").write_text(f"import os; os.kill(os.getpid(), {number:d})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(fetching, "MODULE", "killed")
    with pytest.raises(Unavailable, match=f"was ended by {name_of_it}: the engine failed, or was killed"):
        fetch(name, ["gpu-1"], directory=directory, certificates=certificates.host)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("this", "the process of the transfer sent a line that cannot be decoded"),
        ("no_such_module", "ended with status 1; its log says why; `cubroker ls` says whether it is there"),
    ],
)
def test_a_process_that_does_not_work_is_an_error(
    certificates: Certificates, directory: Path, name: str, module: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "MODULE", module)
    with pytest.raises(Unavailable, match=why):
        fetch(name, ["gpu-1"], directory=directory, certificates=certificates.host)


def test_a_process_that_the_system_does_not_start_is_an_error(
    certificates: Certificates, directory: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(Unavailable, match=f"the process that fetches {name} cannot be started: No such file"):
        fetch(name, ["gpu-1"], directory=directory, certificates=certificates.host)


def test_without_nixl_the_extra_is_named(
    certificates: Certificates, directory: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("nixl", "nixl_cu13", "nixl_cu12"):
        (tmp_path / f"{module}.py").write_text(
            "raise ModuleNotFoundError(f'No module named {__name__}', name=__name__)"
        )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(Unsupported, match=r"needs nixl.*, which is not installed: pip install 'cubroker\[nixl\]'"):
        fetch(name, ["gpu-1"], directory=directory, certificates=certificates.host)
    publish(directory, name)
    done = fetch(name, ["gpu-1"], if_absent=True, directory=directory, certificates=certificates.host)
    assert not done.fetched


@pytest.mark.parametrize(
    ("arguments", "error", "why"),
    [
        ({"name": "a b"}, Invalid, "cannot name a pool"),
        ({"version": -1}, Invalid, "version"),
        ({"version": 0}, Invalid, "version"),
        ({"width": 0}, Invalid, "width is 0"),
        ({"patience": 0.0}, Invalid, "patience is 0"),
        ({"patience": inf}, Invalid, "patience is inf s; it has to be more than 0, up to 604800"),
        ({"connect_timeout": 0.0}, Invalid, "connect_timeout is 0 s; it has to be more than 0, up to 604800"),
        ({"connect_timeout": inf}, Invalid, "connect_timeout is inf s"),
        ({"wait": -1.0}, Invalid, r"a wait of -1\.0 seconds"),
        ({"wait": inf}, Invalid, "a wait of inf seconds"),
        ({"directory": ""}, Invalid, "an empty path as the directory of the broker"),
        ({"devices": [], "if_absent": True}, Invalid, "devices is empty; name at least one, or leave it out"),
        ({"devices": "GPU-1"}, Invalid, r"devices is 'GPU-1', and no list; pass \['GPU-1'\]"),
        ({"devices": 0}, Invalid, r"devices is 0, and no list; pass \[0\]"),
        ({"sources": "gpu-1"}, Invalid, r"sources is 'gpu-1', and no list; pass \['gpu-1'\]"),
        ({"width": 1.5}, Invalid, r"an argument of this fetch is of another type: .*int.*\$\.width"),
        ({"share": ...}, Invalid, "an argument of this fetch is of another type"),
        ({"devices": b"ab"}, Invalid, "devices is b'ab', and no list"),
        ({"durable": "no"}, Invalid, "durable='no' is neither True nor False"),
        ({"if_absent": 2}, Invalid, "if_absent=2 is neither True nor False"),
        ({"patience": "5"}, Invalid, r"of another type: .*float.*\$\.patience"),
        ({"directory": "/tmp/\udcff"}, Invalid, r"'/tmp/\\udcff' is not UTF-8"),
        ({"certificates": "/nonexistent"}, NotFound, r"there is no /nonexistent/ca\.pem"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_an_error_before_a_process_starts(
    certificates: Certificates,
    directory: Path,
    arguments: dict[str, Any],
    error: type[CubrokerError],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetching, "MODULE", "this")
    options = {"name": "m", "sources": ["gpu-1"], "directory": directory, "certificates": certificates.host}
    with pytest.raises(error, match=why):
        fetch(**options | arguments)
