"""Finding hosts: the addresses of those that may export, and what each of them has.

Peers are given one by one, or in a file, or by a name that has many addresses, as a headless service of Kubernetes has.
"""

from __future__ import annotations

import os
import socket
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from cubroker.integrations.cluster import messages
from cubroker.integrations.cluster.connection import PeerAddress, PeerConnection, parse
from cubroker.integrations.cluster.identity import FOLDER
from cubroker.integrations.cluster.messages import Offers
from cubroker.protocol.errors import CubrokerError, Invalid, NotFound, Unavailable

VARIABLE = "CUBROKER_PEERS"
FILE = FOLDER / "peers.toml"
"""Where peers are, if neither an argument nor the variable says so: ``peers = ["gpu-1", "gpu-2:7411"]``."""

AT_ONCE = 32
"""Hosts that are asked at once."""


class PeersFile(Struct, frozen=True, forbid_unknown_fields=True):
    """What ``peers.toml`` says."""

    peers: tuple[str, ...]


class PeerAnswer(NamedTuple):
    """What a host said of itself."""

    address: PeerAddress
    #: What it offers; None: it did not say.
    offers: Offers | None
    #: Why not.
    error: CubrokerError | None


def known(given: Sequence[str] = (), environ: Mapping[str, str] = os.environ, file: Path = FILE) -> tuple[str, ...]:
    """Return the peers that are given, else those of ``$CUBROKER_PEERS``, separated by commas, else those of the file.

    Raises:
        NotFound: none of them says any.
        Invalid: the file is no such file.
    """
    if given:
        return tuple(given)
    if named := [part.strip() for part in environ.get(VARIABLE, "").split(",") if part.strip()]:
        return tuple(named)
    try:
        if found := msgspec.convert(tomllib.loads(file.read_text()), PeersFile).peers:
            return found
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise Invalid(f"{file} cannot be read for peers: {error}") from None
    raise NotFound(f"no peers are known: name them by --from or ${VARIABLE}, or in {file}")


def resolve(names: Iterable[str]) -> list[PeerAddress]:
    """Return the addresses of hosts in their order; a name that has several stands for all of them.

    A name that cannot be looked up stays as it is: it may come to be known.

    Raises:
        Invalid: a name that no host can have.
    """
    found: dict[PeerAddress, None] = {}
    for address in map(parse, names):
        try:
            entries = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError:
            found[address] = None
            continue
        # Of a host that has addresses of both families the one is enough, and only one may be listened at.
        ips = dict.fromkeys(str(entry[4][0]) for entry in entries if entry[0] == entries[0][0])
        for ip in ips:
            found[address._replace(ip=ip if len(ips) > 1 else "")] = None
    return list(found)


def ask(addresses: Sequence[PeerAddress], certificates: Path) -> list[PeerAnswer]:
    """Ask hosts what they have for the user that our certificate names, all at once."""

    def one(address: PeerAddress) -> PeerAnswer:
        try:
            with PeerConnection(address, certificates) as connection:
                return PeerAnswer(address, connection.ask(messages.List(), Offers), None)
        except CubrokerError as error:
            return PeerAnswer(address, None, error)

    if not addresses:
        raise Unavailable("there is no host to ask")
    with ThreadPoolExecutor(min(AT_ONCE, len(addresses)), "cubroker-peers") as pool:
        return list(pool.map(one, addresses))
