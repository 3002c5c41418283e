"""A check of the headroom for libzmq: allocate the descriptors, threads and memory that it needs, and free them again.

libzmq aborts the process if it gets some of them and then no more (posix_assert in thread.cpp, 4.3.5). No limit
can be read instead: RLIMIT_NPROC counts all threads of a user and exempts root, pids.max counts those of a control
group, and RLIMIT_AS depends on what malloc reserves for each new thread.

So this module starts the same number of threads, which all live at the same time and all end before libzmq starts its
own. A thread that has returned, and even one that was joined, counts until the kernel has released it: then its entry
in /proc is gone. glibc caches the stacks of threads that have ended and uses them again, so address space that other
threads take in between does no harm. Sessions of one process start their threads one after the other. The remaining
risk is a thread that something else starts at that moment, in this process or in another one of the user.
"""

from __future__ import annotations

import mmap
import os
import resource
import time
from collections.abc import Sequence
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from threading import Lock, RLock, Thread, get_native_id, main_thread

DESCRIPTORS = 8
"""Descriptors that libzmq opens for a context and its connection, and one more."""

THREADS = 2
"""Threads that libzmq starts with a context's first socket: one for I/O, and one that closes sockets."""

STACK = 8 << 20
"""Bytes of address space for the stack of a thread if RLIMIT_STACK sets no size."""

MEMORY = 4 << 20
"""Bytes that a thread and a connection allocate when they begin."""

PATIENCE = 10.0
"""Seconds to wait for a thread to run. A thread that was started and has no memory to run in never does."""


_turn = RLock()


def _renew() -> None:
    """Replace the lock in a forked child, where the thread that holds it does not exist."""
    global _turn
    _turn = RLock()


os.register_at_fork(after_in_child=_renew)


class Shortage(Exception):
    """The process, or its user, is short of descriptors, threads or memory; names the limits."""


def turn() -> RLock:
    """Return the lock that keeps other sessions of this process from starting threads.

    The holder waits for none of these sessions. This is a bare lock: an interrupt in the middle of a context manager
    that is written in Python would leave it taken.

    Raises:
        Shortage: this thread holds the lock: a signal handler or finalizer opens a session in the middle of another.
    """
    if _turn._is_owned():  # type: ignore[attr-defined]
        raise Shortage(
            "a signal handler or a finalizer cannot open a Broker while its thread is opening another; open it in other"
            " code"
        )
    return _turn


def check() -> None:
    """Raise ``Shortage`` if libzmq would get less than it needs for a context and its connection."""
    try_descriptors()
    try_threads()


def try_descriptors() -> None:
    """Raise ``Shortage`` unless the process can open :data:`DESCRIPTORS` more."""
    with ExitStack() as opened:
        try:
            for _ in range(DESCRIPTORS):
                opened.callback(os.close, os.eventfd(0, os.EFD_CLOEXEC))
        except OSError as error:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise Shortage(
                f"{DESCRIPTORS} more descriptors are needed: {error.strerror}; raise RLIMIT_NOFILE (ulimit -n), which"
                f" is {limit}, or close files"
            ) from None


def try_threads() -> None:
    """Raise ``Shortage`` unless the process can have :data:`THREADS` more at the same time, and memory for them."""
    running: SimpleQueue[int] = SimpleQueue()
    release = Lock()

    def stay() -> None:
        running.put(get_native_id())
        with release:
            pass

    started: list[int] = []
    try:
        with release:
            for _ in range(THREADS):
                try_memory(1)
                Thread(target=stay, name="cubroker-headroom", daemon=True).start()
                started.append(running.get(timeout=PATIENCE))
            try_memory(THREADS)  # in case threading.stack_size() is less than the stacks of libzmq's threads
    except (MemoryError, Empty):
        raise Shortage(f"{THREADS} more threads have no memory to run in; {memory_limits()}") from None
    except RuntimeError:
        raise Shortage(f"{THREADS} more threads are needed; {thread_limits()}") from None
    finally:
        _await_release(started)


def try_memory(stacks: int) -> None:
    """Raise ``Shortage`` unless the process can map ``stacks`` stacks of threads and :data:`MEMORY` more bytes."""
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    stacks_bytes = stacks * (STACK if stack == resource.RLIM_INFINITY else stack)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        # The first is mapped without access, like an unused stack: it counts as address space, not as memory.
        with mmap.mmap(-1, max(stacks_bytes, 1), private, prot=0), mmap.mmap(-1, MEMORY, private):
            pass
    except (OSError, MemoryError):
        raise Shortage(f"{(stacks_bytes + MEMORY) >> 20} MiB more memory are needed; {memory_limits()}") from None


def thread_limits() -> str:
    """Say what keeps this process from starting a thread: its own exit, or one of the limits."""
    if not main_thread().is_alive():  # hooks of `atexit` run
        return "the interpreter is exiting, and starts no threads any more: do this before its exit"
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    count = "sets no limit" if limit == resource.RLIM_INFINITY else f"is {limit}, for all threads of the user"
    return (
        f"RLIMIT_NPROC (ulimit -u) {count}; pids.max of the control group may be lower: raise the one that is reached"
    )


def memory_limits() -> str:
    """Say which limits may keep this process from mapping memory."""
    kinds = (("RLIMIT_AS (ulimit -v)", resource.RLIMIT_AS), ("RLIMIT_DATA (ulimit -d)", resource.RLIMIT_DATA))
    limits = ((name, resource.getrlimit(kind)[0]) for name, kind in kinds)
    finite = [f"{name} is {limit >> 20} MiB" for name, limit in limits if limit != resource.RLIM_INFINITY]
    return f"{' and '.join(finite)}: raise that" if finite else "the system has no more"


def _await_release(threads: Sequence[int]) -> None:
    """Wait until the kernel has released threads that are about to end."""
    deadline = time.monotonic() + PATIENCE
    while any(os.path.lexists(f"/proc/self/task/{thread}") for thread in threads) and time.monotonic() < deadline:
        time.sleep(0.0001)
