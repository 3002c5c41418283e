"""What refusals say; and no multicast call reaches real hardware while a setting says no: a stand-in here, always."""

from __future__ import annotations

import ast
import gc
import os
import pickle
import pwd
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from cubroker.driver import DriverError, checked_calls
from cubroker.driver.checked_calls import Calls, MulticastOff, explained
from cubroker.driver.host.bindings import HostModule
from tests.unit.driver.hardware import SETTINGS, YES, StandIn

ROOT = Path(__file__).parents[3]
PRODUCT = ("cli", "client", "driver", "protocol", "server", "benchmarks", "examples", "deploy")
FUNCTIONS = tuple(name for name in dir(cuda) if name.startswith("cuMulticast"))

NO = [
    *(
        ("NCCL_NVLS_ENABLE", value)
        for value in ("0", " 0 ", "00", "08", "-09", "\xa01", "0x0", "-0", "", "false", "off", "no", "true", "0.5")
    ),
    *(
        (setting, value)
        for setting in ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
        for value in ("1", " 1 ", "2", "true", "TRUE", "yes", "on", "", "false", "no", "00")
    ),
    *(
        ("CUBROKER_MULTICAST", value)
        for value in (
            "0",
            " 0",
            "00",
            "false",
            "False",
            "off",
            "no",
            "n",
            "never",
            "",
            " ",
            "2",
            "-1",
            "maybe",
            "yes no",
        )
    ),
]


class Subclass(HostModule):
    """A host driver that does not own up to being one."""

    emulated = False


def refused(hardware: Any, setting: str) -> str:
    """Try every function; return what the refusals say, all about this setting."""
    calls = Calls(hardware)
    texts = set()
    for name in FUNCTIONS:
        with pytest.raises(MulticastOff, match=f"^{name} was not called: ") as caught:
            getattr(calls, name)(1, 2, 3)
        assert (caught.value.call, caught.value.setting) == (name, setting)
        assert (caught.value.status, caught.value.name) == (800, "CUDA_ERROR_NOT_PERMITTED")
        texts.add(str(caught.value).partition(": ")[2])
    (text,) = texts
    return text


@pytest.mark.parametrize(("setting", "value"), NO)
def test_no_call_is_made_while_a_setting_says_no(
    hardware: StandIn, monkeypatch: pytest.MonkeyPatch, setting: str, value: str
) -> None:
    for name, text in (YES | {setting: value}).items():
        monkeypatch.setenv(name, text)
    assert len(FUNCTIONS) >= 6
    assert f"{setting}={value} says no" in refused(hardware, setting)
    assert hardware.touched == []


def test_no_call_is_made_before_somebody_has_said_yes(hardware: StandIn) -> None:
    text = refused(hardware, "CUBROKER_MULTICAST")
    assert text == "multicast is off on real hardware unless CUBROKER_MULTICAST=1 says yes"
    assert hardware.touched == []


