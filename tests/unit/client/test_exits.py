from __future__ import annotations

import inspect
import re
import signal
import subprocess
import sys
from itertools import product

import pytest

from cubroker.client import Broker
from tests.brokers import PATIENCE, BrokerProcess, eventually, serving
from tests.forkserver import CLIENT, TORCH
from tests.sampling import daily
from tests.unit.client import interrupts
from tests.unit.client.conftest import leases, publish
from tests.unit.client.scripts import run, start
from tests.unit.client.shares import DEFAULT, KINDS

BOTH = pytest.mark.usefixtures("share")
"""Marks what is tried with either kind of memory."""

OWN_DRAFTS = ("publish", "digest", "discard", "close", "load")
"""Calls that are interrupted and make a draft."""

OTHERS = ("attach", "sleep", "hand_over", "watch", "follow", "begin", "verify", "publish_arrays", "switch")
"""Other calls that are interrupted: :mod:`interrupts` says what kind of memory they use."""


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


@pytest.mark.slow
@BOTH
def test_a_process_may_exit_with_everything_open(client: Broker, lender: BrokerProcess, name: str, share: str) -> None:
    publish(client, name)
    torch = share == "vmm"
    hand_over = (
        "import torch; take = torch.utils.dlpack.from_dlpack" if torch else "take = lambda each: each.__dlpack__()"
    )
    done = run(
        lender,
        f"""
        {hand_over}
        broker = Broker(directory)
        pool = broker.attach(sys.argv[2])
        tensors = [take(tensor) for tensor in pool.values()]
        arrays = [pool["weight"].numpy(), pool["weight"].__dlpack__()]
        draft = broker.create("exit", pool.layout)
        watch = broker.watch("exit")
        threading.Thread(target=lambda: broker.attach("never", wait=3600), daemon=True).start()
        threading.Thread(target=lambda: (next(watch), next(watch)), daemon=True).start()
        print("open")
        """,
        name,
        preload=TORCH if torch else CLIENT,
        measured=not torch,
    )
    assert (done.returncode, done.stdout) == (0, "open\n")
    assert not done.stderr or (torch and not re.search("Error|Exception|Warning", done.stderr))  # triton leaks
    eventually(lambda: [info.leases for info in client.pools()] == [0], "the end of the leases and of the draft")


