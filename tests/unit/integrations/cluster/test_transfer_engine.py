"""NIXL behind the four calls of an engine, and what it says where it fails."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from cubroker.integrations.cluster import transfer_engine
from cubroker.integrations.cluster.transfer_engine import MemoryRegion, open_engine
from cubroker.protocol.errors import Unavailable, Unsupported
from tests.cluster import ENGINE, need_engine


def test_an_engine_that_this_build_has_not() -> None:
    with pytest.raises(Unsupported, match="one side of the transfer has 'pigeons', and the other one 'nixl'; upgrade"):
        open_engine("pigeons")


def test_without_nixl_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_engine, "PACKAGES", ("nixl_cu1", "nixl_cu2"))
    for attempt in (partial(open_engine, "nixl"), transfer_engine.need):
        with pytest.raises(Unsupported, match=r"hosts needs nixl, which is .*: pip install 'cubroker\[nixl\]'"):
            attempt()


def test_what_nixl_itself_lacks_is_not_said_to_be_nixl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nixl_cu1").mkdir()
    (tmp_path / "nixl_cu1" / "_api.py").write_text("import nothing_like_it")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(transfer_engine, "PACKAGES", ("nixl_cu1", "nixl_cu2"))
    transfer_engine.need()
    with pytest.raises(Unsupported, match=r"hosts needs nothing_like_it, which is not installed"):
        open_engine("nixl")


@pytest.mark.parametrize("flag", ["-I", "-P"])
def test_a_process_for_an_engine_is_as_isolated_as_its_parent(flag: str) -> None:
    program = f"from {transfer_engine.__name__} import engine_command; print(engine_command('m')[1])"
    done = subprocess.run([sys.executable, flag, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{flag}\n"


def test_what_fails_in_nixl_is_said_in_our_words(monkeypatch: pytest.MonkeyPatch) -> None:
    need_engine()
    for name, value in ENGINE.items():
        monkeypatch.setenv(name, value)
    source, sink = (ctypes.create_string_buffer(bytes([number]) * 4096, 4096) for number in (1, 2))
    there, here = (MemoryRegion(ctypes.addressof(each), 4096) for each in (source, sink))
    one, two = open_engine("nixl"), open_engine("nixl")
    try:
        metadata = one.register([there])
        two.register([here])
        with pytest.raises(Unavailable, match="connecting to the source failed: "):
            two.connect(b"garbage")
        two.connect(metadata)
        with pytest.raises(Unavailable, match="reading from the source failed: "):
            two.read(here, MemoryRegion(there.pointer + 8192, 4096))
        read = two.read(here, there)
        while not read.done():
            pass
        assert read.done()
        assert sink.raw == source.raw
    finally:
        two.close()
        one.close()
    assert transfer_engine.load()
