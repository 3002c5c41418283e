"""``python -m benchmarks.cluster``: simulate how long a version takes to reach many hosts, in several ways.

The network is simulated, and in the last two ways the product's own code chooses (:mod:`benchmarks.spreading`).
``docs/cluster-simulation.md`` says what is modelled and what is not. The same options give the same figures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path
from random import Random
from time import perf_counter

from benchmarks import plots, spreading
from benchmarks.network import Network
from benchmarks.options import byte_count
from benchmarks.report import Figure, number
from benchmarks.spreading import Cluster, Costs, Policy
from cubroker.integrations.cluster.striping import PIECE, cut

NAME = "cluster-simulation"

ARRIVALS = 560_000
"""The most pieces that arrive at all hosts together: for many hosts the pieces are larger than the product's, so that a
run takes a minute and not an hour."""

HORIZON = 600.0
"""Seconds after which a host without the whole version counts as unfinished, in the ways in which hosts choose."""

SLOWER = 10
"""By what factor the link of a slow host is slower."""

PARTS = Policy(parts=True)
"""The product's policy: as many sources as a host has readers."""

WHOLE = Policy(width=4)
"""Hosts serve only whole versions. With more sources, a host would take the few slots of readers from others."""

STRATEGIES: dict[str, Callable[[Cluster, int], object]] = {
    "one source": lambda cluster, seed: spreading.all_at_once(cluster),
    "chain": lambda cluster, seed: spreading.along(cluster, spreading.chain(cluster.hosts), pipelined=False),
    "chain, pipelined": lambda cluster, seed: spreading.along(cluster, spreading.chain(cluster.hosts), pipelined=True),
    "tree": lambda cluster, seed: spreading.along(cluster, spreading.doubling(cluster.hosts), pipelined=False),
    "tree, pipelined": lambda cluster, seed: spreading.along(cluster, spreading.tree(cluster.hosts), pipelined=True),
    "whole versions": lambda cluster, seed: spreading.striped(cluster, WHOLE, seed),
    "parts": lambda cluster, seed: spreading.striped(cluster, PARTS, seed),
}
"""The function that begins each way."""


