"""Wheels that are built from this tree, and environments that have what a wheel declares and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from zipfile import Path as ZipPath

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FOLDERS = ("api", "protocol", "driver", "server", "client", "integrations", "cli", "deploy", "examples")
SOURCES = (*FOLDERS, "pyproject.toml", "README.md", "LICENSE", "Makefile")
VERSION = re.compile(r'^version = "(.*)"$', re.MULTILINE)


def source(version: str, folder: Path) -> None:
    """Copy what this tree is built and installed from to ``folder``, as a version."""
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    project = folder / "pyproject.toml"
    text, count = VERSION.subn(f'version = "{version}"', project.read_text())
    assert count == 1
    project.write_text(text)


def wheel(folder: Path, version: str = "") -> Path:
    """Build this tree, as a version if one is given, and return its wheel in ``folder``."""
    version = version or VERSION.findall((ROOT / "pyproject.toml").read_text())[0]
    with tempfile.TemporaryDirectory(prefix="cubroker-source-") as tree:
        source(version, Path(tree))
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--wheel-dir", folder, tree], check=True)
    (built,) = folder.glob(f"cubroker-{version}-*.whl")
    return built


def sdist(folder: Path) -> Path:
    """Build the source distribution of all files that git has of this tree, and return it in ``folder``."""
    with tempfile.TemporaryDirectory(prefix="cubroker-source-") as tree:
        for name in tracked():
            (Path(tree) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(tree) / name)
        build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
        subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    (built,) = folder.glob("cubroker-*.tar.gz")
    return built


def tracked() -> list[str]:
    """Return the files that git has of this tree and that are there, by their paths in it; none without git."""
    command = ["git", "-C", str(ROOT), "ls-files"]
    done = subprocess.run(command, capture_output=True, text=True, check=False) if shutil.which("git") else None
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()] if done else []


def metadata(file: Path) -> Distribution:
    """Return what a wheel says of itself."""
    (folder,) = (each for each in ZipPath(file).iterdir() if each.name.endswith(".dist-info"))
    return PathDistribution(folder)  # type: ignore[arg-type]  # it reads as little of a path as this one has


def required(file: Path, extras: Collection[str] = ()) -> set[str]:
    """Return the names of all that a wheel requires with these extras, and of what that requires in turn."""
    found: set[str] = set()
    todo = list(_requirements(metadata(file), extras))
    while todo:
        requirement = todo.pop()
        if requirement.name == "cubroker":
            todo += _requirements(metadata(file), requirement.extras)
        elif requirement.name not in found:
            found.add(requirement.name)
            todo += _requirements(distribution(requirement.name), requirement.extras)
    return found


def _requirements(of: Distribution, extras: Collection[str]) -> Iterator[Requirement]:
    for requirement in map(Requirement, of.requires or ()):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": each}) for each in ("", *extras)):
            yield requirement


def environment(folder: Path, file: Path, extras: Collection[str] = ()) -> Path:
    """Install a wheel, with what it requires, into a new environment, and return that's ``bin``.

    The packages that it requires are those of this interpreter, by links to their files: nothing is downloaded.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in required(file, extras):
        link(name, packages)
    command = [sys.executable, "-m", "pip", "--quiet", "--python", folder / "bin" / "python", "install"]
    subprocess.run([*command, "--no-deps", "--no-index", file], check=True)
    return folder / "bin"


def link(name: str, packages: Path) -> None:
    """Link a package of this interpreter file by file: several may share a folder, as those of a namespace do."""
    for file in distribution(name).files or ():
        if ".." not in file.parts:
            (packages / file).parent.mkdir(parents=True, exist_ok=True)
            (packages / file).symlink_to(Path(str(file.locate())).resolve())
