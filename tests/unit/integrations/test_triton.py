"""Regions of a server: here one that speaks as much of Triton's API as is used; tests/engines has a real one."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import socket
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf, nan
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from cubroker.client import Broker, Pool
from cubroker.driver import Context, Driver
from cubroker.integrations import triton
from cubroker.protocol import Layout
from cubroker.protocol.errors import Invalid, OutOfMemory, TimedOut, Unavailable, Unsupported
from tests.brokers import BrokerProcess, eventually
from tests.unit.client.conftest import leases

LAYOUT = Layout.pack([("pad", "U8", (3,)), ("X", "F32", (2, 3)), ("Y", "F32", (2, 3)), ("odd", "F8_E5M2", (6,))])


class Handler(BaseHTTPRequestHandler):
    """Registers system regions as Triton 2.51 does, and answers Y = 2 X + 1 whatever the model."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        kind = self.path.split("/")[-2]
        self.reply([{"name": name} for name in (self.server.regions if kind == triton.SYSTEM else self.server.opened)])

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"] or 0))
        body = json.loads(data) if data else {}
        self.server.asked.append((self.path, body, self.headers.get("X-Key")))
        *_, name, verb = self.path.split("/")
        if triton.CUDA in self.path:
            return self.open(name, body) if verb == "register" else self.unopen(name)
        if verb == "register":
            try:
                self.server.regions[name] = np.memmap(f"/dev/shm{body['key']}", np.uint8, "r+", shape=body["byte_size"])
            except OSError:
                return self.reply({"error": f"Unable to open shared memory region: '{body['key']}'"}, 500)
            return self.reply(None)
        if verb == "unregister":
            self.server.regions.pop(name, None)
            return self.reply(None)
        if self.server.datatype == "none":
            return self.reply("<html>another server</html>")
        if self.server.reply is not None:
            return self.reply(self.server.reply)
        self.write(body["outputs"][0], 2 * self.read(body["inputs"][0]) + 1)
        return self.reply({"outputs": [{"name": "Y", "datatype": self.server.datatype, "shape": [2, 3]}]})

    def open(self, name: str, body: dict[str, Any]) -> None:
        assert self.server.driver
        if body["device_id"] >= len(self.server.driver.devices):
            return self.reply({"error": "failed to register shared memory region: invalid args"}, 400)
        context = self.server.driver.context(body["device_id"])
        self.server.opened[name] = context, context.open(b64decode(body["raw_handle"]["b64"]))
        return self.reply(None)

    def unopen(self, name: str) -> None:
        if name in self.server.opened:
            context, pointer = self.server.opened.pop(name)
            context.close(pointer)
        self.reply(None)

    def read(self, tensor: dict[str, Any]) -> Any:
        name, begin, nbytes = self.place(tensor)
        if name in self.server.regions:
            return self.server.regions[name][begin : begin + nbytes].view(np.float32).copy()
        context, pointer = self.server.opened[name]
        return np.frombuffer(context.read(pointer + begin, nbytes), np.float32)

    def write(self, tensor: dict[str, Any], values: Any) -> None:
        name, begin, nbytes = self.place(tensor)
        if name in self.server.regions:
            self.server.regions[name][begin : begin + nbytes].view(np.float32)[:] = values
        else:
            context, pointer = self.server.opened[name]
            context.write(pointer + begin, values)

    def place(self, tensor: dict[str, Any]) -> tuple[str, int, int]:
        given = tensor["parameters"]
        return given["shared_memory_region"], given.get("shared_memory_offset", 0), given["shared_memory_byte_size"]

    def reply(self, found: object, status: int = 200) -> None:
        text = b"" if found is None else found.encode() if isinstance(found, str) else json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass

    server: Server


class Server(ThreadingHTTPServer):
    """The server, what it has registered, and what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/"
        self.regions: dict[str, Any] = {}
        #: What was registered by CUDA IPC handle, opened by the devices' own driver.
        self.opened: dict[str, tuple[Context, int]] = {}
        self.driver: Driver | None = None
        self.asked: list[tuple[str, Any, str | None]] = []
        self.datatype = "FP32"
        #: What it answers to an inference in place of computing.
        self.reply: dict[str, Any] | None = None
        self._serve()

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Leave its port to others within a ``with`` block; what is registered stays."""
        self.close()
        try:
            yield
        finally:
            self.socket = socket.socket(self.address_family, self.socket_type)
            self.server_bind()
            self.server_activate()
            self._serve()

    def _serve(self) -> None:
        self._thread = Thread(target=self.serve_forever)
        self._thread.start()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@contextmanager
def scratch(client: Broker, name: str, **terms: Any) -> Iterator[Pool]:
    with client.create(name, LAYOUT, **{"writable": True, **terms}) as draft:
        draft.seal()
    with client.attach(name) as pool:
        yield pool


