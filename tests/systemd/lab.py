"""A systemd of its own: PID 1 of new namespaces, in which units are installed, started and killed for real.

It takes root, but no virtual machine and no image: the host's programs run on copies of its folders. Nothing on the
host changes, and all of it is gone with its first process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from tests.brokers import PATIENCE, eventually

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SYSTEMD = Path("/usr/lib/systemd/systemd")
NAMESPACES = ("--pid", "--mount", "--cgroup", "--uts", "--ipc", "--net", "--propagation=private")
UNSHARE = ("unshare", "--fork", "--kill-child", *NAMESPACES)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""That of commands inside; the caller's may lack folders, as after `su`."""

TOOLS = ("bash", "ip", "make", "mount", "nsenter", "setpriv", "systemctl", "unshare")
MOUNTS = """
mount -t proc proc /proc
umount --recursive /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs tmpfs /run
mkdir /run/upper /run/work
mount -t overlay -o lowerdir=/etc,upperdir=/run/upper,workdir=/run/work overlay /etc
"""
"""Those that ``inside.sh`` makes, of every kind one."""

GROUPS = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))


def obstacle() -> str:
    """Return why no systemd can be booted here; empty if one can."""
    if os.geteuid():
        return "booting a systemd of its own needs root"
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"booting a systemd of its own needs {', '.join(missing)}"
    if not SYSTEMD.exists():
        return f"there is no {SYSTEMD}"
    if hierarchy() is None:
        return "booting a systemd of its own needs a version 2 hierarchy of control groups that can be written"
    probe = subprocess.run([*UNSHARE, "sh", "-ec", MOUNTS], capture_output=True, text=True, check=False)
    return (
        f"booting a systemd of its own needs namespaces and mounts: {probe.stderr.strip()}" if probe.returncode else ""
    )


def release() -> int:
    """Return which systemd it is, such as 252."""
    return int(subprocess.check_output(["systemctl", "--version"], text=True).split()[1])


def hierarchy() -> Path | None:
    """Return where control groups of version 2 can be made, or None."""
    places = (place for place in GROUPS if (place / "cgroup.procs").exists() and os.access(place, os.W_OK))
    return next(places, None)


class Lab:
    """A running systemd, and what can be done with it.

    Args:
        process: ``unshare``, whose only child is its first process.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> str:
        """The first process, as the host counts it."""
        (first,) = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return first

    def command(self, *arguments: str | Path) -> list[str]:
        """Return the command that runs another one inside, in this tree, on what is installed there."""
        enter = ["nsenter", "-t", self.pid, "-p", "-m", "-C", "-u", "-i", "-n"]
        environment = ["-u", "PYTHONPATH", "-u", "MAKEFLAGS", f"PATH={PATH}"]
        return [*enter, "env", "-C", str(ROOT), *environment, *map(str, arguments)]

    def run(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command inside; fail unless it succeeds, or if it must not be checked, say how it ended."""
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, check=False, timeout=PATIENCE)
        assert not check or done.returncode == 0, (
            f"{arguments} ended with {done.returncode}: {done.stdout}{done.stderr}"
        )
        return done

    def systemctl(self, *arguments: str) -> str:
        """Run ``systemctl`` inside and return what it says."""
        return self.run("systemctl", *arguments).stdout.strip()

    def show(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.systemctl("show", "--value", "--property", name, unit)

    def write(self, path: str, text: str) -> None:
        """Write a file inside."""
        folder = str(Path(path).parent)
        script = 'mkdir -p "$1" && cat > "$2"'
        subprocess.run(self.command("sh", "-c", script, "sh", folder, path), input=text, text=True, check=True)

    def log(self, unit: str) -> str:
        """Return the journal of a unit."""
        self.run("journalctl", "--sync")
        return self.run("journalctl", "--no-pager", "--output=cat", "--unit", unit).stdout


@contextmanager
def booted() -> Iterator[Lab]:
    """Boot a systemd, and end everything in it afterwards."""
    with ExitStack() as undo:
        console = undo.enter_context(tempfile.TemporaryFile())
        group = undo.enter_context(_group())
        process = undo.enter_context(_systemd(group, console))
        lab = Lab(process)

        def runs() -> bool:
            console.seek(0)
            assert process.poll() is None, f"systemd did not come up:\n{console.read().decode()}"
            state = lab.run("systemctl", "is-system-running", check=False).stdout
            return state.strip() in ("running", "degraded")

        eventually(lambda: Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(), "a first process")
        eventually(runs, "systemd to run")
        yield lab


@contextmanager
def _group() -> Iterator[Path]:
    """Make a control group, and remove it with all below it when nothing is in there any more."""
    place = hierarchy()
    assert place is not None
    group = Path(tempfile.mkdtemp(prefix="cubroker-lab-", dir=place))
    group.chmod(0o755)  # it is the root of all groups inside, where users have some of their own
    try:
        yield group
    finally:
        eventually(lambda: "populated 0" in (group / "cgroup.events").read_text(), "the lab's processes to end")
        for folder, _, _ in os.walk(group, topdown=False):
            Path(folder).rmdir()


@contextmanager
def _systemd(group: Path, console: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    enter = 'echo $$ > "$1/cgroup.procs" && shift && exec setpriv --pdeathsig KILL "$@"'
    inside: Sequence[str | Path] = ("bash", HERE / "inside.sh", sys.base_prefix, sysconfig.get_path("purelib"))
    command = ["sh", "-c", enter, "sh", group, *UNSHARE, *inside]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=console, stderr=console)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
