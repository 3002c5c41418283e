from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.client.transport import handshake
from cubroker.protocol.errors import Invalid
from cubroker.protocol.paths import SESSION_SOCKET
from tests.brokers import PATIENCE, BrokerProcess
from tests.unit.client.scripts import run


@pytest.mark.slow
def test_signals_neither_cut_a_wait_for_the_broker_short_nor_make_it_longer(lender: BrokerProcess) -> None:
    program = """
    import socket, tempfile
    from cubroker.protocol import CubrokerError
    from cubroker.protocol.paths import SESSION_SOCKET

    signal.signal(signal.SIGALRM, lambda *_: None)
    with tempfile.TemporaryDirectory() as place, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(f"{place}/{SESSION_SOCKET}")
        silent.listen(0)
        for _ in range(2):  # the first fills the backlog, and waits for an answer; the second waits for its turn
            signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
            try:
                Broker(place, timeout=1)
            except CubrokerError as error:
                print(str(error).replace(place, "PLACE"))
            signal.setitimer(signal.ITIMER_REAL, 0)
    """
    done = run(lender, program)
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert len(said) == 2
    assert all(line.startswith("the broker on PLACE did not answer within 1 s: its socket listens, ") for line in said)


@pytest.fixture
def unanswered(tmp_path: Path) -> Iterator[Path]:
    """A directory whose socket listens, as systemd's does, and where no broker answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / SESSION_SOCKET))
        listener.listen()
        yield tmp_path


@pytest.mark.parametrize("manager", [True, False])
def test_who_is_not_answered_hears_where_the_reason_stands(
    unanswered: Path, monkeypatch: pytest.MonkeyPatch, manager: bool
) -> None:
    monkeypatch.setattr(handshake, "MANAGER", unanswered if manager else unanswered / "none")

    def told() -> str:
        with pytest.raises(
            handshake.Silent, match=r"within 0\.05 s: its socket listens, but it is still starting"
        ) as caught:
            Broker(unanswered, connect_timeout=0.05)
        assert caught.value.message.endswith(", and check its settings with `cubroker config check FILE`")
        return caught.value.message

    assert "see its log," in told()
    with monkeypatch.context() as patch:
        patch.setattr(handshake, "SYSTEM", unanswered)
        assert ("see `systemctl status cubroker`," if manager else "see its log,") in told()
    monkeypatch.setattr(handshake, "SYSTEM", Path("/run") / unanswered.name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(unanswered.parent))
    assert ("see `systemctl --user status cubroker`," if manager else "see its log,") in told()


def test_the_limit_holds_for_all_attempts_together(tmp_path: Path) -> None:
    """A broker that is started again and again takes each connection along; the limit does not begin anew."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / SESSION_SOCKET))
        listener.listen()
        held = threading.Event()

        def serve() -> None:
            listener.accept()[0].close()
            with listener.accept()[0]:
                held.wait(PATIENCE)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(handshake.Silent, match=r"within 0\.5 s"):
                handshake.greet(tmp_path, 0.5)
        finally:
            held.set()
            thread.join(PATIENCE)


@pytest.mark.parametrize("limits", [{"timeout": 0}, {"connect_timeout": -1}, {"connect_timeout": math.nan}])
def test_a_limit_that_is_no_time_is_invalid(tmp_path: Path, limits: dict[str, float]) -> None:
    with pytest.raises(Invalid, match="it can be more than 0"):
        Broker(tmp_path, **limits)  # type: ignore[arg-type]