@pytest.mark.parametrize("value", ["1", " 1\n", "true", "True", "YES", "y", "on"])
def test_a_yes_lets_calls_pass_where_nobody_else_says_no(
    hardware: StandIn, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("CUBROKER_MULTICAST", value)
    for name, text in zip(SETTINGS, ("2", "0", " 0 "), strict=False):
        monkeypatch.setenv(name, text)
    assert Calls(hardware).cuMulticastCreate("properties") == 7
    assert hardware.touched == ["cuMulticastCreate", "cuMulticastCreate()"]


@pytest.mark.parametrize("value", ["1", "2", "0x1", "010", "+3", " 1"])
def test_what_nccl_takes_for_a_yes_is_no_objection(hardware: StandIn, value: str) -> None:
    assert checked_calls.multicast_objection(YES | {"NCCL_NVLS_ENABLE": value}) is None


@pytest.mark.parametrize("place", ["named", "user's", "everybody's"])
@pytest.mark.parametrize(
    "text",
    [
        "NCCL_NVLS_ENABLE=0",
        "# why\nNCCL_DEBUG=WARN\n\nNCCL_NVLS_ENABLE=0\n",
        "NCCL_NVLS_ENABLE=1\nNCCL_NVLS_ENABLE=0\r\n",
        " NCCL_NVLS_ENABLE = 0\n",
        "NCCL_NVLS_ENABLE=no, never\n",
    ],
)
def test_a_no_in_a_file_of_nccls_is_heard_whatever_else_says_yes(
    hardware: StandIn, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, place: str, text: str
) -> None:
    for name, value in (YES | {"NCCL_NVLS_ENABLE": "1"}).items():
        monkeypatch.setenv(name, value)
    for other in places.values():
        other.write_text("NCCL_NVLS_ENABLE=1\n")
    assert checked_calls.multicast_objection(os.environ) is None
    places[place].write_text(text)
    said = refused(hardware, "NCCL_NVLS_ENABLE")
    assert re.fullmatch(
        rf"NCCL_NVLS_ENABLE=(0|no, never) in {places[place]} says no to multicast on this machine", said
    )
    assert hardware.touched == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"#NCCL_NVLS_ENABLE=0\n",
        b"NCCL_NVLS_ENABLE\n",
        b"MY_NCCL_NVLS_ENABLE=0\n",
        b"\xff=0\nNCCL_NVLS_ENABLE=2",
        None,
    ],
)
def test_a_file_of_nccls_that_does_not_say_no_is_no_objection(places: dict[str, Path], content: bytes | None) -> None:
    for place in places.values():
        if content is None:
            place.mkdir()  # what cannot be read says nothing, to NCCL either
        else:
            place.write_bytes(content)
    assert checked_calls.multicast_objection(YES | {"NCCL_CONF_FILE": str(places["named"])}) is None


