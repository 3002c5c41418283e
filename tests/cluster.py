"""Exporters and fetches as users run them: ``cubroker export`` and ``fetch``, with certificates of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.brokers import DEVICES, PATIENCE, BrokerProcess, eventually, started
from tests.namespaces import unshare

ENGINE = {"UCX_TLS": "tcp,cuda_copy"}
"""Bytes go over the network, also between processes that could share memory."""

HOST = "127.0.0.1"


def need_engine() -> None:
    """Skip a module where NIXL is not installed."""
    pytest.importorskip("nixl_cu13")


def make_certificates(folder: Path, *names: str, user: str = "root", hosts: Sequence[str] = (HOST,)) -> list[Path]:
    """Make an authority, and a folder for each name with a certificate for a user, and for hosts."""
    from cubroker.integrations.cluster import certificates as making

    making.make_authority(folder / "authority")
    return [making.issue(folder / "authority", folder / name, user, hosts).parent for name in names]


class ExporterProcess:
    """``cubroker export``, started and listening.

    Attributes:
        address: where it listens.
    """

    def __init__(
        self,
        directory: Path,
        folder: Path,
        *arguments: str,
        listen: str = f"{HOST}:0",
        before: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self._log = folder / f"export-{os.urandom(4).hex()}.log"
        command = [*before, sys.executable, "-m", "cubroker", "export", *arguments, "--listen", listen]
        command += ["--directory", str(directory), "--certificates", str(folder)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | ENGINE | (environment or {})
            )
        try:
            eventually(self._listens, "the exporter to listen")
        except BaseException:
            self.kill()  # nobody has it yet who would
            raise
        self.address = self.log().partition("exporting at ")[2].split()[0]

    def _listens(self) -> bool:
        assert self.process.poll() is None, f"the exporter ended:\n{self.log()}"
        return "exporting at " in self.log()

    def log(self) -> str:
        """All that it has written."""
        return self._log.read_text()

    def sources(self) -> list[int]:
        """The processes that it has started, each for one peer, and one for the next."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def stop(self) -> int:
        """Send SIGTERM, and return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """Send SIGKILL, and wait for its end."""
        self.process.kill()
        self.process.wait(PATIENCE)


@contextmanager
def exporting(directory: Path, folder: Path, *arguments: str, **options: Any) -> Iterator[ExporterProcess]:
    """Start an exporter, and stop it at the end, however it is by then."""
    exporter = ExporterProcess(directory, folder, *arguments, **options)
    try:
        yield exporter
    finally:
        if exporter.process.poll() is None:
            exporter.process.send_signal(signal.SIGCONT)
            exporter.stop()
        exporter.kill()


def command(directory: Path, folder: Path, *arguments: str, before: Sequence[str] = ()) -> list[str]:
    """Return the command line of a fetch."""
    fetch = [*before, sys.executable, "-m", "cubroker", "fetch", *arguments]
    return [*fetch, "--directory", str(directory), "--certificates", str(folder), "--json"]


def fetch(directory: Path, folder: Path, *arguments: str, before: Sequence[str] = ()) -> Any:
    """Fetch, and return what it says, as JSON has it, or its status and the text of its error."""
    done = subprocess.run(
        command(directory, folder, *arguments, before=before),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | ENGINE,
        timeout=PATIENCE,
        check=False,
    )
    return json.loads(done.stdout) if done.returncode == 0 else (done.returncode, done.stderr)


# -- a network -----------------------------------------------------------------------------------------


class Host:
    """A host on a network of its own: a network namespace, and the broker that runs in it.

    Attributes:
        address: of its only link.
        second: the link's IPv6 address.
        name: which has both addresses. The name ``cluster`` has those of all hosts.
        before: what runs a command there.
        certificates: the folder of its certificate.
    """

    def __init__(self, number: int, holder: subprocess.Popen[bytes], switch: int, rate: str) -> None:
        self.address, self.second, self.name = f"10.78.0.{number}", f"fd78::{number}", f"gpu-{number}"
        self.before = _within(holder.pid)
        self.certificates = Path()
        self.broker: BrokerProcess
        self._port = f"port{number}"
        self._switch = _within(switch)
        self._rate = rate
        run(*self._switch, *f"ip link add {self._port} type veth peer name eth0 netns {holder.pid}".split())
        run(*self._switch, *f"ip link set {self._port} master switch up".split())
        addresses = f"addr add {self.address}/24 dev eth0", f"addr add {self.second}/64 dev eth0 nodad"
        for line in (*addresses, "link set eth0 up", "link set lo up"):
            run(*self.before, "ip", *line.split())
        limit = f"root tbf rate {rate} burst 256kb latency 50ms".split()
        run(*self._switch, "tc", "qdisc", "add", "dev", self._port, *limit)
        run(*self.before, "tc", "qdisc", "add", "dev", "eth0", *limit)

    def cut(self) -> None:
        """Have its link carry nothing more, in either direction, and say nothing of that to anybody."""
        run(*self._switch, *f"ip link set {self._port} nomaster".split())

    def mend(self) -> None:
        """Undo :meth:`cut`."""
        run(*self._switch, *f"ip link set {self._port} master switch".split())

    @contextmanager
    def slowed(self, rate: str) -> Iterator[None]:
        """Have its link carry so much of what it sends, within a ``with`` block."""
        self._send_at(rate)
        try:
            yield
        finally:
            self._send_at(self._rate)

    def _send_at(self, rate: str) -> None:
        run(*self.before, *f"tc qdisc change dev eth0 root tbf rate {rate} burst 256kb latency 50ms".split())

    def running(self, script: str, *arguments: object) -> subprocess.Popen[str]:
        """Start a script of Python there, which gets the directory of the broker and these arguments."""
        return subprocess.Popen(
            [*self.before, sys.executable, "-c", script, str(self.broker.directory), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def received(self) -> int:
        """Bytes that have come in over its link."""
        told = run(*self.before, "ip", "-json", "-stats", "link", "show", "eth0")
        return int(json.loads(told)[0]["stats64"]["rx"]["bytes"])

    def sent(self) -> int:
        """Bytes that have gone out over its link."""
        told = run(*self.before, "ip", "-json", "-stats", "link", "show", "eth0")
        return int(json.loads(told)[0]["stats64"]["tx"]["bytes"])

    def exporting(self, *arguments: str, listen: str = "") -> AbstractContextManager[ExporterProcess]:
        """Export what its broker has, at the usual port if no other address is given."""
        listen = listen or self.address
        return exporting(self.broker.directory, self.certificates, *arguments, listen=listen, before=self.before)

    def peers(self, host: str) -> Any:
        """Return what ``cubroker peers`` says of each host that this name or address stands for."""
        asking = [*self.before, sys.executable, "-m", "cubroker", "peers", "--from", host, "--json"]
        return json.loads(run(*asking, "--certificates", str(self.certificates)))

    def fetch(self, *arguments: str) -> Any:
        """See :func:`fetch`."""
        return fetch(self.broker.directory, self.certificates, *arguments, before=self.before)

    def fetching(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a fetch, which says on standard error how it goes."""
        return subprocess.Popen(
            command(self.broker.directory, self.certificates, *arguments, before=self.before),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | ENGINE,
        )


