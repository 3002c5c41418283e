"""A client that keeps memory whose lease it has closed: ``python -m tests.gpu.late_unmapper DIRECTORY NAME``.

It says so in a line. At a line of its input it lets go, and says that; it ends with its input.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from cubroker.driver import load
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import DESCRIPTOR, Close, Done
from tests.unit.server.clients import session


def main(directory: str, name: str) -> None:
    context = load("cuda").context(0)
    with session(Path(directory)) as client, ExitStack() as kept:
        attached = client.attach(name)
        (handle,) = attached.replicas[0].handles
        (nbytes,) = Layout.decode(attached.layout).allocations
        if attached.share == "ipc":
            kept.callback(context.close, context.open(handle))
        else:
            reservation = kept.enter_context(context.reserve(nbytes))
            source = client.descriptors(attached.lease, 1)[0] if handle == DESCRIPTOR else handle
            reservation.map(source, readonly=True)
            client.close_received()
        client.ask(Close(attached.lease), Done)
        print("kept", flush=True)
        sys.stdin.readline()
        kept.close()
        print("let go", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
