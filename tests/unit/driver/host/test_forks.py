"""A fork at any moment: what other threads of the parent have open of host devices is not the child's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from cubroker.driver import Driver
from cubroker.driver.host.shared_memory import BLOCK
from tests.brokers import PATIENCE
from tests.forkserver import unmeasured
from tests.unit.driver.conformance_vmm import lent
from tests.unit.driver.conftest import SPEC
from tests.unit.driver.multicast_setup import set_up_multicast
from tests.unit.driver.other_process import ROOT

FORKING = """
import os, sys, threading, warnings
from cubroker.driver import load
from cubroker.driver.host.multicast import RECOMMENDED
warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of a fork with threads; that is what is tested
context = load(sys.argv[1]).context(0)
kind, shared = sys.argv[2:4]
over = threading.Event()
sys.setswitchinterval(1e-6)  # so that a fork comes anywhere

def use():
    if kind == "vmm":
        with context.reserve(2 << 20) as reservation:
            reservation.map(int(shared), readonly=True)
    elif kind == "multicast":
        with context.window(RECOMMENDED) as window:
            window.map(int(shared))
    elif kind == "ipc":
        context.close(context.open(bytes.fromhex(shared)))
    else:
        context.open_event(bytes.fromhex(shared)).close()

def work():
    while not over.is_set():
        use()

def opened():
    found = {}
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        if os.path.lexists(path) and os.readlink(path).startswith(("/memfd:", "pipe:")):
            found[number] = os.readlink(path)
    return found

before = opened()
thread = threading.Thread(target=work)
thread.start()
left = []
for _ in range(50):
    child = os.fork()
    if child == 0:
        os._exit(opened() != before)
    left.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
over.set()
thread.join()
print(sum(left), "of", len(left), "children have more than they should", opened() == before)
"""


@contextmanager
def vmm(driver: Driver) -> Iterator[str]:
    with lent(driver) as descriptor:
        yield str(descriptor)


@contextmanager
def multicast(driver: Driver) -> Iterator[str]:
    with set_up_multicast(driver) as multicast:
        yield str(multicast.descriptor)


@contextmanager
def ipc(driver: Driver) -> Iterator[str]:
    context = driver.context(0)
    pointer = context.allocate(BLOCK)
    yield context.export(pointer).hex()
    context.free(pointer)


@contextmanager
def event(driver: Driver) -> Iterator[str]:
    with driver.context(0).event(shared=True) as made:
        yield made.export().hex()


@pytest.mark.parametrize("shared", [vmm, multicast, ipc, event])
def test_a_child_has_nothing_that_another_thread_was_opening(
    driver: Driver, shared: Callable[[Driver], AbstractContextManager[str]]
) -> None:
    with shared(driver) as what:  # unmeasured: coverage's own lock may be another thread's at the fork
        done = subprocess.run(
            [sys.executable, "-c", FORKING, SPEC, shared.__name__, what],
            capture_output=True,
            text=True,
            cwd=ROOT,
            pass_fds=[int(what)] if shared in (vmm, multicast) else [],
            check=False,
            timeout=PATIENCE,
            env=unmeasured(),
        )
    assert (done.stdout, done.stderr) == ("0 of 50 children have more than they should True\n", "")