class BrokerOfHost(BrokerProcess):
    """A broker on a host of the network."""

    def __init__(self, directory: Path, host: Host, devices: str) -> None:
        self._before = host.before
        super().__init__(directory, devices)

    def command(self) -> list[str]:
        return [*self._before, *super().command()]


def _within(pid: int) -> list[str]:
    return ["nsenter", f"--net=/proc/{pid}/ns/net", f"--mount=/proc/{pid}/ns/mnt", "--wdns=/"]


def run(*arguments: str) -> str:
    """Run a command, which has to succeed, and return what it says."""
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (arguments, done.stderr)
    return done.stdout


@contextmanager
def network(count: int, folder: Path, *, rate: str = "1gbit", devices: str = DEVICES) -> Iterator[list[Host]]:
    """Yield hosts that a switch joins, each with a broker and a certificate; links carry so much each way."""
    from cubroker.integrations.cluster import certificates as making

    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("needs ip and tc, of iproute2")
    apart = unshare("--net", "--mount")
    with ExitStack() as undo:
        holders = [_held(undo, apart, folder) for _ in range(1 + count)]
        switch = holders.pop().pid
        for line in ("link add switch type bridge", "link set switch up"):
            run(*_within(switch), "ip", *line.split())
        hosts = [Host(number, holder, switch, rate) for number, holder in enumerate(holders, 1)]
        names = "".join(f"{ip} {host.name} cluster\n" for host in hosts for ip in (host.address, host.second))
        (folder / "hosts").write_text(names)
        making.make_authority(folder / "authority")
        for number, host in enumerate(hosts):
            host.broker = undo.enter_context(started(lambda path, host=host: BrokerOfHost(path, host, devices)))
            reached = [host.address, host.second, host.name, "cluster"]
            path = making.issue(folder / "authority", folder / f"host-{number}", "root", reached)
            host.certificates = path.parent
        yield hosts


def _held(undo: ExitStack, apart: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that has a network namespace and ``folder/hosts`` as ``/etc/hosts``, which end with it."""
    (folder / "hosts").touch()
    command = [*apart, "sh", "-c", 'mount --bind "$0" /etc/hosts && exec cat', str(folder / "hosts")]
    holder = undo.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    undo.callback(holder.kill)
    eventually(lambda: Path(f"/proc/{holder.pid}/comm").read_text() == "cat\n", "a network namespace")
    return holder