@pytest.mark.parametrize("share", ["ipc", "vmm"])
def test_inputs_and_outputs_are_tensors_of_the_pool(client: Broker, name: str, server: Server, share: str) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with scratch(client, name, share=share) as pool:
        with triton.register(pool, server.url, headers={"X-Key": "secret"}) as regions:
            (region,) = regions.names
            assert list(server.regions) == [region]
            assert region in repr(regions)
            assert not (triton.FOLDER / region).exists()
            pool["X"].copy_from(x)
            answers = regions.infer("a model", {"INPUT": "X"}, {"Y": "Y"}, version="3")
            assert answers == {"Y": ("FP32", (2, 3))}
            assert np.array_equal(pool["Y"].numpy(), 2 * x + 1)
            assert pool["pad"].tobytes() == bytes(3)
            path, body, key = server.asked[-1]
            assert (path, key) == ("/v2/models/a%20model/versions/3/infer", "secret")
            assert body["inputs"][0]["shape"] == [2, 3]
            place = next(tensor for tensor in LAYOUT.tensors if tensor.name == "X")
            assert regions["X"] == (region, 24, place.offset)
            with pytest.raises(KeyError):
                _ = regions["absent"]
            with pytest.raises(Unsupported, match="Triton has no type for F8_E5M2"):
                regions.infer("m", {"X": "odd"}, {"Y": "Y"})
            server.datatype = "FP64"
            with pytest.raises(Invalid, match="answers with Y of FP64, and tensor 'Y' is FP32"):
                regions.infer("m", {"X": "X"}, {"Y": "Y"})
            server.datatype = "none"
            with pytest.raises(Invalid, match="another server"):
                regions.infer("m", {"X": "X"}, {"Y": "Y"})
        assert not server.regions
        with pytest.raises(Invalid, match="register it again"):
            regions.copy_in("X")


@pytest.mark.parametrize(
    ("outputs", "reply", "says"),
    [
        ([], {}, "no output of model 'm' is asked for; name one at least, and a tensor for it"),
        (["Y"], {"outputs": []}, "model 'm' answers without Y, and with no output"),
        (
            ["Y", "odd"],
            {"outputs": [{"name": "Y", "datatype": "FP32", "shape": [2, 3]}]},
            "without odd, and with Y; ask",
        ),
        (
            ["Y"],
            {"outputs": [{"name": "Y", "datatype": "FP32", "shape": [1], "data": [1.0]}]},
            "answers with Y in the reply, and not in tensor 'Y': the server stores no outputs",
        ),
        (["Y"], {}, "is not one of Triton: .*`outputs`"),
        (["Y"], {"outputs": [{"name": "Y", "datatype": "FP32", "shape": ["x"]}]}, "is not one of Triton: .*shape"),
    ],
)
def test_outputs_that_are_not_asked_for_or_do_not_come_are_an_error(
    client: Broker, name: str, server: Server, outputs: list[str], reply: dict[str, Any], says: str
) -> None:
    layout = Layout.pack([("X", "F32", (2, 3)), ("Y", "F32", (2, 3)), ("odd", "U8", (6,))])
    with client.create(name, layout, writable=True) as draft:
        draft.seal()
    with client.attach(name) as pool, triton.register(pool, server.url) as regions:
        server.reply = reply
        pool["Y"].copy_from_bytes(b"y" * 24)
        with pytest.raises(Invalid, match=says):
            regions.infer("m", {"X": "X"}, {each: each for each in outputs})
        assert pool["Y"].tobytes() == b"y" * 24


