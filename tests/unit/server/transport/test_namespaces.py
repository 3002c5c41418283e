"""Brokers and clients in different namespaces, as in containers: what works, and what is said where it cannot."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.protocol.errors import Denied, Unsupported
from cubroker.protocol.layout import Layout
from cubroker.server.transport import unix_sockets
from tests.brokers import BrokerProcess, eventually
from tests.forkserver import unmeasured
from tests.namespaces import contained, unshare, visiting
from tests.unit.server import visitor
from tests.unit.server.transport.test_unix_sockets import Without

LAYOUT = Layout.pack([("x", "U8", (4096,))])
CONTENT = 7

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user, or mount")


def publish(directory: Path, share: str = "vmm") -> None:
    with Broker(directory) as broker, broker.create("llama", LAYOUT, share=share) as draft:
        draft["x"].copy_from(bytes([CONTENT]) * 4096)
        draft.seal()


def held(directory: Path) -> int:
    with Broker(directory) as broker:
        return broker.pools()[0].leases


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--pid", "--fork", "--kill-child"], id="pid"),
        pytest.param(["--ipc"], id="ipc"),
        pytest.param(["--net"], id="net"),
        pytest.param(["--mount"], id="mount"),
        pytest.param(["--user", "--map-root-user"], id="user"),
        pytest.param(["--user"], id="unmapped-user"),
        pytest.param(
            ["--pid", "--fork", "--kill-child", "--ipc", "--net", "--mount", "--uts", "--cgroup"], id="container"
        ),
    ],
)
def test_a_client_in_namespaces_below_the_brokers_is_known_by_its_process_and_its_death_is_seen(
    broker: BrokerProcess, options: list[str]
) -> None:
    before = unshare(*options)
    publish(broker.directory)
    with visiting(broker.directory, "llama", before) as guest:
        assert guest.said == CONTENT
        with Broker(broker.directory) as observer:
            (client,) = [each for each in observer.clients() if each.leases]
        assert client.uid == os.getuid()
        assert Path(f"/proc/{client.pid}/cmdline").read_bytes().endswith(b"\0llama\0")
        guest.kill()
        eventually(lambda: held(broker.directory) == 0, "the lease to end")


@pytest.mark.slow
def test_a_client_outside_the_pid_namespace_of_the_broker_has_no_number_and_its_death_is_seen() -> None:
    with contained("--pid") as broker:
        publish(broker.directory)
        with visiting(broker.directory, "llama") as guest:
            assert guest.said == CONTENT
            with Broker(broker.directory) as observer:
                assert {client.pid for client in observer.clients()} == {0}
            guest.kill()
            eventually(lambda: held(broker.directory) == 0, "the lease to end")


def test_on_a_kernel_that_cannot_name_such_a_client_it_is_told_what_to_do(tmp_path: Path) -> None:
    class Old(Without):
        def getsockopt(self, level: int, option: int, *size: int) -> bytes | int:
            answer = super().getsockopt(level, option, *size)
            return bytes(4) + answer[4:] if option == socket.SO_PEERCRED and isinstance(answer, bytes) else answer

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, pytest.raises(Unsupported, match=r"Linux before 6\.5 .*; run the broker in .* \(hostPID: true"):
        unix_sockets.identify(Old(ours, 92))  # type: ignore[arg-type]


@pytest.mark.slow
@needs_root
def test_a_user_whom_the_brokers_user_namespace_does_not_know_is_told_so_and_others_are_served() -> None:
    with contained("--user", "--map-root-user") as broker:
        publish(broker.directory)
        broker.directory.parent.chmod(0o711)
        broker.directory.chmod(0o711)
        (broker.directory / "session.sock").chmod(0o666)
        with visitor.visiting(broker.directory, 4001, 4001) as stranger:
            code, message = stranger.refused("hello")
        assert code == Denied.code
        assert "user 65534 and group 65534" in message
        assert "run the broker in the host's user namespace" in message
        with visiting(broker.directory, "llama") as guest:
            assert guest.said == CONTENT


def test_in_the_first_user_namespace_nobody_is_a_user_like_others() -> None:
    maps = Path("/proc/self/uid_map").read_text().split()
    if maps != ["0", "0", str(2**32 - 1)]:
        pytest.skip("this is not the first user namespace")
    assert unix_sockets.overflow_id("uid") is None
    assert unix_sockets.overflow_id("gid") is None


@pytest.mark.slow
def test_emulated_ipc_memory_needs_a_common_network_namespace_and_says_so(broker: BrokerProcess) -> None:
    before = unshare("--net")
    publish(broker.directory, "ipc")
    with visiting(broker.directory, "llama", before) as guest:
        assert guest.said[0] == "device"
        assert guest.said[1].endswith(
            "its owner in another network namespace, as in a container; there it has to be shared as vmm"
        )


@pytest.mark.slow
def test_ipc_memory_of_a_process_with_the_same_number_elsewhere_is_refused_and_vmm_is_not() -> None:
    before = unshare("--pid", "--fork", "--kill-child")
    with contained("--pid") as broker:  # which is process 1 there, as the client is in its own namespace
        publish(broker.directory, "ipc")
        with visiting(broker.directory, "llama", before) as guest:
            assert guest.said[0] == "device"
            assert "CUDA_ERROR_INVALID_CONTEXT" in guest.said[1]
            assert guest.said[1].endswith("run one of them in the host's pid namespace, or share it as vmm")
        publish(broker.directory)
        with visiting(broker.directory, "llama", before) as guest:
            assert guest.said == CONTENT


@needs_root
def test_a_client_reaches_the_directory_where_it_is_mounted_read_only_too(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    publish(broker.directory)
    elsewhere = tmp_path / "run"
    elsewhere.mkdir()
    mount = 'mount --bind "$1" "$2" && mount -o remount,bind,ro "$2" && shift 2 && exec "$@"'
    before = [*unshare("--mount"), "sh", "-c", mount, "sh", str(broker.directory), str(elsewhere)]
    with visiting(elsewhere, "llama", before) as guest:
        assert guest.said == CONTENT
    assert subprocess.run(["mountpoint", "-q", elsewhere], check=False).returncode


HIDDEN = """
import os, signal, socket, sys
from pathlib import Path
from cubroker.server.hardening import hide
from cubroker.server.transport.unix_sockets import Access, BoundSocket

path = Path(sys.argv[1])
os.chown(path.parent, 65534, 65534)
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
bound, told = os.pipe()
if (pid := os.fork()) == 0:
    hide()
    there = BoundSocket(path, socket.SOCK_STREAM, Access(), 1)
    os.write(told, b"bound")
    signal.pause()
os.read(bound, 5)
assert not Path("/proc", str(pid)).exists()
try:
    BoundSocket(path, socket.SOCK_STREAM, Access(), 1)
except OSError as error:
    print(error.strerror)
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
BoundSocket(path, socket.SOCK_STREAM, Access(), 1)
"""
"""Listens in a process of another user that /proc hides, and then beside it."""


@needs_root
def test_a_process_that_proc_hides_keeps_its_socket_until_it_ends() -> None:
    mount = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
    before = [*unshare("--mount", "--pid", "--fork", "--kill-child"), "sh", "-c", mount, "sh"]
    with tempfile.TemporaryDirectory() as folder:  # pytest's are below one of root's
        command = [*before, sys.executable, "-c", HIDDEN, str(Path(folder, "socket"))]
        # Unmeasured: a user without rights cannot write what was measured.
        ended = subprocess.run(command, capture_output=True, text=True, check=False, env=unmeasured())
    assert (ended.stdout, ended.stderr) == ("Address already in use\n", "")
