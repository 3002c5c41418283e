"""Rate of a fetch from another broker, in GB/s, compared with a copy of the same bytes without cubroker.

The exporter and the process that fetches run on this machine.

- On GPUs one broker has the first GPU and one the last. NIXL chooses the transport between them, unless ``UCX_TLS``
  does. The bound is a plain copy between them.
- On host devices each of the two brokers is in its own network namespace. The kernel limits the rate of the link
  between them. The bound is a stream of bytes through a socket over the same link. This needs root, ``ip`` and ``tc``.
  There, three hosts also fetch at the same time from a fourth one, alternately with exporters of their own, which pass
  on what the hosts have, and without.

Without NIXL (``cubroker[nixl]``) there are no rows.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from benchmarks import model_weights
from benchmarks.harness import SHARES, one_allocation, run_alone, seconds, serving
from benchmarks.options import Plan
from benchmarks.replicate import direct, plain_copy
from benchmarks.report import Figure, median, rate, ratio
from cubroker import driver
from cubroker.client import Broker
from cubroker.client.loading.loader import load
from cubroker.integrations.cluster.fetch import fetch
from cubroker.server.hardening import python_command

if TYPE_CHECKING:
    from tests.cluster import Host

POOL = "weights"
ROUNDS = 3
CHUNK = 1 << 20
HOST = "127.0.0.1"

MOST = 10**9
"""The most bytes of a pool between GPUs, since TCP is slow."""

LINKS = {"200 Mbit/s": 64 << 20, "1 Gbit/s": 256 << 20}
"""Limits of links, and bytes of the pools that go over them."""

TOGETHER = "100 Mbit/s", 128 << 20
"""The same for several hosts: so slow that the bytes take longer than the processes, which share this machine."""

RECEIVE = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
buffer, left, began = bytearray(1 << 20), int(sys.argv[3]), time.perf_counter()
while left:
    left -= connection.recv_into(buffer, min(left, len(buffer)))
print(time.perf_counter() - began)
"""

SEND = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    chunk, left = bytes(1 << 20), int(sys.argv[2])
    while left:
        left -= connection.send(chunk[:left])
"""


def measure(plan: Plan) -> list[Figure]:
    """Measure; no figures without the engine."""
    if find_spec("nixl_cu13") is None and find_spec("nixl") is None:
        return []
    if not plan.gpu:
        if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
            return []
        single = [figure for name, nbytes in LINKS.items() for figure in _over_link(name, nbytes)]
        return [*single, *_together(*TOGETHER)]
    plan = replace(plan, nbytes=min(plan.nbytes, MOST))
    return [figure for share in SHARES for figure in _between_gpus(plan, share)]


# -- over a link ---------------------------------------------------------------------------------------


@contextmanager
def _hosts(count: int, name: str, nbytes: int) -> Iterator[Sequence[Host]]:
    """Yield hosts that are namespaces, with links of this rate; the first of them has a pool, and exports it."""
    from tests import cluster

    limit = name.removesuffix("/s").replace(" ", "").lower()
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster.network(count, Path(folder), rate=limit, devices="host:1@2GiB") as hosts,
    ):
        with Broker(hosts[0].broker.directory) as broker, broker.create(POOL, one_allocation(nbytes)) as draft:
            draft.seal(digest=True)
        with hosts[0].exporting():
            yield hosts


def _over_link(name: str, nbytes: int) -> list[Figure]:
    bounds, reads = [], []
    with _hosts(2, name, nbytes) as (one, two):
        for number in range(1 + ROUNDS):
            bound = _stream(one, two, nbytes)
            done = two.fetch(POOL, "--from", one.address)
            if not isinstance(done, dict):
                raise RuntimeError(f"the fetch failed: {done}")
            if number:
                bounds.append(bound)
                reads.append(done["read_seconds"])
    return [
        rate(f"{name}: a stream through a socket", nbytes, bounds, f"{nbytes / 1e9:.3g} GB"),
        rate(f"{name}: fetch, while bytes come", nbytes, reads, "connecting, digests"),
        ratio(f"{name}: fetch ÷ stream", bounds, reads, "of each pair"),
    ]


def _stream(one: Host, two: Host, nbytes: int) -> float:
    """Return the seconds of a stream of ``nbytes`` bytes through a socket from one host to the other."""
    send = [*one.before, sys.executable, "-c", SEND, one.address, str(nbytes)]
    with subprocess.Popen(send, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdout is not None
        port = sender.stdout.readline().strip()
        receive = [*two.before, sys.executable, "-c", RECEIVE, one.address, port, str(nbytes)]
        return float(subprocess.run(receive, stdout=subprocess.PIPE, text=True, check=True).stdout)


# -- several hosts at the same time --------------------------------------------------------------------


def _together(name: str, nbytes: int) -> list[Figure]:
    """Have three hosts fetch at the same time from a fourth one."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    sent: dict[bool, list[float]] = {False: [], True: []}
    with _hosts(4, name, nbytes) as (one, *others):
        for _ in range(ROUNDS):
            for passing_on in (False, True):
                before = one.sent()
                seconds[passing_on].append(_fetched(one, others, passing_on=passing_on))
                sent[passing_on].append((one.sent() - before) / nbytes)
    what = f"{nbytes / 1e9:.3g} GB to three hosts, processes started, everything included"
    ways = {False: "only the first host exports", True: "each passes on what it has"}
    at_once = f"{name}, three hosts at once"
    return [
        *(median(f"{at_once}, {way}: until the last has it", seconds[key], "s", what) for key, way in ways.items()),
        *(median(f"{at_once}, {way}: sent by the first ÷ size", sent[key], "", "") for key, way in ways.items()),
    ]


