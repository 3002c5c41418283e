"""A second process with a driver of its own, which does what it is told, one JSON line at a time."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

from cubroker.driver import Context, Driver, DriverError, Event, load
from tests import forkserver
from tests.brokers import eventually
from tests.unit.driver.mapping_commands import in_child
from tests.unit.driver.multicast_commands import MulticastCommands

ROOT = Path(__file__).parents[3]
PRELOAD = ("tests.unit.driver.other_process", "cubroker.driver.host.bindings")
"""Modules of the fork server of other processes."""


class OtherProcess:
    """The process, as its starter sees it. ``ask`` calls a method of the context of one of its devices."""

    def __init__(self, spec: str) -> None:
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = forkserver.Forked(
                ["-m", "tests.unit.driver.other_process", spec, str(theirs.fileno())],
                preload=PRELOAD,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
            )
        self.pid = self._process.pid

    def ask(self, method: str, *args: Any, device: int = 0) -> Any:
        """Return what it returned; raise the DriverError that it raised."""
        self.start(method, *args, device=device)
        return self.finish()

    def start(self, method: str, *args: Any, device: int = 0) -> None:
        """Tell it what to do, and let it do it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([device, method, [_encode(arg) for arg in args]]).encode() + b"\n")
        self._process.stdin.flush()

    def finish(self) -> Any:
        """Return the result of what was started."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the other process ended"
        error, result = json.loads(line)
        if error:
            raise DriverError(*error)
        return _decode(result)

    def attach(self, descriptor: int, nbytes: int, *, readonly: bool, device: int = 0) -> int:
        """Have it map the memory of a descriptor, which it gets a duplicate of; return its pointer."""
        socket.send_fds(self._link, [b"."], [descriptor])
        return int(self.ask("attach", nbytes, readonly, device=device))

    def lend(self, nbytes: int, *, device: int = 0) -> int:
        """Have it create memory, and return a descriptor of it, which the caller closes."""
        self.ask("lend", nbytes, device=device)
        return socket.recv_fds(self._link, 1, 1)[1][0]

    def make_team(self, devices: list[int], nbytes: int) -> list[int]:
        """Have it make a multicast object; return descriptors of it and of the memory on each device."""
        self.ask("make_team", devices, nbytes)
        return socket.recv_fds(self._link, 1, 1 + len(devices))[1]

    def open_window(self, descriptor: int, nbytes: int, *, device: int = 0) -> int:
        """Have it map a multicast object; return its pointer."""
        socket.send_fds(self._link, [b"."], [descriptor])
        return int(self.ask("open_window", nbytes, device=device))

    def add_device(self, descriptor: int, device: int) -> None:
        """Have it add a device to a multicast object."""
        socket.send_fds(self._link, [b"."], [descriptor])
        self.ask("add_device", device=device)

    def stop(self) -> None:
        """Stop it, as a debugger would; return when no thread of it runs any more."""
        self._process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.pid}/task")
        eventually(lambda: set(map(_state, threads.glob("*/stat"))) == {"T"}, "every thread of it to be stopped")

    def go_on(self) -> None:
        """Let it run again."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it, stopped or not, and everything between us."""
        self.go_on()
        if self._process.poll() is None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
        self._link.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _state(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]


def _encode(value: Any) -> Any:
    return {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _decode(value: Any) -> Any:
    return base64.b64decode(value["bytes"]) if isinstance(value, dict) else value


def open_at_once(context: Context, handle: bytes, threads: int) -> list[int]:
    """Open a handle on so many threads together; return the pointers."""
    pointers: list[int] = []
    barrier = threading.Barrier(threads)

    def work() -> None:
        barrier.wait()
        pointers.append(context.open(handle))

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return pointers


def fork_and_open(context: Context, handle: bytes) -> str:
    """Open a handle in a forked child of a process that has used its driver; return the error's name."""

    def work() -> str:
        try:
            context.open(handle)
        except DriverError as error:
            return error.name
        return "opened"

    return in_child(work)


_events: list[Event] = []
"""What this process has made or opened, by number."""


def make_event(context: Context) -> int:
    """Make an event for others to open and return its number here."""
    _events.append(context.event(shared=True))
    return len(_events) - 1


def export_event(context: Context, number: int) -> bytes:
    return _events[number].export()


def open_event(context: Context, handle: bytes) -> int:
    """Open another process's event and return its number here."""
    _events.append(context.open_event(handle))
    return len(_events) - 1


def record(context: Context, number: int) -> None:
    """Record an event, and wait until it is reached."""
    with context.stream() as stream:
        stream.record(_events[number])
        _events[number].wait()


def event_done(context: Context, number: int) -> bool:
    return _events[number].done()


def close_event(context: Context, number: int) -> None:
    _events[number].close()


def fork_and_stay(context: Context) -> int:
    """Fork a child that does nothing until :func:`end_child`; return its process id once it runs."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b".")
        signal.pause()
        os._exit(0)
    os.read(reading, 1)
    os.close(reading)
    os.close(writing)
    return child


def end_child(context: Context, child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def in_a_second_context(context: Context, handle: bytes) -> list[object]:
    """Open a handle while a context of our own is current; return the error, and whether it still is."""
    calls = context.calls
    own = calls.cuCtxCreate(None, 0, calls.cuDeviceGet(context.device.index))
    try:
        context.open(handle)
    except DriverError as error:
        return [str(error), int(calls.cuCtxGetCurrent()) == int(own)]
    finally:
        calls.cuCtxDestroy(own)
    return ["opened", None]


_OURS = (
    open_at_once,
    fork_and_open,
    make_event,
    export_event,
    open_event,
    record,
    event_done,
    close_event,
    fork_and_stay,
    end_child,
    in_a_second_context,
)
"""What it can be told to do with a context beside the context's own methods."""


def uuids(driver: Driver) -> list[str]:
    return [device.uuid for device in driver.devices]


def _do(driver: Driver, mapper: MulticastCommands, device: int, method: str, args: list[Any]) -> Any:
    if method == "uuids":
        return uuids(driver)
    if hasattr(mapper, method):
        return getattr(mapper, method)(driver.devices[device].index, *args)
    context = driver.context(driver.devices[device].index)
    for ours in _OURS:
        if ours.__name__ == method:
            return ours(context, *args)
    return getattr(context, method)(*args)


def main(spec: str, link: str) -> None:
    """Serve until standard input ends."""
    driver = load(spec)
    mapper = MulticastCommands(driver, socket.socket(fileno=int(link)))
    for line in sys.stdin.buffer:
        device, method, args = json.loads(line)
        try:
            answer = [None, _encode(_do(driver, mapper, device, method, [_decode(arg) for arg in args]))]
        except DriverError as error:
            answer = [error.args, None]
        print(json.dumps(answer), flush=True)
    mapper.end()
    driver.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