def test_memory_of_a_gpu_is_registered_by_its_handle(
    client: Broker, name: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host devices stand for GPUs, and their driver opens the 64 bytes."""
    monkeypatch.setattr(triton, "_on_host", lambda _: False)
    server.driver = client.driver
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with (
        scratch(client, name, share="vmm") as pool,
        pytest.raises(Unsupported, match="shared as vmm, and Triton opens"),
    ):
        triton.register(pool, server.url)
    with scratch(client, name, share="ipc", devices=(1,)) as pool:
        with triton.register(pool, server.url) as regions:
            assert list(server.opened) == list(regions.names)
            pool["X"].copy_from(x)
            regions.infer("m", {"X": "X"}, {"Y": "Y"})
            assert np.array_equal(pool["Y"].numpy(), 2 * x + 1)
            _, body, _ = server.asked[0]
            assert (body["device_id"], body["byte_size"]) == (1, LAYOUT.allocations[0])
        assert not server.opened
        with pytest.raises(Invalid, match="refused"), triton.register(pool, server.url, device_id=7):
            pass


def test_the_lease_stays_until_the_regions_are_unregistered(client: Broker, name: str, server: Server) -> None:
    with scratch(client, name) as pool:
        regions = triton.register(pool, server.url)
    assert leases(client, name) == 1
    with pytest.raises(ZeroDivisionError), regions:
        _ = 1 / 0
    assert not server.regions
    eventually(lambda: leases(client, name) == 0, "the end of the lease")
    with client.attach(name) as pool:
        triton.register(pool, server.url)
        gc.collect()
        assert not server.regions


def test_what_a_server_may_not_open_is_refused(client: Broker, name: str, server: Server, tmp_path: Any) -> None:
    with scratch(client, name, writable=False) as pool, pytest.raises(Invalid, match="create it writable"):
        triton.register(pool, server.url)
    with client.create(name, LAYOUT, writable=True) as draft:
        with pytest.raises(Invalid, match="is a draft"):
            triton.register(draft, server.url)
        draft.seal(in_place=True)
        with triton.register(draft, server.url) as regions:
            assert len(server.regions) == len(regions.names) == 1
    plan = {"pad": 0, "X": 1, "Y": 1, "odd": 1}
    sharded = Layout.pack([(each.name, each.dtype, each.shape) for each in LAYOUT.tensors], groups=plan)
    with client.create(name, sharded, plan=plan, writable=True) as draft:
        draft.seal()
    with client.attach(name) as pool:
        with pytest.raises(Invalid, match="on 2 devices; leave device_id out"):
            triton.register(pool, server.url, device_id=0)
        with triton.register(pool, server.url) as regions:
            assert len(server.regions) == len(regions.names) == 2
        for url in ("127.0.0.1:8000", "http://h:port", "http://h:99999", "http://[::1", "http://h o:80", "http://:80"):
            with pytest.raises(Invalid, match="is no address of a Triton server"):
                triton.register(pool, url)


def test_memory_with_a_name_that_cannot_be_made_or_found_leaves_nothing(
    client: Broker, name: str, server: Server, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scratch(client, name) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(triton, "FOLDER", tmp_path)  # where the server does not look
            with pytest.raises(Invalid, match="Unable to open shared memory region"):
                triton.register(pool, server.url)
            assert not list(tmp_path.iterdir())
            patch.setattr(triton, "FOLDER", tmp_path / "absent")
            with pytest.raises(Unavailable, match=r"cannot be made: .*absent.*No such file"):
                triton.register(pool, server.url)
        with monkeypatch.context() as patch:

            def full(*_: int) -> None:
                raise OSError(28, os.strerror(28))

            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(OutOfMemory, match="No space left"):
                triton.register(pool, server.url)
    assert not server.regions
    assert [path for path, *_ in server.asked if path.endswith("/register")] == [server.asked[0][0]]


LEFT = """
import sys
from cubroker.client import Broker
from cubroker.driver import Context, Driver
from cubroker.integrations import triton
regions = triton.register(Broker(sys.argv[1]).attach(sys.argv[2]), sys.argv[3])
print(*regions.names, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_regions_of_ended_processes_are_swept_and_no_others(
    lender: BrokerProcess, client: Broker, name: str, server: Server
) -> None:
    first = int(Path("/proc/1/stat").read_bytes().rpartition(b")")[2].split()[19])  # when it began, proc_pid_stat(5)
    with scratch(client, name) as pool:
        with triton.register(pool, server.url) as regions:
            own = regions.names[0].rpartition("-")[0]
        namespace, pid, started = re.findall(r"[0-9a-f]+", own.removeprefix("cubroker-"))
        others = [f"cubroker-1-{pid}-1-1", f"cubroker-{namespace}-1-{first}-1", f"{own}-1", "theirs"]
        others.append(f"cubroker-{namespace}-{10**14 - 1}-1-1")  # no process has such a number
        server.regions.update(dict.fromkeys(others))
        ended = []
        for kill in (True, False):  # the end of the interpreter unregisters, a kill does not
            command = [sys.executable, "-c", LEFT, str(lender.directory), name, server.url]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                ended.append(process.stdout.readline().strip())
                assert ended[-1] in server.regions
                if kill:
                    process.kill()
            assert (ended[-1] in server.regions) == kill
            eventually(lambda: leases(client, name) == 1, "the end of its lease")
            if kill:
                server.regions[f"cubroker-{namespace}-{pid}-{int(started) - 1}-1"] = None  # a number used again
                assert len(triton.sweep(server.url)) == 2
        with triton.register(pool, server.url) as regions:
            assert set(server.regions) == {*others, *regions.names}


def test_a_server_that_does_not_answer_or_listen_is_told(
    client: Broker, name: str, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with scratch(client, name) as pool, socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        with pytest.raises(TimedOut, match=r"has not answered systemsharedmemory/status for 0.1 s"):
            triton.register(pool, f"http://{host}:{port}", timeout=0.1)
        regions, dropped = (triton.register(pool, server.url, timeout=0.5) for _ in range(2))
        (region,), (other,) = regions.names, dropped.names
        with server.away(), socket.create_server((host, server.server_port)):
            with pytest.raises(TimedOut, match=f"{region} may still be registered there: close the regions again"):
                regions.close()
            with pytest.raises(KeyError) as raised, regions:
                raise KeyError
            assert "may still be registered" in raised.value.__notes__[0]
            assert other not in caplog.text
            del dropped
            assert f"{other} may still be registered" in caplog.text
            pool.close()
            assert leases(client, name) == 1
        assert server.regions.keys() == {region, other}
        assert triton.sweep(server.url) == ()
        assert server.regions.keys() == {region}
        with server.away():
            with pytest.raises(Unavailable, match="does not listen: Connection refused"):
                triton.sweep(server.url)
            with caplog.at_level(logging.WARNING):
                regions.close()
        assert f"{region} has ended with it" in caplog.text


@pytest.mark.parametrize("part", ["headers", "body"])
def test_an_answer_that_comes_byte_by_byte_has_the_time_of_one_call(part: str) -> None:
    """The whole answer takes longer than a call may, and each byte of it does not."""
    head, body = b"HTTP/1.1 200 OK\r\nX-Filler: " + b"x" * 40 + b"\r\nContent-Length: 50\r\n\r\n", b" " * 48 + b"[]"
    slow = head if part == "headers" else body
    given_up = Event()

    def answer() -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            if part == "body":
                connection.sendall(head)
            for byte in slow:
                connection.sendall(bytes([byte]))
                given_up.wait(0.05)
            if part == "headers":
                connection.sendall(body)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = Thread(target=answer)
        thread.start()
        try:
            host, port = listening.getsockname()
            for endless in (nan, inf, 0.0, -1.0):
                with pytest.raises(
                    Invalid, match=f"a timeout of {endless} seconds; it can be more than 0, up to 604800"
                ):
                    triton.sweep(f"http://{host}:{port}", timeout=endless)
            with pytest.raises(TimedOut, match="has not answered systemsharedmemory/status for 1 s"):
                triton.sweep(f"http://{host}:{port}", timeout=1.0)
        finally:
            given_up.set()
            thread.join()


def test_memory_of_a_gpu_stays_leased_while_its_server_may_only_be_restarting(
    client: Broker, name: str, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that ends closes its port before it lets go of memory: a refused connection is no proof."""
    monkeypatch.setattr(triton, "_on_host", lambda _: False)
    server.driver = client.driver
    with scratch(client, name, share="ipc") as pool:
        regions = triton.register(pool, server.url)
    (region,) = regions.names
    refused = f"does not listen: .*{region} may still be registered .*ended=True"
    with server.away(), pytest.raises(Unavailable, match=refused):
        regions.close()
    assert leases(client, name) == 1
    regions.close()
    assert not server.opened
    with client.attach(name) as pool:
        regions = triton.register(pool, server.url)
    (region,) = regions.names
    with server.away(), caplog.at_level(logging.WARNING):
        regions.close(ended=True)
    assert f"{region} has ended with it" in caplog.text
    server.server_close()
    for context, pointer in server.opened.values():
        context.close(pointer)
    server.opened.clear()
    eventually(lambda: leases(client, name) == 0, "the end of the lease")


def test_a_register_that_is_not_answered_is_taken_back(
    client: Broker, name: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = {"register", "unregister"}
    call = triton._Server.call

    def unanswered(self: Any, method: str, path: str, *rest: Any) -> Any:
        verb = path.rpartition("/")[2]
        found = None if verb == "unregister" and verb in failing else call(self, method, path, *rest)
        if verb in failing:
            raise TimedOut("too late")
        return found

    monkeypatch.setattr(triton._Server, "call", unanswered)
    with scratch(client, name) as pool:
        with pytest.raises(TimedOut, match="too late") as raised:
            triton.register(pool, server.url)
        assert "may still be registered" in raised.value.__notes__[0]
        (left,) = server.regions
        failing.remove("unregister")
        with pytest.raises(TimedOut, match="too late") as raised:
            triton.register(pool, server.url)
        assert not hasattr(raised.value, "__notes__")
        assert not server.regions
        assert [path for path, *_ in server.asked][1].endswith(f"{left}/unregister")
    assert leases(client, name) == 0


@pytest.mark.slow
def test_a_forked_child_leaves_the_regions_to_its_parent(client: Broker, name: str, server: Server) -> None:
    with scratch(client, name) as pool, triton.register(pool, server.url) as regions:
        child = os.fork()
        if not child:
            regions.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert list(server.regions) == list(regions.names)
