"""Which of our functions one real request runs through: ``python -m benchmarks.trace attach|create|seal|close|ls``.

A broker on a host device runs in a process of its own, and this process is the client. Both note every call of a
function of ours while the request is under way, the gateway excepted. ``--paths`` prints each call, indented by depth.

What stands for others' code is left out: ``driver.host``, which emulates the CUDA driver, and the constructors that
dataclasses generate, as those of named tuples and msgspec's structs are.
"""

from __future__ import annotations

import argparse
import json
import mmap
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from cubroker.client import Broker
from cubroker.protocol import Layout
from cubroker.server.main import configure, serve

LAYOUT = Layout.pack([("x", "U8", (1 << 20,))])
PACKAGES = ("protocol", "driver", "server", "client", "integrations", "cli")
INNER = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")
"""Parts of a function that only some versions of Python call."""

RESTING = 10
"""How many times in a row the broker's loop has to be found waiting before a request begins."""


class Call(NamedTuple):
    """One call of a function of ours."""

    thread: str
    #: How many functions of ours were on the stack, this one included.
    depth: int
    module: str
    function: str


class Tracer:
    """A recorder of the calls of this process, on all of its threads, while the byte of a shared file is set.

    Args:
        switch: the file.
    """

    def __init__(self, switch: Path) -> None:
        self.calls: list[Call] = []
        with switch.open("r+b") as file:
            self._on = mmap.mmap(file.fileno(), 1)
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self._on[0] and (module := _module(frame)) and frame.f_code.co_name not in INNER:
            stack = [each for each in _stack(frame) if _module(each)]
            self.calls.append(Call(threading.current_thread().name, len(stack), module, frame.f_code.co_qualname))


def _module(frame: FrameType) -> str:
    """Return the module of a frame if it is ours, without the package root."""
    name = str(frame.f_globals.get("__name__", "")).removeprefix("cubroker.")
    ours = name.partition(".")[0] in PACKAGES and not name.startswith("driver.host.")
    return name if ours and frame.f_code.co_filename != "<string>" else ""


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, up to the event loop."""
    while frame and not frame.f_globals.get("__name__", "").startswith("asyncio."):
        yield frame
        frame = frame.f_back


def _serve(directory: str, switch: Path, output: Path) -> int:
    """Run the broker, and write its calls at the end."""
    tracer = Tracer(switch)
    options = {"directory": directory, "devices": "host:1", "limits.mapped_check_seconds": "0"}
    try:
        return serve(configure(None, options), lambda: print("serving", flush=True))
    finally:
        output.write_text(json.dumps(tracer.calls))


Request = Callable[[], object]


def _attach(broker: Broker, share: str) -> tuple[Request, Request]:
    held: list[Any] = []
    return lambda: held.append(broker.attach("pool")), lambda: held.pop().close()


def _close(broker: Broker, share: str) -> tuple[Request, Request]:
    held = [broker.attach("pool")]
    return lambda: held.pop().close(), lambda: held.append(broker.attach("pool"))


def _create(broker: Broker, share: str) -> tuple[Request, Request]:
    held: list[Any] = []
    return lambda: held.append(broker.create("another", LAYOUT, share=share)), lambda: held.pop().close()


def _seal(broker: Broker, share: str) -> tuple[Request, Request]:
    held = [broker.create("pool", LAYOUT, share=share)]
    return lambda: held.pop().seal(), lambda: held.append(broker.create("pool", LAYOUT, share=share))


def _ls(broker: Broker, share: str) -> tuple[Request, Request]:
    return broker.pools, lambda: None


REQUESTS = {"attach": _attach, "create": _create, "seal": _seal, "close": _close, "ls": _ls}
"""By name, what returns two functions: one makes the request, and one prepares the next one."""


@contextmanager
def _broker(folder: Path, switch: Path, output: Path) -> Iterator[int]:
    arguments = ("--serve", str(folder), str(switch), str(output))
    command = [sys.executable, "-m", "benchmarks.trace", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            assert process.stdout.readline() == "serving\n", "the broker did not start"
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)


def _rest(server: int) -> None:
    """Return when the loop of a broker has waited long enough to have finished the work after its last reply."""
    resting = 0
    while resting < RESTING:
        time.sleep(0.001)
        state = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[0]  # of the main thread
        resting = resting + 1 if state == "S" else 0


def trace(what: str, share: str) -> dict[str, list[Call]]:
    """Return the calls of one request, on both sides; the first two requests of the kind are not recorded."""
    with tempfile.TemporaryDirectory(prefix="cubroker-trace-") as name:
        folder = Path(name)
        switch, output = folder / "switch", folder / "calls"
        switch.write_bytes(bytes(1))
        tracer = Tracer(switch)
        with ExitStack() as undo:
            file = undo.enter_context(switch.open("r+b"))
            on = undo.enter_context(mmap.mmap(file.fileno(), 1))
            server = undo.enter_context(_broker(folder / "broker", switch, output))
            broker = undo.enter_context(Broker(folder / "broker"))
            broker.create("pool", LAYOUT, share=share).seal()
            request, prepare = REQUESTS[what](broker, share)
            for noted in (False, False, True):
                _rest(server)
                on[0] = noted
                request()
                on[0] = False
                prepare()
        return {"broker": [Call(*each) for each in json.loads(output.read_text())], "client": tracer.calls}


def _print(side: str, calls: Sequence[Call], *, paths: bool) -> None:
    modules = list(dict.fromkeys(call.module for call in calls))
    threads = list(dict.fromkeys(call.thread for call in calls))
    deepest = max((call.depth for call in calls), default=0)
    print(f"{side}: {len(calls)} calls, {len(modules)} modules, depth {deepest}, threads {', '.join(threads)}")
    print("  " + ", ".join(modules))
    for call in calls if paths else ():
        thread = f"[{call.thread}] " if len(threads) > 1 else ""
        print(f"  {thread}{'  ' * (call.depth - 1)}{call.module}.{call.function}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace", description=__doc__)
    parser.add_argument("request", choices=REQUESTS)
    parser.add_argument("--share", default="ipc", help="how the pool is shared: ipc or vmm")
    parser.add_argument("--paths", action="store_true", help="print every call")
    if sys.argv[1:2] == ["--serve"]:
        directory, switch, output = sys.argv[2:]
        return _serve(directory, Path(switch), Path(output))
    options = parser.parse_args()
    for side, calls in trace(options.request, options.share).items():
        _print(side, calls, paths=options.paths)
    return 0


if __name__ == "__main__":
    sys.exit(main())