def test_whoever_is_no_user_of_the_system_has_no_file_of_nccls(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert checked_calls.multicast_objection(YES) is None
    places["everybody's"].write_text("NCCL_NVLS_ENABLE=0")
    assert checked_calls.multicast_objection(YES) is not None


def test_a_no_is_heard_when_it_comes_later(hardware: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBROKER_MULTICAST", "1")
    calls = Calls(hardware)
    function = calls.cuMulticastCreate
    function("properties")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    for again in (function, calls.cuMulticastCreate):
        with pytest.raises(MulticastOff, match="NCCL_NVLS_ENABLE=0 says no"):
            again("properties")
    assert hardware.touched == ["cuMulticastCreate", "cuMulticastCreate()"]


@pytest.mark.parametrize("claim", [None, False, 1, "yes"])
def test_what_does_not_say_that_it_is_emulated_is_hardware(hardware: StandIn, claim: Any) -> None:
    vars(hardware)["emulated"] = claim
    refused(hardware, "CUBROKER_MULTICAST")
    refused(Subclass(2, 4 << 20), "CUBROKER_MULTICAST")
    assert hardware.touched == []
    assert not checked_calls.emulated(cuda)


def test_the_host_driver_needs_no_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting, value in zip(SETTINGS, ("0", "1", "1", "0"), strict=True):
        monkeypatch.setenv(setting, value)
    checked_calls.check_multicast(HostModule(2, 4 << 20), "cuMulticastCreate")


def test_a_refusal_is_an_error_of_the_driver_and_travels(hardware: StandIn) -> None:
    with pytest.raises(DriverError) as caught:
        Calls(hardware).cuMulticastUnbind()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# -- nothing goes past it ------------------------------------------------------------------------------


def product() -> dict[str, str]:
    """The text of every file that is not a test, by its path."""
    files = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*") if path.suffix != ".json"]
    texts = [path for path in files if path.is_file() and path.parent.name != "__pycache__"]
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in texts}


def mentioning(pattern: str) -> set[str]:
    return {path for path, text in product().items() if re.search(pattern, text)}


def test_the_functions_are_named_in_the_driver_layer_alone() -> None:
    allowed = {"driver/checked_calls.py", "driver/multicast.py", "driver/host/multicast.py"}
    assert "driver/checked_calls.py" in mentioning("cuMulticast") <= allowed


START = "driver/__init__.py"
"""Starts CUDA before there are :class:`Calls`."""


def test_nothing_takes_functions_from_a_module_past_the_checked_calls() -> None:
    """Nor finds them in another way: the bindings are named where CUDA is started, and for host devices' types."""
    assert mentioning(r"module\.cu[A-Z]|cuGetProcAddress|dlsym|cuda\.core|symmetric_memory") == set()
    assert mentioning(r"libcuda\.so") <= {"cli/doctor/facts.py", "benchmarks/restart.py"}, (
        "which only look whether it is there"
    )
    bindings = mentioning(r"(from|import) +cuda\b|import_module\(.*cuda")
    assert {path for path in bindings if not path.startswith("driver/host/")} == {"driver/driver.py", START}
    called = set(re.findall(r"cuda\.(cu\w+)", product()[START]))
    assert called == {"cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDevicePrimaryCtxRetain"}
    for path in bindings - {"driver/driver.py", START}:
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "cuda":
                assert node.attr.startswith("CU"), f"{path} calls {node.attr} of the bindings"


ON_HARDWARE = ("tests/gpu", "benchmarks")
OBEDIENT = {"tests/unit/driver/other_process.py", "tests/unit/driver/multicast_commands.py"}
"""Another process that does what it is told: who would tell it to is what is looked for."""

FORBIDDEN = re.compile(
    r"cuMulticast|Multicast\b|make_team|release_team|add_device|\.multicast\(|\.window\(|open_window|\.broadcast\("
    r"""|driver\.multicast_(setup|commands)\b|Window|set_up_multicast|(?<!kinds\[)(?<!"\]\[)["']multicast["']"""
)


def imported(path: Path) -> set[Path]:
    """The modules of tests and benchmarks that a module imports, whatever it takes from them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        head = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for name in (head[:-1], *(head + name for name in names)):
            if (file := ROOT / f"{name.replace('.', '/')}.py").is_file() and name.startswith(("tests", "benchmarks")):
                found.add(file)
    return found


@pytest.mark.slow
def test_nothing_that_runs_on_a_gpu_makes_a_multicast_call() -> None:
    """Nor asks for an object, a window or a pool of that kind; nor do modules whose tests are imported there."""
    left = [path for folder in ON_HARDWARE for path in (ROOT / folder).rglob("*.py")]
    seen = set(left)
    while left:
        more = imported(left.pop()) - seen
        seen |= more
        left += more
    names = {str(path.relative_to(ROOT)) for path in seen}
    assert {"tests/gpu/test_placement.py", "tests/unit/driver/conformance_vmm.py", "benchmarks/replicate.py"} <= names
    assert [name for name in names - OBEDIENT if FORBIDDEN.search((ROOT / name).read_text())] == []


@pytest.mark.slow
def test_the_tests_on_gpus_say_no_to_multicast_whatever_the_site_says(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.gpu.conftest import *\n")
    (tmp_path / "test_environment.py").write_text(
        "import os\nfrom cubroker.driver import checked_calls\n\n"
        "def test_it():\n"
        "    assert checked_calls.multicast_objection(os.environ)[1].startswith('CUBROKER_MULTICAST=0 says no')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | YES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# -- refusals in words ----------------------------------------------------------------------------------


class Memory:
    """What a caller has in a variable."""


def explained_refusal(texts: dict[str, str] | Callable[[], dict[str, str]]) -> tuple[str, weakref.ref[Memory]]:
    """Return what is said of a refused call, and the memory of whoever made the call."""
    memory = Memory()
    try:
        with explained(texts):
            raise DriverError("cuMemMap", 101, "CUDA_ERROR_INVALID_DEVICE", "asked with 1")
    except DriverError as error:
        return str(error), weakref.ref(memory)


@pytest.mark.parametrize(
    ("explains", "says"), [("CUDA_ERROR_INVALID_DEVICE", "out of reach"), ("CUDA_ERROR_INVALID_VALUE", "asked with 1")]
)
def test_a_refusal_is_told_in_the_words_for_it_and_keeps_nothing_of_its_callers(explains: str, says: str) -> None:
    gc.disable()
    try:
        texts = {explains: "out of reach"}
        for given in (texts, lambda: texts):
            told, memory = explained_refusal(given)
            assert memory() is None
            assert told == f"cuMemMap failed with CUDA_ERROR_INVALID_DEVICE (101): {says}"
    finally:
        gc.enable()


def test_the_words_go_with_a_refusal_to_another_process() -> None:
    with pytest.raises(DriverError) as caught, explained({"CUDA_ERROR_INVALID_DEVICE": "out of reach"}):
        raise DriverError("cuMemMap", 101, "CUDA_ERROR_INVALID_DEVICE", "asked with 1")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
