"""Processes that end in parts, or live on as something else: what they do, in processes of their own."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Thread

from cubroker.client import Broker
from tests.crash.content import LAYOUT, check, fill
from tests.crash.worker_pool import Channel

SYS_EXIT = {"x86_64": 60, "aarch64": 93}
"""The system call that ends one thread."""


def become_another_program(line: Channel, directory: str, name: str) -> None:
    """Exec while holding a lease and a draft; the new program opens a session of its own."""
    broker = Broker(directory)
    held = broker.attach(name), broker.create(f"{name}-draft", LAYOUT)
    line.say("attached")
    line.hear()
    assert held
    os.set_inheritable(line.fileno(), True)
    program = (
        "import socket, sys; from cubroker.client import Broker; from tests.crash.worker_pool import Channel;"
        "line = Channel(socket.socket(fileno=int(sys.argv[1])));"
        "broker = Broker(sys.argv[2]); line.say('another program'); line.hear()"
    )
    os.execv(sys.executable, [sys.executable, "-c", program, str(line.fileno()), directory])


def end_the_main_thread(line: Channel, directory: str, name: str) -> None:
    """End the main thread while another goes on reading."""
    broker = Broker(directory)
    pool = broker.attach(name)

    def go_on() -> None:
        while line.hear() == "check":
            check(pool)
            line.say("right")

    Thread(target=go_on).start()
    line.say("attached")
    ctypes.CDLL(None).syscall(SYS_EXIT[platform.machine()], 0)


def leave_an_heir(line: Channel, directory: str, name: str) -> None:
    """Start a program that inherits every descriptor: both sockets, and whatever else there is."""
    broker = Broker(directory)
    held = broker.attach(name), broker.create(f"{name}-draft", LAYOUT)
    assert held
    listed = [int(entry.name) for entry in list(Path("/proc/self/fd").iterdir())]
    everything = [number for number in listed if number > 2 and Path(f"/proc/self/fd/{number}").exists()]
    heir = subprocess.Popen(["/bin/cat"], stdin=line.fileno(), stdout=subprocess.DEVNULL, pass_fds=everything)
    line.say(str(heir.pid))
    heir.wait()


def start_other_programs(line: Channel, directory: str, name: str) -> None:
    """Hold a pool and a draft while other programs are started, which use the broker too."""
    inherited = (
        "import os; files = [os.readlink(f'/proc/self/fd/{number}') for number in range(3, 1000)"
        " if os.path.lexists(f'/proc/self/fd/{number}')]; print(files)"
    )
    attach = (
        "import sys; from cubroker.client import Broker; from tests.crash.content import check\n"
        "with Broker(sys.argv[1]) as broker, broker.attach(sys.argv[2]) as pool: check(pool); print('right')"
    )
    with Broker(directory) as broker, broker.attach(name) as pool, broker.create(name, LAYOUT) as draft:
        array = pool["first"].numpy()
        line.say(f"{_output(inherited)} {_output(attach, directory, name)}")
        line.hear()
        assert array.tobytes() == pool["first"].tobytes()
        check(pool)
        fill(draft)
        del array
        line.say(f"sealed {draft.seal()}")
        line.hear()


def start_workers(line: Channel, directory: str, name: str) -> None:
    """Hold a pool and a draft while multiprocessing starts workers, which use the broker too."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Broker(directory) as broker,
        broker.attach(name) as pool,
        broker.create(name, LAYOUT) as draft,
    ):
        tempfile.tempdir = folder  # multiprocessing's folder goes when the interpreter exits, which a life never does
        for method in ("spawn", "forkserver"):
            with multiprocessing.get_context(method).Pool(1) as workers:
                line.say(workers.apply(read_back, (directory, name)))
                workers.close()
                workers.join()
        check(pool)
        fill(draft)
        line.say(f"sealed {draft.seal()}")
        line.hear()


def read_back(directory: str, name: str) -> str:
    """Attach in a worker of a worker."""
    with Broker(directory) as broker, broker.attach(name) as pool:
        check(pool)
    return "right"


def _output(program: str, *args: str) -> str:
    """Run a program that inherits whatever is not marked close-on-exec."""
    command = [sys.executable, "-c", program, *args]
    return subprocess.run(command, check=True, capture_output=True, text=True, close_fds=False).stdout.strip()
