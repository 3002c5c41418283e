"""Fuzz: ``python -m tests.fuzz --inputs 10000000 --jobs 2 [target…]``, the inputs being those of all targets together.

With atheris (the extra ``fuzz``) inputs are led by coverage, else by a seed alone. What is found is kept
in tests/fuzz/crashes, where the tests try it again from then on.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import logging
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.checkpoint_targets import scratch
from tests.fuzz.mutate import MAX_INPUT, Finding, hunt
from tests.fuzz.protocol_targets import TARGETS
from tests.fuzz.target import CRASHES

CHUNK = 50_000
"""Inputs of one piece of work."""

Job = tuple[str, int, int]
"""A target, a number of inputs, a seed."""


def plain(job: Job) -> tuple[Job, Finding | None]:
    """Do a piece of work with the engine that needs nothing."""
    name, inputs, seed = job
    return job, hunt(TARGETS[name], inputs, seed)


def guided(corpora: Path, job: Job) -> tuple[Job, Finding | None]:
    """Do a piece of work with atheris, in a process of its own, going on from what earlier ones had reached."""
    name, inputs, seed = job
    corpus = corpora / name
    artifacts = corpora / f"{name}-{seed}-"
    command = [sys.executable, "-m", "tests.fuzz.guided", name, f"-runs={inputs}", f"-seed={seed}"]
    command += [
        f"-max_len={MAX_INPUT}",
        f"-artifact_prefix={artifacts}",
        "-rss_limit_mb=2048",
        "-timeout=60",
        str(corpus),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return job, None
    found = list(corpora.glob(f"{artifacts.name}*"))
    return job, Finding(name, found[0].read_bytes() if found else b"", (done.stdout + done.stderr)[-2000:])


def prepare(corpora: Path, names: list[str]) -> None:
    """Write down what atheris begins with."""
    for name in names:
        (corpora / name).mkdir()
        target = TARGETS[name]
        for number, data in enumerate((*target.seeds, *target.tokens)):
            (corpora / name / f"seed-{number}").write_bytes(data)


def work(engine: Callable[[Job], tuple[Job, Finding | None]], jobs: list[Job], processes: int) -> int:
    """Do all pieces; return 0 if nothing is found, else 1 with the first finding kept and shown."""
    began, done = time.monotonic(), 0
    with multiprocessing.Pool(processes) as pool:
        for (name, inputs, seed), finding in pool.imap_unordered(engine, jobs):
            if finding is not None:
                kept = CRASHES / f"{name}-{hashlib.sha256(finding.data).hexdigest()[:12]}.bin"
                kept.write_bytes(finding.data)
                print(f"{name}, seed {seed}: kept as {kept}\n{finding.error}")
                return 1
            done += inputs
            print(f"{done:>10} inputs, {time.monotonic() - began:.0f} s, the last of {name}", file=sys.stderr)
    print(f"{done} inputs in {time.monotonic() - began:.0f} s: nothing found")
    return 0


def main() -> int:
    """Return 0 if nothing is found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help=f"of {', '.join(TARGETS)}; all by default")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all targets together")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--engine", choices=("atheris", "plain"), help="atheris if it is installed")
    options = parser.parse_args()
    logging.getLogger("cubroker").addHandler(logging.NullHandler())  # else each refused input is a line of its own
    names = options.targets or list(TARGETS)
    chunks = -(-options.inputs // (CHUNK * len(names)))
    size = -(-options.inputs // (chunks * len(names)))
    jobs = [(name, size, options.seed + number) for number in range(chunks) for name in names]
    if (options.engine or ("atheris" if importlib.util.find_spec("atheris") else "plain")) == "plain":
        with scratch():
            return work(plain, jobs, options.jobs)
    with scratch(), tempfile.TemporaryDirectory(prefix="cubroker-fuzz-") as corpora:
        prepare(Path(corpora), names)
        return work(functools.partial(guided, Path(corpora)), jobs, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
