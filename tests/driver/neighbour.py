"""A second process with a driver of its own, which does what it is told, one JSON line at a time."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

from cubroker.driver import Context, Driver, DriverError, load

ROOT = Path(__file__).parents[2]


class Neighbour:
    """The process, as its starter sees it. ``ask`` calls a method of the context of one of its devices."""

    def __init__(self, spec: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.driver.neighbour", spec],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
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

    def stop(self) -> None:
        """Stop it, as a debugger would; return when no thread of it runs any more."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

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
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            context.open(handle)
            os.write(writing, b"opened")
        except DriverError as error:
            os.write(writing, error.name.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        name = pipe.read().decode()
    os.wait()
    return name


def uuids(driver: Driver) -> list[str]:
    return [device.uuid for device in driver.devices]


def _do(driver: Driver, device: int, method: str, args: list[Any]) -> Any:
    if method == "uuids":
        return uuids(driver)
    context = driver.context(driver.devices[device].index)
    if method == "open_at_once":
        return open_at_once(context, *args)
    if method == "fork_and_open":
        return fork_and_open(context, *args)
    return getattr(context, method)(*args)


def main(spec: str) -> None:
    """Serve until standard input ends."""
    driver = load(spec)
    for line in sys.stdin.buffer:
        device, method, args = json.loads(line)
        try:
            answer = [None, _encode(_do(driver, device, method, [_decode(arg) for arg in args]))]
        except DriverError as error:
            answer = [error.args, None]
        print(json.dumps(answer), flush=True)
    driver.close()


if __name__ == "__main__":
    main(sys.argv[1])
