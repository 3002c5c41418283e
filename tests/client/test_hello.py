from __future__ import annotations

from tests.brokers import BrokerProcess
from tests.client.scripts import run


def test_signals_neither_cut_a_wait_for_the_broker_short_nor_make_it_longer(lender: BrokerProcess) -> None:
    program = """
    import socket, tempfile
    from cubroker.protocol import CubrokerError
    from cubroker.protocol.directory import SESSION_SOCKET

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
    assert done.stdout == 2 * "the broker on PLACE did not answer within 1 s; is it stopped or busy?\n"
