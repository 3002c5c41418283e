"""Workers at their limits of threads, many at once, while the broker serves another user."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from cubroker.protocol.paths import REQUEST_SOCKET, SESSION_SOCKET
from tests.brokers import PATIENCE, serving
from tests.integration.hostile.hostile_peers import HOSTILITY, witnessed
from tests.unit.client.scripts import start

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="users without other processes take root, which has no such limit"),
    pytest.mark.slow,
]

USERS = range(51_000, 51_003)
OPENERS = 8

CROWD = """
import json, resource, time
from cubroker.protocol import CubrokerError

def left():
    return sorted(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

user, limit, openers, rounds = map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
os.setgroups([])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
before, said, together = left(), [], threading.Barrier(openers, timeout=60)

def attempt():
    together.wait()
    try:
        broker = Broker(directory)
    except CubrokerError as error:
        said.append((error.code, str(error)))
        together.wait()
    else:
        try:
            said.append(("", len(broker.devices())))
            together.wait()  # all that were opened are open at once
        finally:
            broker.close()

for _ in range(rounds):
    threads = [threading.Thread(target=attempt) for _ in range(openers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 60
    while left() != before and time.monotonic() < deadline:
        time.sleep(0.01)
print(json.dumps([said, left() == before]))
"""
"""Opens a broker on many threads at once, in a process whose user may have few threads; root has no such limit."""


def crowd(process: subprocess.Popen[str]) -> list[tuple[str, object]]:
    """Return what came of each attempt of a process, which lives to tell of it and has nothing left."""
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, err) == (0, ""), "libzmq aborts where it gets one thread and not two"
    said, as_before = json.loads(out)
    assert as_before, said
    return [(code, what) for code, what in said]


@pytest.mark.slow
def test_threads_that_open_brokers_at_their_limit_all_at_once_are_refused_or_served_and_end_no_process() -> None:
    with serving() as broker, witnessed(broker) as witness:
        for folder in (broker.directory.parent, broker.directory):
            folder.chmod(0o755)
        for name in (SESSION_SOCKET, REQUEST_SOCKET):
            (broker.directory / name).chmod(0o666)
        for limit in (OPENERS + 1, OPENERS + 7, OPENERS + 12):  # which is room for none, one, and two of four threads
            arguments = [(str(user), str(limit), str(OPENERS), str(HOSTILITY)) for user in USERS]
            processes = [start(broker, CROWD, *each, measured=False) for each in arguments]
            witness.check()
            for process in processes:
                said = crowd(process)
                refused = [str(what) for code, what in said if code]
                assert {code for code, _ in said} <= {"", "unavailable"}
                assert len(said) == OPENERS * HOSTILITY
                assert len(refused) >= HOSTILITY * (OPENERS - (limit - OPENERS - 1) // 4)
                assert all(f"RLIMIT_NPROC (ulimit -u) is {limit}, for all threads" in each for each in refused), refused
                assert all(what == 2 for code, what in said if not code)
            witness.check()
