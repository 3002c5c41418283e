"""What ``cubroker keep`` needs of its machine: room for descriptors, and a place for its socket."""

from __future__ import annotations

import contextlib
import resource
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cubroker.protocol.errors import Invalid, Unavailable
from cubroker.protocol.system_errors import explain
from cubroker.server.store import datagrams
from cubroker.server.store.kept import MOST_BYTES
from cubroker.server.store.words import LONGEST_NAME

DEFAULT_DESCRIPTORS = 4096

MOST_DESCRIPTORS = MOST_BYTES // (LONGEST_NAME + 1)
"""Those whose names fit in the environment of the next run, however long they are: a broker relies on the number."""

SPARE = 1024
"""Files that the child may have open beside what it stored and what it got back."""


def make_room(descriptors: int | None) -> int:
    """Raise the limit of open files, the child's too, to what so many stored descriptors need; return their number.

    The child gets each of them back, and may have opened as many for others: hence twice as many.

    Args:
        descriptors: how many are to be kept; None: 4096, or as many as the limit allows.

    Raises:
        Invalid: the limit cannot be raised so far, or they are more than can be handed over.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = 2**31
    most = (hard - SPARE) // 2
    limit = min(DEFAULT_DESCRIPTORS, most) if descriptors is None else descriptors
    needed = 2 * max(limit, 1) + SPARE
    if not 0 < limit <= most:
        raise Invalid(
            f"to keep {max(limit, 1)} descriptors takes a limit of {needed} open files, and it cannot be raised above "
            f"{hard}: raise that (ulimit -Hn, LimitNOFILE=), or keep fewer with --descriptors"
        )
    if limit > MOST_DESCRIPTORS:
        raise Invalid(
            f"{limit} descriptors cannot be handed to the next run: their names have to fit in {MOST_BYTES} bytes of"
            f" its environment; keep at most {MOST_DESCRIPTORS} with --descriptors"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return limit


@contextlib.contextmanager
def listening() -> Iterator[tuple[str, socket.socket]]:
    """Yield a socket for messages and its path, in a directory that only this user can enter: others could flood it.

    Raises:
        Unavailable: no directory for temporary files can be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            # Not the user's runtime directory: it goes when the user logs out.
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="cubroker-keep-"))
            path = str(Path(place, "notify"))
            channel = stack.enter_context(datagrams.listen(path))
        except OSError as error:
            raise Unavailable(
                f"there is no place for a socket ({explain(error)}): TMPDIR has to name a directory with a "
                "short path that can be written, such as a tmpfs"
            ) from error
        yield path, channel
