"""What a keeper of the tests keeps: on each start it calls at the test's socket, and does as it is told.

One that is to stand by imports the modules that are named behind the socket, and calls when its turn has come.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
from importlib import import_module
from typing import Any

from cubroker.protocol.errors import CubrokerError
from cubroker.server.store import sd_notify
from cubroker.server.store.sd_notify import Manager, Standby, inherit, is_offered

LINE = 1 << 18


def main() -> None:
    variables = {name: value[:100] for name, value in os.environ.items() if name.startswith(("LISTEN_", "WATCHDOG_"))}
    inherited = inherit(os.environ)
    if waiting := Standby.of(os.environ):
        for name in sys.argv[2:]:
            import_module(name)
        inherited = waiting.wait()
    manager = Manager.from_environment(os.environ)
    assert manager
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as test:
        test.connect(sys.argv[1])
        hello = {
            "pid": os.getpid(),
            "group": os.getpgid(0),
            "variables": variables,
            "offered": is_offered(os.environ),
            "left": [name for name in os.environ if name.startswith("LISTEN_")],
            "inherited": inherited,
            "inheritable": [n for numbers in inherited.values() for n in numbers if os.get_inheritable(n)],
            "limit": manager.limit,
            "watchdog": manager.watchdog_interval,
            "ignored": [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN],
            "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        }
        test.send(json.dumps(hello).encode())
        while True:
            data, descriptors, _, _ = socket.recv_fds(test, LINE, 253)
            if not data:
                return
            order = json.loads(data)
            reply, given = obey(manager, inherited, order, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            socket.send_fds(test, [json.dumps(reply).encode()], given)


def obey(
    manager: Manager, inherited: dict[str, list[int]], order: dict[str, Any], descriptors: list[int]
) -> tuple[object, list[int]]:
    """Do one thing; return the reply, and the descriptors that go with it."""
    match order:
        case {"store": name, "poll": poll}:
            manager.say(sd_notify.storing(name, poll=poll), descriptors)
        case {"give": name}:
            return None, inherited.get(name, [])
        case {"raw": text}:
            send_raw(base64.b64decode(text), descriptors)
        case {"leave": arguments}:
            process = subprocess.Popen(arguments, stdout=subprocess.PIPE, start_new_session=order["orphan"])
            assert process.stdout
            return process.stdout.readline().decode(), []
        case {"expect": number}:
            signal.signal(number, lambda number, _: os._exit(100 + number))
        case {"ignore": number}:
            signal.signal(number, signal.SIG_IGN)
        case {"hang": _}:
            manager.say(sd_notify.ready(""))
            os.kill(os.getpid(), signal.SIGSTOP)
        case {"exit": status}:
            os._exit(status)
        case {"say": kind, "with": arguments}:
            try:
                manager.say(getattr(sd_notify, kind)(*arguments))
            except CubrokerError as error:
                return error.message, []
    return None, []


def send_raw(data: bytes, descriptors: list[int]) -> None:
    address = os.environ["NOTIFY_SOCKET"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.connect(address)
        socket.send_fds(channel, [data], descriptors)


if __name__ == "__main__":
    main()