@BOTH
def test_what_is_closed_after_the_exit_hooks_returns_at_once(client: Broker, lender: BrokerProcess, name: str) -> None:
    publish(client, name)
    program = """
    broker = pool = draft = None

    def late():
        pool.close()
        draft.close()
        broker.close()
        try:
            broker.pools()
        except Exception as error:
            print(type(error).__name__)
        print("closed")

    import atexit
    from cubroker.client import session as sessions
    atexit.unregister(sessions.stop_sessions)  # hooks run in reverse: this one comes last
    atexit.register(late)
    atexit.register(sessions.stop_sessions)
    broker = Broker(directory)
    pool = broker.attach(sys.argv[2])
    draft = broker.create("exit", pool.layout)
    """
    done = run(lender, program, name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Unavailable\nclosed\n", "")


@pytest.mark.parametrize("before", ["", "publish()"])
def test_a_publication_at_the_interpreters_exit_is_refused_with_that_reason(
    lender: BrokerProcess, client: Broker, name: str, before: str
) -> None:
    """In an interpreter of its own, which has imported nothing before."""
    program = f"""
import atexit, sys
from cubroker import Broker, Unavailable
directory, name = sys.argv[1:]

def publish():
    return broker.publish(name, {{"x": b"1"}})

def late():
    try:
        publish()
    except Unavailable as error:
        print(error)
    print(*(pool.name for pool in broker.pools()))
    broker.close()

broker = Broker(directory)
{before}
atexit.register(late)
"""
    command = [sys.executable, "-c", program, str(lender.directory), name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    refusal, pools = done.stdout.splitlines()
    assert re.search("(after|at) .*shutdown; the interpreter is exiting, .*: do this before its exit$", refusal)
    assert (pools, done.stderr) == (name if before else "", "")


def test_sessions_may_come_and_go_while_the_interpreter_exits(lender: BrokerProcess) -> None:
    program = """
    from cubroker.client import session as sessions

    class Session:
        def stop(self):
            pass

    def come_and_go():
        while not over:
            sessions.SESSIONS.add(Session())

    over, kept = False, [Session() for _ in range(500)]
    for session in kept:
        sessions.SESSIONS.add(session)
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(500):
            sessions.stop_sessions()
    finally:
        over = True
    """
    done = run(lender, program, measured=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "call",
    [
        'broker.attach("never", wait=3600)',
        'broker.create("taken", layout, wait=3600)',
        "next(watch); next(watch)",
    ],
)
def test_an_interrupt_ends_a_wait_at_once_and_loses_no_lease(
    client: Broker, lender: BrokerProcess, name: str, call: str
) -> None:
    with client.create(name, _layout()):
        process = start(
            lender,
            f"""
            from tests.unit.client.conftest import session_of

            layout = Layout.pack([("a", "U8", (1,))])
            with Broker(directory) as broker:
                watch = broker.watch("watched")
                timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
                try:
                    timer.start()
                    {call.replace("taken", name)}
                except KeyboardInterrupt:
                    print("interrupted")
                timer.join()
                print(len(session_of(broker).held) <= 1)
                broker.pools()
                print(broker.requests.waiting())
            """,
            measured=False,
        )
        returncode, out, err = end(process)
    assert (returncode, err) == (0, "")
    assert out == "interrupted\nTrue\nFalse\n"


def _layout() -> object:
    from tests.unit.client.conftest import LAYOUT

    return LAYOUT


@BOTH
def test_interrupts_at_any_moment_lose_no_lease(client: Broker, lender: BrokerProcess, name: str) -> None:
    publish(client, name)
    process = start(
        lender,
        """
        import random
        name = sys.argv[2]
        with Broker(directory) as broker:
            random.seed(5)
            hits = 0
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            for number in range(150):
                try:
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1.5e-3))
                    with broker.attach(name) as pool:
                        pool["weight"].tobytes()
                    if number % 3 == 0:
                        with broker.create("interrupted", pool.layout, wait=60):
                            pass
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    hits += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            pool = None
            print("hits", hits > 10, flush=True)
            print(sys.stdin.readline().strip())
        """,
        name,
        measured=False,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "hits True\n", process.communicate()[1]
        eventually(lambda: [info.leases for info in client.pools()] == [0], "the end of all leases and drafts")
        returncode, out, err = (*end_with(process, "done"),)
    finally:
        process.kill()
        process.wait()
    assert (returncode, out, err) == (0, "done\n", "")


def end_with(process: subprocess.Popen[str], word: str) -> tuple[int, str, str]:
    out, err = process.communicate(word + "\n", timeout=PATIENCE)
    return process.returncode, out, err


@BOTH
def test_a_killed_worker_holds_nothing(client: Broker, lender: BrokerProcess, name: str) -> None:
    publish(client, name)
    process = start(
        lender,
        """
        broker = Broker(directory)
        pool = broker.attach(sys.argv[2])
        print("attached", flush=True)
        signal.pause()
        """,
        name,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "attached\n"
        assert leases(client, name) == 1
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    eventually(lambda: leases(client, name) == 0, "the end of the lease")


@BOTH
def test_a_process_whose_broker_has_died_exits_too() -> None:
    with serving() as broker:
        process = start(
            broker,
            """
            broker = Broker(directory)
            draft = broker.create("pool", Layout.pack([("a", "U8", (4,))]))
            array = draft["a"].numpy()
            print("open", flush=True)
            sys.stdin.readline()
            array[:] = 1
            """,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        broker.kill()
        try:
            assert process.stderr is not None
            assert "is gone: the connection to it has ended; all leases" in process.stderr.readline()
            assert end_with(process, "go on") == (0, "", "")
        finally:
            process.kill()
            process.wait()


def test_functions_whose_places_are_all_tried_exist() -> None:
    modules = [module for name, module in sys.modules.items() if name.startswith("cubroker.client.")]
    classes = [kind for module in modules for kind in vars(module).values() if inspect.isclass(kind)]
    functions = {f"{kind.__name__}.{name}" for kind in classes for name in vars(kind)}
    assert functions >= set(interrupts.ALWAYS)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize(
    ("share", "what"), daily([*product(KINDS, OWN_DRAFTS), *product([DEFAULT], OTHERS)], 10), indirect=["share"]
)
def test_an_interrupt_at_any_place_leaves_nothing_behind(lender: BrokerProcess, what: str) -> None:
    program = "from tests.unit.client import interrupts; interrupts.main(*sys.argv[1:])"
    done = run(lender, program, what, measured=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 50


@pytest.mark.slow
@BOTH
def test_a_draft_that_an_interrupted_seal_leaves_open_is_discarded_without_another(lender: BrokerProcess) -> None:
    """The interrupt comes before each bytecode of a seal in turn; each day before a tenth of them."""
    program = """
        import itertools
        from contextlib import suppress
        from cubroker.client import draft, pool
        from cubroker.client.memory import lease, mapping
        from cubroker.protocol.errors import Invalid
        from tests import sampling
        from tests.brokers import eventually

        FILES = {module.__file__ for module in (draft, pool, lease, mapping)}

        def interrupt(number):
            def step(frame, event, _):
                global left
                if frame.f_code.co_filename not in FILES:
                    return None
                frame.f_trace_opcodes = True
                if event == "opcode":
                    left -= 1
                    if left == 0:
                        raise KeyboardInterrupt
                return step

            global left
            left = number
            sys._getframe().f_trace_opcodes = True  # else Python 3.12 reports none to the first trace function
            sys.settrace(step)

        written = set()
        with Broker(directory) as broker:
            for tries, number in enumerate(itertools.count(*sampling.stride(10)), 1):
                name, done = f"sealed-{number}", False
                with suppress(KeyboardInterrupt), broker.create(name, Layout.pack([("a", "U8", (4,))])) as draft:
                    try:
                        interrupt(number)
                        draft.seal(digest=sys.argv[2] == "digest")
                        done = True
                    except KeyboardInterrupt:
                        with suppress(Invalid):
                            draft["a"].copy_from_bytes(b"late")
                            written.add(name)
                        raise
                    finally:
                        sys.settrace(None)
                eventually(lambda: all(pool.state != "draft" for pool in broker.pools()), "the end of the draft")
                published = [pool.name for pool in broker.pools() if pool.name == name]
                assert not written.intersection(published), f"place {number}"
                for each in published:
                    broker.retire(each)
                if done:
                    break
        print(tries, len(written))
    """
    for how in ("digest", "plain"):
        done = run(lender, program, how, measured=False)
        assert (done.returncode, done.stderr) == (0, "")
        tries, written = map(int, done.stdout.split())
        assert tries > written > 3
