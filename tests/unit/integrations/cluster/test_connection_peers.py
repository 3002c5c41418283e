"""Which hosts are known, under which addresses, and what they say of themselves."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cubroker.integrations.cluster.connection import PeerAddress, PeerAnswer, ask_peers, known_peers, resolve
from cubroker.integrations.cluster.messages import PORT, Offer, Offers, PeerRefusal, PeerWelcome
from cubroker.protocol.errors import Denied, Invalid, NotFound, Unavailable
from tests.unit.integrations.cluster.hosts import HOST, Certificates
from tests.unit.integrations.cluster.liar import lying


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "peers.toml"
    path.write_text('peers = ["of-file", "other:80"]')
    return path


def test_what_is_given_comes_before_the_variable_and_that_before_the_file(file: Path) -> None:
    variable = {"CUBROKER_PEERS": " of-variable ,, b:80,"}
    assert known_peers(["given"], variable, file) == ("given",)
    assert known_peers([], variable, file) == ("of-variable", "b:80")
    assert known_peers([], {}, file) == ("of-file", "other:80")
    assert known_peers([], {"CUBROKER_PEERS": ""}, file) == ("of-file", "other:80")
    assert known_peers([], {"CUBROKER_PEERS": " , "}, file) == ("of-file", "other:80")


def test_without_any_it_is_said_where_they_are_named(file: Path, tmp_path: Path) -> None:
    for absent in (tmp_path / "none.toml", tmp_path / "none" / "peers.toml"):
        with pytest.raises(
            NotFound, match=rf"no peers are known: name them by --from or \$CUBROKER_PEERS, or in {absent}"
        ):
            known_peers([], {}, absent)
    file.write_text("peers = []")
    with pytest.raises(NotFound, match="no peers are known"):
        known_peers([], {}, file)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"peers = [", "Invalid value|Unclosed array"),
        (b"\xff", "can't decode byte"),
        (b"", "missing required field `peers`"),
        (b"peers = 'a'", "Expected `array`, got `str`"),
        (b"peers = [1]", "Expected `str`, got `int`"),
        (b"peers = ['a']\nport = 1", "unknown field `port`"),
    ],
    ids=["no TOML", "no text", "empty", "no list", "no name", "more"],
)
def test_a_file_that_is_none_is_named(file: Path, content: bytes, why: str) -> None:
    file.write_bytes(content)
    with pytest.raises(Invalid, match=f"{file} cannot be read for peers: .*({why})"):
        known_peers([], {}, file)


def test_a_folder_in_place_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"cannot be read for peers: .*directory"):
        known_peers([], {}, tmp_path)


# -- addresses -------------------------------------------------------------------------------------


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The addresses of names, as a resolver has them; each comes twice, as for several protocols."""
    known: dict[str, list[str]] = {}

    def getaddrinfo(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        families = {ip: socket.AF_INET6 if ":" in ip else socket.AF_INET for ip in known[host]}
        return [(families[ip], 1, 6, "", (ip, port)) for ip in known[host] for _ in range(2)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known


def test_a_name_with_several_addresses_stands_for_all_of_them(names: dict[str, list[str]]) -> None:
    names |= {"many": ["10.0.0.2", "10.0.0.1", "::1"], "one": ["10.0.0.9"]}
    assert resolve(["many:80", "one"]) == [
        PeerAddress("many", 80, ("10.0.0.2",)),
        PeerAddress("many", 80, ("10.0.0.1",)),
        PeerAddress("many", 80, ("::1",)),
        PeerAddress("one", PORT),
    ]


def test_a_host_with_an_address_of_each_family_is_one_host(names: dict[str, list[str]]) -> None:
    names |= {"host": ["::1", "10.0.0.1"]}
    assert resolve(["host"]) == [PeerAddress("host", PORT)]


def test_an_exporter_may_listen_at_addresses_of_the_second_family_alone(names: dict[str, list[str]]) -> None:
    names |= {"many": ["::1", "::2", "10.0.0.1", "10.0.0.2"]}
    assert [address.ips for address in resolve(["many"])] == [("::1",), ("::2",), ("10.0.0.1",), ("10.0.0.2",)]


def test_a_name_that_nobody_knows_stays_and_each_address_comes_once(names: dict[str, list[str]]) -> None:
    assert resolve(["unknown", "unknown:7411", "unknown:80"]) == [
        PeerAddress("unknown", PORT),
        PeerAddress("unknown", 80),
    ]


def test_a_name_that_no_host_can_have_is_invalid() -> None:
    for name in ("gpu 1", "a..b", "a" * 64):
        with pytest.raises(Invalid, match="names no exporter"):
            resolve(["gpu-1", name])


def test_the_addresses_of_this_host() -> None:
    assert resolve(["127.0.0.1", "[::1]:80"]) == [PeerAddress("127.0.0.1", PORT), PeerAddress("::1", 80)]
    assert resolve([]) == []


# -- answers ---------------------------------------------------------------------------------------


def test_hosts_are_asked_at_once_and_answer_in_their_order(certificates: Certificates) -> None:
    offers = Offers((Offer("m", 3, 1024, 2, current=True),), 1, 8)
    with (
        lying(certificates.host, {"List": offers}) as one,
        lying(certificates.host, {"PeerHello": PeerRefusal("denied", "not you")}) as two,
    ):
        with socket.create_server((HOST, 0)) as server:
            nobody = PeerAddress(*server.getsockname())
        first, second, third = ask_peers([one.address, two.address, nobody], certificates.of("root"))
    assert first == PeerAnswer(one.address, offers, None)
    assert (second.address, second.offers, type(second.error)) == (two.address, None, Denied)
    assert (third.address, third.offers, type(third.error)) == (nobody, None, Unavailable)


@pytest.mark.parametrize("same", ["host", "pools", "id", "certificate"])
def test_a_host_that_answers_at_two_addresses_answers_once(
    certificates: Certificates, localhost: list[str], same: str
) -> None:
    """It is the same one by its certificate and the id of its broker; two exporters of it may offer other pools."""
    localhost += [HOST, "127.0.0.2", "::1"]
    other = certificates.of("root", HOST, "localhost", called="twin") if same == "id" else certificates.host
    answers = {"PeerHello": PeerWelcome(2, "root", bytes(15) + b"1")}
    twins = {"PeerHello": PeerWelcome(2, "root", bytes(16))} if same == "certificate" else answers
    offers = Offers((Offer("m", 3, 1024, 2, current=True),), 1, 8)
    less = Offers((), 0, 8) if same == "pools" else offers
    with (
        lying(certificates.host, answers | {"List": offers}) as one,
        lying(other, twins | {"List": less}, at=("127.0.0.2", one.address.port)),
        lying(certificates.host, {"PeerHello": PeerWelcome(2, "root", b"3" * 16)}, at=("::1", one.address.port)),
    ):
        found = ask_peers(resolve([f"localhost:{one.address.port}"]), certificates.host)
    ips = [(HOST, "127.0.0.2"), ("::1",)] if same == "host" else [(ip,) for ip in localhost]
    assert [(answer.address.ips, answer.error) for answer in found] == [(each, None) for each in ips]


def test_exporters_at_two_ports_answer_each_for_itself(certificates: Certificates) -> None:
    answers = {"PeerHello": PeerWelcome(2, "root", b"1" * 16)}
    with lying(certificates.host, answers) as one, lying(certificates.host, answers) as two:
        names = [f"{HOST}:{each.address.port}" for each in (one, two)]
        assert [str(answer.address) for answer in ask_peers(resolve(names), certificates.host)] == names


def test_there_is_a_host_to_ask(certificates: Certificates) -> None:
    with pytest.raises(Unavailable, match="there is no host to ask"):
        ask_peers([], certificates.host)
