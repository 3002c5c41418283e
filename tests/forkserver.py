"""Python processes for tests, forked from one that has imported cubroker already.

An executed broker spends two thirds of its start on imports, and the suite starts thousands of processes. So each
process that runs tests has *fork servers*: one for each set of modules that its children need. A fork server has no
thread and holds nothing open but the socket to the tests. A child gets its own arguments, environment, directory,
standard streams and descriptors; it ends as any interpreter does, and is killed when the fork server ends, as that does
with the tests. Tests of what a fresh interpreter does, of what it imports, or of its command line as /proc shows it,
execute one with :class:`subprocess.Popen` instead.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

SERVER = ("cubroker.server.__main__", "cubroker.driver.host.bindings")
CLIENT = (
    "cubroker.client.broker",
    "cubroker.client.pool",
    "cubroker.driver.host.bindings",
    "numpy",
)
CLI = (
    *("cubroker.cli.main", "cubroker.cli.broker", "cubroker.cli.load", "cubroker.cli.top"),
    *("cubroker.cli.serve", "cubroker.cli.keep", "cubroker.cli.doctor.command"),
    *("cubroker.cli.demo", "cubroker.client.broker", "cubroker.server.__main__", "cubroker.driver.host.bindings"),
)
TORCH = (*CLIENT, "torch", "torch._dynamo", "cubroker.integrations.torch")
"""Modules that a fork server has imported before its first child. Torch takes two seconds of a processor, and a second
more once a tensor on its meta device is made, which imports _dynamo."""

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Variables that keep numpy from starting threads, which do not survive a fork."""

AT_START = dict(os.environ)
"""The environment before any test changed it, which fork servers get whenever they are started."""

LEAST = 700
"""The lowest number that a received descriptor has in a child before it gets its own."""

MOST = 250
"""Descriptors of one child (SCM_MAX_FD is 253)."""

TYPED = (signal.SIGINT, signal.SIGHUP)
"""Signals of a terminal, which a shell has a program in the background ignore."""

FRESH = {signal.SIGINT: signal.default_int_handler}
"""What a new interpreter does at them, if not the default."""

_PR_SET_PDEATHSIG = 1

SELF = "(own pid)"
"""As the value of a variable: the number of the process, which is not known before it is there."""


class Forked(subprocess.Popen[Any]):
    """A child of a fork server, with the interface of :class:`subprocess.Popen`.

    Args:
        program: ``["-m", module, *arguments]`` or ``["-c", source, *arguments]``.
        preload: what the fork server has imported.
        measured: whether coverage of it, and of what it executes, is measured, if that of the tests is.
        foreground: whether it has signals as in a shell's foreground, even if the tests ignore some.
        fail_on: classes of warnings that are errors in it, as ``-W error::`` makes them.
        descriptors: those that it inherits, by the number they get there; ``pass_fds`` keep their numbers.
    """

    def __init__(
        self,
        program: Sequence[str],
        *,
        preload: tuple[str, ...] = CLIENT,
        measured: bool = True,
        foreground: bool = False,
        fail_on: Sequence[str] = (),
        descriptors: Mapping[int, int] | None = None,
        **options: Any,
    ) -> None:
        self._server = _fork_server(preload, measured)
        self._measured = measured
        self._foreground = foreground
        self._fail_on = list(fail_on)
        self._descriptors = dict(descriptors or {})
        self._status = -1
        super().__init__([sys.executable, *program], **options)

    def _execute_child(  # type: ignore[override]
        self,
        args: list[str],
        executable: object,
        preexec_fn: object,
        close_fds: object,
        pass_fds: Sequence[int],
        cwd: os.PathLike[str] | str | None,
        env: Mapping[str, str] | None,
        startupinfo: object,
        creationflags: object,
        shell: object,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        restore_signals: object,
        gid: object,
        gids: object,
        uid: object,
        umask: object,
        start_new_session: bool,
        *others: object,
    ) -> None:
        assert preexec_fn is None, "a fork server calls no function of the test's"
        streams = (p2cread, 0), (c2pwrite, 1), (errwrite, 2)
        wanted = {number: given if given >= 0 else number for given, number in streams}
        wanted |= {number: number for number in pass_fds} | self._descriptors
        environment = dict(os.environ if env is None else env)
        if not self._measured:  # nor what it executes
            environment = unmeasured(environment)
        order = {
            "program": args[1:],
            "environment": environment,
            "directory": os.fspath(cwd or Path.cwd()),
            "numbers": list(wanted),
            "session": start_new_session,
            "fail_on": self._fail_on,
            "ignored": [] if self._foreground else [each for each in TYPED if signal.getsignal(each) is signal.SIG_IGN],
        }
        self.pid, self._status = self._server.fork(order, list(wanted.values()))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._ended()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
            self._ended()
        return self.returncode

    def _ended(self) -> None:
        said = os.read(self._status, 8)
        os.close(self._status)
        assert said, f"the fork server of process {self.pid} has ended"
        self.returncode = os.waitstatus_to_exitcode(struct.unpack("q", said)[0])

    def __del__(self, *_: object, **__: object) -> None:
        """Unlike a child of this process it needs nobody who waits for it."""
        if self._status >= 0 and self.returncode is None:
            os.close(self._status)


