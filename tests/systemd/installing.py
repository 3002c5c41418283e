"""Versions of cubroker, installed in a lab as an operator would install them."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.systemd.lab import Lab
from tests.systemd.service import SETTINGS

VERSIONS = ("1.0.0", "1.1.0")
INSTALL = ("install", "--no-deps", "--no-index", "--force-reinstall")
"""Also where the tests' own packages have that version."""


def install(lab: Lab, wheels: dict[str, Path], settings: str) -> None:
    """Install versions, the first of them as the current one, the units, the user and the directory."""
    for version, file in wheels.items():
        add(lab, version, file)
    switch(lab, next(iter(wheels)))
    lab.run("ln", "-s", "/opt/cubroker/current/bin/cubroker", "/usr/local/bin/cubroker")
    lab.run("make", "install")
    lab.write(SETTINGS, settings)
    lab.run("systemd-sysusers")
    lab.run("systemd-tmpfiles", "--create", "/usr/local/lib/tmpfiles.d/cubroker.conf")
    lab.systemctl("daemon-reload")


def add(lab: Lab, version: str, file: Path) -> None:
    """Install a version beside the others."""
    _environment(lab, version)
    python = f"/opt/cubroker/{version}/bin/python"
    lab.run(sys.executable, "-m", "pip", "--quiet", "--python", python, *INSTALL, file)


def switch(lab: Lab, version: str) -> None:
    """Make an installed version the one that is started next."""
    lab.run("ln", "-sfn", version, "/opt/cubroker/current")


def _environment(lab: Lab, version: str) -> None:
    """Make a virtual environment of the lab's Python; what cubroker needs beside itself is in ``/opt/packages``."""
    lab.run("/opt/python/bin/python3", "-m", "venv", "--without-pip", f"/opt/cubroker/{version}")
    folder = f"/opt/cubroker/{version}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    lab.write(f"{folder}/packages.pth", "/opt/packages\n")
