"""The simulation of a version's way to many hosts: what can be reckoned by hand comes out so, and no byte is lost."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from math import ceil, log2
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import cluster, plots, spreading
from benchmarks.cluster import PARTS, STRATEGIES, Case, simulate
from benchmarks.network import Connection, Network
from benchmarks.spreading import Cluster, Costs, Fetcher, Policy
from cubroker.integrations.cluster.striping import cut

GB = 10**9
FREE = Costs(latency=0.0, ask=0.0)
"""Only bytes take time."""


def case(strategy: str, hosts: int, **others: object) -> Case:
    """140 GB over links of 50 GB/s: 2.8 s from one host to another. In 100 pieces."""
    plain = {"costs": FREE, "arrivals": 100 * hosts}
    return Case(strategy, hosts, 140 * GB, 50e9, **{**plain, **others})  # type: ignore[arg-type]


# -- the network ---------------------------------------------------------------------------------------


def carry(rates: list[float], ways: list[tuple[int, int]]) -> tuple[Network, list[Connection]]:
    """Have all connections bring something without end."""
    network = Network(rates)
    connections = [Connection(source, reader, lambda piece: None) for source, reader in ways]
    for each in connections:
        network.ask(each, "all", 1e18)
    network.run(1.0)
    return network, connections


def test_a_connection_takes_what_another_one_cannot_use() -> None:
    # The slow reader takes 1 of the source's 10; the other one has the rest.
    _, (slow, fast) = carry([10.0, 1.0, 10.0], [(0, 1), (0, 2)])
    assert (slow.rate, fast.rate) == pytest.approx((1.0, 9.0))


@given(
    st.lists(st.sampled_from([1.0, 2.0, 5.0, 10.0]), min_size=5, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(lambda way: way[0] != way[1]), max_size=12),
)
def test_every_connection_is_as_fast_as_a_full_link_lets_it_be(rates: list[float], ways: list[tuple[int, int]]) -> None:
    _, connections = carry(rates, ways)
    links = {(end, host): (rate, [each for each, way in zip(connections, ways, strict=True) if way[end] == host])
             for end in (0, 1) for host, rate in enumerate(rates)}  # fmt: skip
    for rate, used in links.values():
        assert sum(each.rate for each in used) <= rate * (1 + 1e-6)
    full = [used for rate, used in links.values() if sum(each.rate for each in used) >= rate * (1 - 1e-6)]
    for each in connections:
        assert any(each in used and each.rate >= max(other.rate for other in used) * (1 - 1e-6) for used in full)


def test_requests_wait_for_their_latency_only_where_nothing_else_is_under_way() -> None:
    network, came = Network([1.0, 1.0], latency=0.5), []
    connection = Connection(0, 1, lambda piece: came.append((piece, network.now)))
    for piece in "ab":
        network.ask(connection, piece, 2.0)
    network.run()
    assert came == [("a", 2.5), ("b", 4.5)]


def test_a_host_that_dies_sends_nothing_more_and_nothing_notices() -> None:
    network, came = Network([1.0, 1.0, 1.0]), []
    for reader in (1, 2):
        network.ask(Connection(0, reader, lambda piece: came.append((piece, network.now))), reader, 2.0)
    network.at(1.0, network.kill, 1)
    network.run()
    assert came == [(2, pytest.approx(2.5))]  # half of the link for a second, then all of it
    assert sum(network.sent) == sum(network.received) == pytest.approx(2.5)


# -- ways that can be reckoned by hand -----------------------------------------------------------------


@pytest.mark.parametrize("hosts", [1, 8, 50])
def test_one_source_takes_as_many_times_as_long_as_there_are_hosts(hosts: int) -> None:
    outcome = simulate(case("one source", hosts))
    assert outcome.finished == pytest.approx([hosts * 2.8] * hosts)
    assert outcome.origin == outcome.sent == pytest.approx(hosts * 140 * GB)


@pytest.mark.parametrize("hosts", [1, 8, 50])
def test_a_chain_of_whole_versions_takes_a_round_for_each_host(hosts: int) -> None:
    outcome = simulate(case("chain", hosts))
    assert outcome.finished == pytest.approx([2.8 * (number + 1) for number in range(hosts)])
    assert outcome.origin == outcome.busiest or hosts == 1


@pytest.mark.parametrize("hosts", [1, 8, 50])
def test_a_pipelined_chain_takes_a_piece_more_for_each_host(hosts: int) -> None:
    outcome = simulate(case("chain, pipelined", hosts))
    assert outcome.finished == pytest.approx([2.8 * (1 + number / 100) for number in range(hosts)])


@pytest.mark.parametrize("hosts", [1, 2, 7, 8, 50])
def test_a_tree_of_whole_versions_doubles_in_every_round(hosts: int) -> None:
    outcome = simulate(case("tree", hosts))
    assert outcome.at(1) == pytest.approx(2.8 * ceil(log2(hosts + 1)))
    rounds = Counter(round(when / 2.8) for when in outcome.finished)
    assert all(rounds[number] == 2 ** (number - 1) for number in range(1, max(rounds)))


def test_a_pipelined_tree_takes_twice_as_long_as_one_host_and_little_more() -> None:
    outcome = simulate(case("tree, pipelined", 30))
    assert outcome.at(1) == pytest.approx(2 * 2.8 * (1 + 3 / 100))  # the fourth row: three pieces late


def test_the_descendants_of_a_host_that_dies_in_a_chain_never_have_all() -> None:
    outcome = simulate(case("chain, pipelined", 20, dead=0.05, within=2.8))
    assert outcome.unfinished + len(outcome.finished) == 19
    assert outcome.unfinished > 0


def test_what_is_behind_a_slow_host_is_as_slow() -> None:
    outcome = simulate(case("chain, pipelined", 20, slow=0.05))
    assert outcome.at(1) == pytest.approx(28, rel=0.1)


# -- the product's choice ------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_host_has_every_piece_and_every_byte_that_was_sent_came(strategy: str) -> None:
    this = case(strategy, 12)
    outcome = simulate(this)
    assert len(outcome.finished) == 12
    assert outcome.unfinished == 0
    assert outcome.sent == pytest.approx(12 * 140 * GB, rel=0.05)  # a few pieces came twice
    assert outcome.sent >= 12 * 140 * GB * (1 - 1e-9)
    assert outcome.at(1) >= 2.8 * (1 - 1e-9)


@pytest.mark.parametrize("policy", [Policy(), PARTS], ids=["whole", "parts"])
def test_every_fetcher_has_each_piece_once(policy: Policy) -> None:
    pieces = list(cut([10 * GB], [0], GB // 4))
    network = Network([GB] * 21, pace=0.1)
    fetchers = spreading.striped(found := Cluster(network, pieces, 20, Costs()), policy, seed=3)
    network.run(600)
    assert sorted(found.finished) == [*range(1, 21)]
    assert {fetcher.have for fetcher in fetchers} == {(1 << len(pieces)) - 1}
    for fetcher in fetchers:
        assert network.received[fetcher.host] >= 10 * GB * (1 - 1e-9)
    duplicates = sum(fetcher.duplicates for fetcher in fetchers)
    begun = sum(network.received) - 20 * 10 * GB  # at the end of a fetch a second copy may be half there
    assert duplicates <= begun + 1
    assert found.waiting == 0
    assert [each for each in room_of(fetchers).readers if each] == []


def room_of(fetchers: list[Fetcher]) -> spreading.Exporters:
    """What the hosts serve."""
    return fetchers[0].room


@pytest.mark.parametrize("strategy", ["whole versions", "parts"])
def test_all_live_hosts_have_all_though_others_are_slow_or_die(strategy: str) -> None:
    outcome = simulate(case(strategy, 40, slow=0.1, dead=0.1, within=3.0))
    assert outcome.unfinished == 0
    assert len(outcome.finished) == 36


def test_parts_are_there_soon_after_the_bytes_of_one_host_could_be() -> None:
    whole, parts = (simulate(case(strategy, 40)).at(1) for strategy in ("whole versions", "parts"))
    assert parts < 2 * 2.8 < whole


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_seed_gives_the_same_figures(strategy: str) -> None:
    this = case(strategy, 20, slow=0.05, dead=0.05, within=3.0)
    assert simulate(this) == simulate(this)


# -- the program ---------------------------------------------------------------------------------------


def test_the_program_writes_tables_figures_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--hosts", "2,5", "--size", "1GB", "--link", "8Gb/s", "--processes", "1", "--output", str(tmp_path)]
    cluster.main(options)
    text = (tmp_path / "cluster-simulation.md").read_text()
    assert capsys.readouterr().out == f"{text}\n"
    results = json.loads((tmp_path / "cluster-simulation.json").read_text())["results"]
    lines = {line["what"]: line["value"] for section in results.values() for line in section}
    assert lines["one source, 5 hosts: last"] == pytest.approx(5.0, rel=0.01)
    assert lines["chain, 5 hosts: sent by the origin ÷ size"] == 1
    assert len(lines) == sum(map(len, results.values())), "two figures have the same name"
    for name in ("hosts", "over-time"):
        picture = ElementTree.parse(tmp_path / f"cluster-simulation-{name}.svg")
        shown = {each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")}
        assert shown >= {"one source", "whole versions", "parts"}


def test_mistakes_in_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for options, word in ((["--hosts", "8,"], "8,64"), (["--link", "50GB/s"], "400Gb/s"), (["--size", "x"], "8GB")):
        with pytest.raises(SystemExit):
            cluster.parse(options)
        assert word in capsys.readouterr().err
    assert cluster.parse(["--link", "400 Gb/s"]).link == 50e9


def test_the_names_of_lines_do_not_cover_one_another() -> None:
    places = plots._apart({"a": 100.0, "b": 101.0, "c": 100.0, "d": 1000.0})
    found = sorted(places.values())
    assert all(after - before >= plots.SPACING for before, after in pairwise(found))
    assert found[-1] <= plots.HEIGHT
