"""A Containerfile carried out where there is no container engine.

Each stage is a layer over this machine's own files, in place of its base image, and RUN runs in there as root. What
was built is started like a container: in namespaces of its own, on a root that cannot be written, as the image's user,
without capabilities. All of it lies in a mount namespace, and is gone with that. It takes root.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests import wheels
from tests.brokers import PATIENCE
from tests.unit.deploy import containerfile
from tests.unit.deploy.containerfile import Instruction, Stage

ROOT = Path(__file__).parents[3]
TOOLS = ("chroot", "mount", "nsenter", "setpriv", "unshare")
BASE = {"PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
"""The environment of a base image: `python` is the one that runs the tests."""

OFFLINE = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
"""What keeps pip from registries."""

LISTS = "requirements"
"""The folder of what pip would get there. Here the lists are empty, and the tests' own packages take their place."""

HOLD = """
set -e
mount -t tmpfs none "$1"
cd "$1"
for stage in $2; do
  mkdir -p "$stage/upper" "$stage/work" "$stage/root"
  mount -t overlay overlay -o "lowerdir=/,upperdir=$stage/upper,workdir=$stage/work" "$stage/root"
  mount --rbind /dev "$stage/root/dev"
  mount -t proc proc "$stage/root/proc"
  mount -t tmpfs none "$stage/root/tmp"
  for folder in $3; do mkdir -p "$stage/root/$folder" && mount -o ro --bind "$folder" "$stage/root/$folder"; done
  for folder in $4; do chmod a+x "$stage/root/$folder"; done
done
echo held
exec cat
"""
"""Makes the roots of stages, and keeps them until its input ends.

``$3`` are folders of other file systems that are mounted there; everybody may pass ``$4`` there, and only there.
"""

START = """
set -e
root=$1 run=$2 options=$3
shift 3
mount -t proc proc "$root/proc"
mount --bind "$run" "$root/run/cubroker"
mount -o remount,bind,ro "$root"
exec chroot "$root" setpriv $options --bounding-set=-all --no-new-privs "$@"
"""
"""Becomes the first process of a container, as Kubernetes starts ours."""


TRIAL = """
set -e
mount -t tmpfs none /mnt
cd /mnt
mkdir upper work root
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root
"""


def obstacle() -> str:
    """Return why nothing can be built here; empty if it can."""
    if os.geteuid():
        return "carrying out a Containerfile needs root"
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"carrying out a Containerfile needs {', '.join(missing)}"
    probe = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "sh", "-c", TRIAL], capture_output=True, text=True, check=False
    )
    return f"carrying out a Containerfile needs overlays: {probe.stderr.strip()}" if probe.returncode else ""