@dataclass(frozen=True)
class Case:
    """What is simulated."""

    strategy: str
    hosts: int
    nbytes: int
    #: Bytes a second of a link.
    link: float
    costs: Costs = field(default_factory=Costs)
    seed: int = 1
    #: The fractions of the hosts that are slow, and that die; at least one host if the fraction is not 0.
    slow: float = 0.0
    dead: float = 0.0
    #: The seconds within which hosts die.
    within: float = 0.0
    #: The most pieces that arrive at all hosts together.
    arrivals: int = ARRIVALS
    #: Used in place of the strategy's.
    policy: Policy | None = None

    @property
    def piece(self) -> int:
        """Bytes of a piece."""
        return max(PIECE, ceil(self.nbytes / max(1, self.arrivals // self.hosts)))


@dataclass(frozen=True)
class Outcome:
    """The result of a simulation."""

    case: Case
    pieces: int
    #: When hosts had the whole version, in seconds, sorted; and when the last host without a slow link had it.
    finished: tuple[float, ...]
    last_sound: float
    #: The number of hosts that live and never had the whole version.
    unfinished: int
    #: Bytes that the origin, the busiest other host, and all hosts together sent.
    origin: float
    busiest: float
    sent: float

    def at(self, part: float) -> float:
        """Return when this fraction of the hosts that finished had the whole version."""
        return self.finished[ceil(part * len(self.finished)) - 1] if self.finished else float("inf")


def simulate(case: Case) -> Outcome:
    chance = Random(case.seed)
    pieces = list(cut([case.nbytes], [0], case.piece))
    drawn = chance.sample(range(1, case.hosts + 1), case.hosts)
    count = [max(1, round(part * case.hosts)) if part else 0 for part in (case.slow, case.dead)]
    slow, dying = set(drawn[: count[0]]), drawn[count[0] : sum(count)]
    rates = [case.link / (SLOWER if host in slow else 1) for host in range(case.hosts + 1)]
    network = Network(rates, case.costs.latency, 2 * case.piece / case.link)
    deaths = {host: chance.random() * case.within for host in dying}
    cluster = Cluster(network, pieces, case.hosts, case.costs, deaths=deaths)
    if case.policy:
        spreading.striped(cluster, case.policy, case.seed)
    else:
        STRATEGIES[case.strategy](cluster, case.seed)
    network.run(HORIZON if case.policy or case.strategy in ("whole versions", "parts") else float("inf"))
    return Outcome(
        case=case,
        pieces=len(pieces),
        finished=tuple(sorted(cluster.finished.values())),
        last_sound=max((when for host, when in cluster.finished.items() if host not in slow), default=float("inf")),
        unfinished=cluster.waiting,
        origin=network.sent[0],
        busiest=max(network.sent[1:]),
        sent=sum(network.sent),
    )


# -- what is compared ----------------------------------------------------------------------------------


def variants(case: Case) -> dict[str, Case]:
    """Return other choices and other costs, with pieces as large as those of a thousand hosts."""
    small = replace(case, arrivals=ARRIVALS * case.hosts // 1000)

    def other(policy: Policy, costs: Costs | None = None) -> Case:
        return replace(small, policy=policy, costs=costs or case.costs, strategy="parts" if policy.parts else "whole")

    whole, opening = WHOLE, replace(case.costs, open=1.0)
    return {
        "whole versions": other(whole),
        "whole versions, 1 reader of a host": other(replace(whole, readers=1)),
        "whole versions, 2 readers of a host": other(replace(whole, readers=2)),
        "whole versions, 8 sources": other(replace(whole, width=8)),
        "whole versions, all ask in one order": other(replace(whole, shuffled=False)),
        "whole versions, 1 s to open": other(whole, opening),
        "parts": other(PARTS),
        "parts, 4 sources, 8 readers": other(replace(PARTS, width=4)),
        "parts, 4 sources, 4 readers": other(replace(PARTS, width=4, readers=4)),
        "parts, readers without shares": other(replace(PARTS, shares=False)),
        "parts, all ask in one order": other(replace(PARTS, shuffled=False)),
        "parts, news every 0.2 s": other(PARTS, replace(case.costs, news=0.2)),
        "parts, requests take 0.005 s": other(PARTS, replace(case.costs, latency=5e-3)),
        "parts, asked again after 0.1 s at first": other(replace(PARTS, again=0.1)),
        "parts, offered before the first source has opened": other(replace(PARTS, early=True)),
        "parts, 1 s to open": other(PARTS, opening),
        "parts, 1 s to open, offered before that": other(replace(PARTS, early=True), opening),
        "chain, pipelined, 1 s to open": replace(small, strategy="chain, pipelined", costs=opening),
    }


def run(options: argparse.Namespace, cases: Mapping[str, Case], say: str) -> dict[str, Outcome]:
    """Simulate cases, side by side, those that take longest first."""
    order = sorted(cases, key=lambda key: -cases[key].hosts * (1 + ("parts" in key or "whole" in key)))
    with ProcessPoolExecutor(options.processes) as pool:
        began = perf_counter()
        found = dict(zip(order, pool.map(simulate, [cases[key] for key in order]), strict=True))
    print(f"{say}: {perf_counter() - began:.0f} s", file=sys.stderr)
    return {key: found[key] for key in cases}


def figures(key: str, outcome: Outcome) -> list[Figure]:
    case = outcome.case
    percentiles = tuple(round(outcome.at(part / 100), 4) for part in range(1, 101)) if outcome.finished else ()
    note = f"pieces of {case.piece / 1e6:.0f} MB"
    return [
        Figure(f"{key}: median", round(outcome.at(0.5), 4), "s", note, percentiles),
        Figure(f"{key}: 99 %", round(outcome.at(0.99), 4), "s", note),
        Figure(f"{key}: last", round(outcome.at(1), 4), "s", note),
        Figure(f"{key}: last that is not slow", round(outcome.last_sound, 4), "s", note),
        Figure(f"{key}: sent by the origin ÷ size", round(outcome.origin / case.nbytes, 4), "", note),
        Figure(f"{key}: most by another ÷ size", round(outcome.busiest / case.nbytes, 4), "", note),
        Figure(f"{key}: unfinished", outcome.unfinished, "", note),
    ]


HEAD = (
    "| | median host | 99 % | last | last not slow | sent by the origin | most by another | unfinished |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def table(outcomes: Mapping[str, Outcome]) -> str:
    rows = [HEAD]
    for key, each in outcomes.items():
        times = [each.at(0.5), each.at(0.99), each.at(1), each.last_sound]
        cells = [
            *(f"{number(when)} s" for when in times),
            *(f"{number(b / 1e9)} GB" for b in (each.origin, each.busiest)),
        ]
        rows.append(f"| {key} | {' | '.join(cells)} | {each.unfinished} |")
    return "\n".join(rows)


def pictures(
    options: argparse.Namespace, healthy: Mapping[str, Outcome], faults: Mapping[str, Outcome]
) -> dict[str, str]:
    """Return the plots, by the ends of their names."""
    size, most = f"{options.size / 1e9:g} GB", max(options.hosts)
    ends = {
        strategy: [(hosts, healthy[_key(strategy, hosts)].at(1)) for hosts in sorted(options.hosts)]
        for strategy in STRATEGIES
    }
    over = {strategy: _growth(faults[_key(strategy, most)]) for strategy in STRATEGIES}
    label = f"{most:,} hosts, {options.slow:.0%} slow and {options.dead:.0%} dying: those that have all {size}"
    return {
        "hosts": plots.lines(f"Until the last host has {size}", "hosts", "seconds", ends, ticks=options.hosts),
        "over-time": plots.lines(label, "seconds", "hosts, %", over, span=(0, 100), dots=False),
    }


def _growth(outcome: Outcome) -> list[tuple[float, float]]:
    """Return points: a second, and how many of all hosts, in %, have the whole version by then."""
    share = 100 * len(outcome.finished) / outcome.case.hosts
    return [(outcome.at(n / 100), n / 100 * share) for n in range(1, 101)] if outcome.finished else []


def _key(strategy: str, hosts: int) -> str:
    return f"{strategy}, {hosts:,} hosts"


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate all cases, print the tables, and write them."""
    options = parse(arguments)
    costs = Costs(latency=options.latency, open=options.open)
    plain = Case("", 0, options.size, options.link, costs, options.seed)
    cases = {_key(s, hosts): replace(plain, strategy=s, hosts=hosts) for hosts in options.hosts for s in STRATEGIES}
    healthy = run(options, cases, "sound hosts")
    failing = {
        key: replace(case, slow=options.slow, dead=options.dead, within=healthy[key].at(1))
        for key, case in cases.items()
    }
    faults = run(options, failing, "slow and dead hosts")
    middle = sorted(options.hosts)[len(options.hosts) // 2]
    others = run(options, variants(replace(plain, hosts=middle)), "variants")
    sections = {
        "All hosts are sound": healthy,
        f"{options.slow:.0%} of the hosts are slow, {options.dead:.0%} die": faults,
        f"Variants, {middle:,} hosts, pieces of {next(iter(others.values())).case.piece / 1e6:.0f} MB": others,
    }
    about = (
        f"{options.size / 1e9:g} GB to each of {', '.join(f'{n:,}' for n in options.hosts)} hosts, links of "
        f"{options.link * 8 / 1e9:g} Gb/s; seed {options.seed}, {costs}"
    )
    parts = [
        f"# Simulation: a version to many hosts\n\n{about}",
        *(f"## {k}\n\n{table(v)}" for k, v in sections.items()),
    ]
    text = "\n\n".join(parts) + "\n"
    print(text)
    if options.output:
        write(options, about, text, {"sound": healthy, "faults": faults, "variants": others})
        for name, picture in pictures(options, healthy, faults).items():
            (options.output / f"{NAME}-{name}.svg").write_text(picture)


def write(options: argparse.Namespace, about: str, text: str, results: Mapping[str, Mapping[str, Outcome]]) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    found = {
        section: [
            asdict(figure)
            for key, each in outcomes.items()
            for figure in figures(key if section == "sound" else f"{section}, {key}", each)
        ]
        for section, outcomes in results.items()
    }
    document = {"label": "simulation", "about": about, "nbytes": options.size, "results": found}
    (options.output / f"{NAME}.json").write_text(json.dumps(document, indent=1) + "\n")
    (options.output / f"{NAME}.md").write_text(text)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; a usage error ends the program with status 2."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("--hosts", type=_counts, default=[8, 64, 1000], help="how many (default: 8,64,1000)")
    parser.add_argument("--size", type=byte_count, default=140 * 10**9, help="of the version (default: 140GB)")
    parser.add_argument("--link", type=_rate, default=50e9, help="each way (default: 400Gb/s)")
    parser.add_argument("--slow", type=float, default=0.01, help="part with a tenth of the link (default: 0.01)")
    parser.add_argument("--dead", type=float, default=0.01, help="part that dies on the way (default: 0.01)")
    parser.add_argument("--latency", type=float, default=Costs.latency, help="seconds of a request")
    parser.add_argument("--open", type=float, default=Costs.open, help="seconds until a source serves (default: 0)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"write {NAME}.json, .md and .svg there as well")
    return parser.parse_args(arguments)


def _counts(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} names no numbers of hosts; write 8,64")
    return [int(each) for each in text.split(",")]


def _rate(text: str) -> float:
    """Return bytes a second."""
    if not (found := re.fullmatch(r"(\d+(?:\.\d+)?) *Gb/s", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no rate of a link; write 400Gb/s")
    return float(found[1]) * 1e9 / 8


if __name__ == "__main__":
    main()