def _fetched(one: Host, others: Sequence[Host], *, passing_on: bool) -> float:
    """Have hosts fetch at the same time, with their own exporters if they pass on; return the seconds it took."""
    with ExitStack() as undo:
        for host in others if passing_on else ():
            undo.enter_context(host.exporting())
        peers = ",".join(host.address for host in (one, *others)) if passing_on else one.address
        began = perf_counter()
        processes = [host.fetching(POOL, "--from", peers, "--wait", "60") for host in others]
        told = [process.communicate() for process in processes]
        took = perf_counter() - began
    if failed := [why for process, (_, why) in zip(processes, told, strict=True) if process.returncode]:
        raise RuntimeError(f"a fetch failed: {failed}")
    for host in others:  # else they would have the version the next time
        with Broker(host.broker.directory) as broker:
            broker.retire(POOL)
    return took


# -- between GPUs --------------------------------------------------------------------------------------


def _between_gpus(plan: Plan, share: str) -> list[Figure]:
    from cubroker.integrations.cluster import certificates

    last = f"cuda:{len(driver.load(plan.devices).devices) - 1}"
    tensors = model_weights.tensors(plan.nbytes)
    with ExitStack() as undo:
        source, target = (undo.enter_context(serving(devices)) for devices in ("cuda:0", last))
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        certificates.make_authority(folder / "authority")
        certificates.issue(folder / "authority", folder / "host", "root", [HOST])
        with model_weights.in_memory(tensors) as path, Broker(source.directory) as broker:
            load(broker, POOL, path, share=share, digest=True)
        address = undo.enter_context(_exporting(source.directory, folder / "host"))
        broker = undo.enter_context(Broker(target.directory))
        bounds, whole, reads = [], [], []
        for number in range(1 + ROUNDS):
            bound = _plain_copy(plan)
            began = perf_counter()
            done = fetch(POOL, [address], directory=target.directory, certificates=folder / "host", share=share)
            took = perf_counter() - began
            if number == 0:
                with broker.attach(POOL) as pool:
                    pool.check()
                continue
            bounds.append(bound)
            whole.append(took)
            reads.append(done.read_seconds * plan.nbytes / done.nbytes)
    what = f"{plan.nbytes / 1e9:g} GB, cuda:0 to {last}"
    return [
        rate(f"{share}: plain copy between the devices", plan.nbytes, bounds, what),
        rate(f"{share}: fetch, while bytes come", plan.nbytes, reads, "connecting, memory registered, digests"),
        ratio(f"{share}: fetch ÷ plain copy", bounds, reads, "of each pair"),
        median(f"{share}: fetch(), the whole call", whole, "s", "a process started, the draft, reading, digests, seal"),
    ]


@contextmanager
def _exporting(directory: Path, folder: Path) -> Iterator[str]:
    """Run an exporter, and yield its address."""
    command = python_command(
        "cubroker", "export", "--directory", str(directory), "--certificates", str(folder), "--listen", f"{HOST}:0"
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def _plain_copy(plan: Plan) -> float:
    """Return the seconds of a plain copy from the first device to the last, which has direct access to it."""
    opened = driver.load(plan.devices)
    first, last = (opened.context(opened.devices[at].index) for at in (0, -1))
    with direct(opened, last, first), plain_copy(first, last, plan.nbytes) as copy:
        copy()
        return seconds(copy)


if __name__ == "__main__":
    run_alone(measure)