class Image:
    """The last stage of a Containerfile, built.

    Attributes:
        stage: its instructions.
        environment: the variables that it sets, over those of its base.
    """

    def __init__(self, holder: subprocess.Popen[str], place: Path, stages: Sequence[Stage], libraries: Path) -> None:
        self._holder = holder
        self._place = place
        self._libraries = libraries
        for stage in stages:
            self._build(stage)
        self.stage = stages[-1]
        self.environment = containerfile.environment(self.stage, BASE)

    def root(self, stage: Stage) -> Path:
        """Return where a stage's files are, inside."""
        return self._place / (stage.name or "final") / "root"

    def inside(self, *command: str | Path) -> list[str]:
        """Return the command that runs another one where the stages are."""
        return ["nsenter", "--target", str(self._holder.pid), "--mount", *map(str, command)]

    def start(self, directory: Path, *arguments: str, group: str = "") -> subprocess.Popen[str]:
        """Start a container that has ``directory`` of this machine at /run/cubroker, with arguments after the image.

        ``group`` is its only supplementary group, if it has one.
        """
        uid, gid = self.stage.one("USER").value.split(":")
        variables = (f"{key}={value}" for key, value in self.environment.items())
        first = ["env", "-i", *variables, *self.stage.one("ENTRYPOINT").words(), *arguments]
        namespaces = ["--pid", "--mount", "--ipc", "--uts", "--net", "--cgroup"]
        options = f"--reuid={uid} --regid={gid} {f'--groups={group}' if group else '--clear-groups'}"
        outer = self.inside("unshare", "--fork", "--kill-child", *namespaces, "sh", "-c", START, "sh")
        command = [*outer, str(self.root(self.stage)), str(directory), options, *first]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def run(self, first: int, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a container, as `exec` does; ``first`` is its first process."""
        uid, gid = self.stage.one("USER").value.split(":")
        enter = ["nsenter", "--target", str(first), "--all", "--root", "--wd", "--setuid", uid, "--setgid", gid]
        variables = (f"{key}={value}" for key, value in self.environment.items())
        outer = [*enter, "env", "-i", *variables, *command]
        return subprocess.run(outer, capture_output=True, text=True, check=False, timeout=PATIENCE)

    def _build(self, stage: Stage) -> None:
        folder = "/"
        environment = dict(BASE)
        for each in stage.instructions:
            match each.name:
                case "WORKDIR":
                    folder = each.value
                    self._do("mkdir", "-p", f"{self.root(stage)}{folder}")
                case "COPY":
                    self._copy(stage, each, folder)
                case "RUN":
                    self._run(stage, each.value, folder, environment)
                case "ENV":
                    environment = containerfile.environment(stage, BASE)

    def _run(self, stage: Stage, script: str, folder: str, environment: Mapping[str, str]) -> None:
        variables = (f"{key}={value}" for key, value in {**environment, **OFFLINE}.items())
        shell = ["env", "-i", "-C", folder, *variables, "sh", "-c", script]
        self._do("chroot", self.root(stage), *shell)

    def _copy(self, stage: Stage, each: Instruction, folder: str) -> None:
        *sources, place = each.words()
        origin = each.option("from")
        base = ROOT if origin is None else self._place / origin / "root"
        target = f"{self.root(stage)}{place if place.startswith('/') else os.path.normpath(f'{folder}/{place}')}"
        several = place.endswith("/")
        self._do("mkdir", "-p", target if several else Path(target).parent)
        for source in sources:
            path = Path(f"{base}/{source.lstrip('/')}")
            if origin is None:
                assert path.exists(), f"{each.value}: there is no {path}"
            # The content of a folder, not the folder.
            self._do(
                "sh",
                "-c",
                'if [ -d "$1" ]; then mkdir -p "$2" && set -- "$1/." "$2"; fi; cp -a "$1" "$2"',
                "sh",
                path,
                target,
            )
        if LISTS in sources:
            self._do("sh", "-c", 'for list in "$1"/*; do : > "$list"; done', "sh", target)

    def supply(self, python: str) -> None:
        """Give an interpreter of the last stage what pip was kept from getting."""
        line = 'import sysconfig; open(sysconfig.get_path("purelib") + "/libraries.pth", "w").write(sys.argv[1])'
        self._do("chroot", self.root(self.stage), python, "-c", f"import sys; {line}", f"{self._libraries}\n")

    def _do(self, *command: str | Path) -> None:
        done = subprocess.run(self.inside(*command), capture_output=True, text=True, check=False)
        assert not done.returncode, f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}"


@contextmanager
def built(path: Path, place: Path) -> Iterator[Image]:
    """Carry out a Containerfile, its files in the empty folder ``place``, until the end of the block."""
    stages = containerfile.read(path)
    libraries = place.with_name(place.name + "-libraries")
    libraries.mkdir()
    for name in re.findall(r"^([\w.-]+)==", (ROOT / LISTS / "image.txt").read_text(), re.MULTILINE):
        wheels.link(name, libraries)
    names = " ".join(stage.name or "final" for stage in stages)
    folders = f"{sys.prefix} {libraries}"
    # The user of the image may not be one who may look into the folder of this tree, or of temporary files.
    passages = " ".join(str(each) for place in (sys.base_prefix, sys.prefix, libraries) for each in Path(place).parents)
    command = ["unshare", "--mount", "sh", "-c", HOLD, "sh", str(place), names, folders, passages]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        yield Image(holder, place, stages, libraries)