def run(
    program: Sequence[str], *, timeout: float | None = None, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a program to its end, as :func:`subprocess.run` does."""
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Forked(program, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    result = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        result.check_returncode()
    return result


@contextmanager
def heeded(*numbers: signal.Signals) -> Iterator[None]:
    """What is started meanwhile ignores none of these signals because this process does.

    Shells ignore SIGINT and SIGQUIT in what runs in the background, such as tests, and nohup ignores SIGHUP.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # unlike SIG_IGN it does not outlive an exec
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def unmeasured(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return variables, by default those of now, without what has the coverage of a new interpreter measured."""
    given = os.environ if environment is None else environment
    return {name: value for name, value in given.items() if not name.startswith("COVERAGE_")}


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def like_ours(environment: Mapping[str, str] | None = None) -> bool:
    """Whether an interpreter with these variables, by default those of now, starts as the fork servers did."""
    now = os.environ if environment is None else environment
    return _python(now) == _python(AT_START)


def _python(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("PYTHON")}


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a command: forked if it is a program of this interpreter, else executed.

    ``preload`` and ``measured`` are as for :class:`Forked`; ``descriptors`` are for programs that are forked.
    """
    if command[0] == sys.executable and command[1] in ("-m", "-c") and like_ours(options.get("env")):
        return Forked(command[1:], **options)
    for each in ("preload", "measured"):
        options.pop(each, None)
    return subprocess.Popen(command, **options)


def prepare(preload: tuple[str, ...], *, measured: bool = True) -> None:
    """Start a fork server before its first child is needed."""
    _fork_server(preload, measured)


class _ForkServer:
    """A fork server, as the tests have it."""

    def __init__(self, preload: tuple[str, ...], measured: bool) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        environment = (AT_START if measured else unmeasured(AT_START)) | ONE_THREAD
        with theirs:
            command = [sys.executable, "-m", "tests.forkserver", *preload]
            self._process = subprocess.Popen(command, cwd=ROOT, stdin=theirs.fileno(), env=environment)

    def fork(self, order: dict[str, Any], descriptors: Sequence[int]) -> tuple[int, int]:
        """Return a child's number, and the descriptor that says its status."""
        assert len(descriptors) < MOST, f"{len(descriptors)} descriptors do not fit into a message"
        status, theirs = os.pipe()
        try:
            with os.fdopen(os.memfd_create("order"), "wb") as long:  # an environment may be longer than a message
                long.write(json.dumps(order).encode())
                long.flush()
                socket.send_fds(self._line, [b"fork"], [long.fileno(), theirs, *descriptors])
        finally:
            os.close(theirs)
        return int(self._line.recv(100)), status

    def begin_to_end(self) -> None:
        """Have it end once it has done what it was told before."""
        self._line.shutdown(socket.SHUT_RDWR)  # a fork of ours may have it too
        self._line.close()

    def wait(self) -> None:
        """Wait for its end."""
        self._process.wait()


_fork_servers: dict[tuple[tuple[str, ...], bool], _ForkServer] = {}
"""By what they have imported, and whether they are measured."""

_STARTER = os.getpid()


def _fork_server(preload: tuple[str, ...], measured: bool) -> _ForkServer:
    """Return the fork server that has imported ``preload``; it ends with the process that asks for it."""
    measured = measured and any(name.startswith("COVERAGE_") for name in os.environ)
    if (preload, measured) not in _fork_servers:
        _fork_servers[preload, measured] = _ForkServer(preload, measured)
    return _fork_servers[preload, measured]


@atexit.register
def close() -> None:
    """End all fork servers, unless this is a fork of the process that started them."""
    if os.getpid() == _STARTER:
        for each in _fork_servers.values():
            each.begin_to_end()
        while _fork_servers:
            _fork_servers.popitem()[1].wait()


# -- in the fork server ----------------------------------------------------------------------------


def _serve(line: socket.socket) -> Callable[[], object]:
    """Fork for every message; return in each child what it is to do, and never in the fork server itself."""
    children: dict[int, int] = {}
    woken, wake = os.pipe()
    for each in (woken, wake):
        os.set_blocking(each, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([line, woken], [], [])
        if woken in ready:
            os.read(woken, 1000)
            _reap(children)
        if line not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(line, 100, MOST)
        if not message:
            os._exit(0)
        long, status, *given = descriptors
        with os.fdopen(long, "rb") as file:
            file.seek(0)
            order = json.load(file)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (line.detach(), woken, wake, status, *children.values()):
                os.close(each)
            return partial(_become, order, given)
        children[pid] = status
        for each in given:
            os.close(each)
        line.send(b"%d" % pid)


def _reap(children: dict[int, int]) -> None:
    """Say the status of every child that has ended."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        pipe = children.pop(pid)
        with suppress(BrokenPipeError):  # the test has forgotten it
            os.write(pipe, struct.pack("q", status))
        os.close(pipe)


def _become(order: dict[str, Any], given: list[int]) -> None:
    """Be what was ordered, as a new interpreter would."""
    end_with_parent()
    for each in TYPED:
        signal.signal(each, signal.SIG_IGN if each in order["ignored"] else FRESH.get(each, signal.SIG_DFL))
    if order["session"]:
        os.setsid()
    _place(dict(zip(order["numbers"], given, strict=True)))
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(
        {name: str(os.getpid()) if value == SELF else value for name, value in order["environment"].items()}
    )
    time.tzset()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), line_buffering=os.isatty(1))  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb", 0, closefd=False), errors="backslashreplace", write_through=True)  # noqa: SIM115
    warnings.resetwarnings()
    warnings.simplefilter("default")
    warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning, "runpy")
    for each in order["fail_on"]:
        warnings.simplefilter("error", getattr(__builtins__, each))
    kind, what, *arguments = order["program"]
    if kind == "-m":
        sys.argv = [what, *arguments]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *arguments]
        scope = {"__name__": "__main__", "__builtins__": __builtins__}
        exec(compile(what, "<string>", "exec"), scope)


def _place(given: dict[int, int]) -> None:
    """Give descriptors their numbers, and close all others."""
    high = {number: fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, LEAST) for number, each in given.items()}
    top = max((*high.values(), *high), default=2) + 1
    _close(3, LEAST, high)
    for number, each in high.items():
        os.dup2(each, number)
    _close(LEAST, top, high)


def _close(first: int, end: int, kept: Iterable[int]) -> None:
    """Close all descriptors from ``first`` to before ``end`` but those that are kept, a run in each system call."""
    bounds = [first - 1, *sorted(each for each in kept if first <= each < end), end]
    for low, high in pairwise(bounds):
        os.closerange(low + 1, high)


def main(preload: Sequence[str]) -> None:
    """Be a fork server on standard input until that ends, and in each child what was ordered."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the tests
    for module in preload:
        import_module(module)
    line = socket.socket(fileno=os.dup(0))
    with ExitStack() as stack:
        null = stack.enter_context(open(os.devnull, "rb"))
        os.dup2(null.fileno(), 0)
    gc.collect()
    gc.freeze()
    job = _serve(line)
    job()


if __name__ == "__main__":
    main(sys.argv[1:])
