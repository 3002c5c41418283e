"""The kernels as files: they are shipped, and every assembler that is here takes them."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from cubroker.driver.kernel import HERE

ROOT = Path(__file__).parents[2]
KERNELS = {"multimem.ptx": ("sm_90", "sm_100"), "digest.ptx": ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")}
"""The files, and architectures that each is for."""


def test_the_kernels_are_a_part_of_the_package() -> None:
    assert {path.name for path in HERE.glob("*.ptx")} == {path.name for path in (ROOT / "driver").glob("*.ptx")}
    for name in KERNELS:
        assert resources.files("cubroker.driver").joinpath(name).read_bytes() == (HERE / name).read_bytes()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "*.ptx" in project["tool"]["setuptools"]["package-data"]["*"]


@pytest.mark.parametrize(("name", "architecture"), [(name, each) for name, found in KERNELS.items() for each in found])
def test_a_kernel_assembles(name: str, architecture: str, tmp_path: Path) -> None:
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("there is no ptxas here")
    command = [ptxas, f"-arch={architecture}", "-Werror", "-o", str(tmp_path / "kernel.cubin"), str(HERE / name)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
