"""The parts of MemPool that need no GPU: the room in a draft, what torch calls, and how much room a model takes."""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import signal
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from cubroker.client import Broker
from cubroker.integrations import torch as bridge
from cubroker.integrations.torch import BLOCK, SEGMENT, MemPool, OutOfRoom, Room, segments
from cubroker.protocol.errors import CubrokerError, Invalid, Unsupported
from tests import forkserver
from tests.brokers import BrokerProcess, eventually
from tests.forkserver import TORCH

MIB = 1 << 20
START = 7 * SEGMENT
NUMBERS = itertools.count()


@pytest.mark.slow
@given(some.lists(some.tuples(some.booleans(), some.integers(0, 1 << 16), some.integers(0, 1 << 30)), max_size=60))
def test_pieces_of_a_room_lie_apart_inside_of_it_and_come_back_whole(steps: list[tuple[bool, int, int]]) -> None:
    room, taken = Room(START, 64 * BLOCK), dict[int, int]()
    for takes, nbytes, which in steps:
        if takes:
            size = max(-(-nbytes // BLOCK), 1) * BLOCK
            largest, pointer = room.largest, room.take(nbytes)
            assert (pointer is None) == (size > largest)
            if pointer is None:
                assert room.refused == size
                continue
            assert (pointer - START) % BLOCK == 0
            assert START <= pointer <= START + room.nbytes - size
            assert all(pointer + size <= other or other + taken[other] <= pointer for other in taken)
            taken[pointer] = size
        elif taken:
            pointer = sorted(taken)[which % len(taken)]
            room.give_back(pointer)
            del taken[pointer]
        assert room.left == room.nbytes - sum(taken.values())
        assert room.empty == (not taken)
    for pointer in list(taken):
        room.give_back(pointer)
    assert room.largest == room.left == room.nbytes
    assert room.take(room.nbytes) == START


def test_a_room_takes_the_first_piece_that_fits() -> None:
    room = Room(START, 10 * BLOCK)
    first, second, third = (room.take(2 * BLOCK) for _ in range(3))
    assert (first, second, third) == (START, START + 2 * BLOCK, START + 4 * BLOCK)
    assert first is not None
    room.give_back(first)
    assert room.take(3 * BLOCK) == START + 6 * BLOCK
    assert room.take(BLOCK) == START
    with pytest.raises(KeyError):
        room.give_back(START + BLOCK)


def test_a_closed_room_keeps_its_memory_until_the_last_piece_is_back() -> None:
    class Keeper:
        pass

    for pieces in (0, 1, 2):
        keeper = Keeper()
        there, room = weakref.ref(keeper), Room(START, 10 * BLOCK, keeper)
        del keeper
        taken = [room.take(BLOCK) or 0 for _ in range(pieces)]
        assert there() is not None
        room.close()
        for pointer in taken:
            assert there() is not None
            room.give_back(pointer)
        assert there() is None


# -- what torch calls ----------------------------------------------------------------------------------

take, give_back = bridge._calls


@pytest.fixture
def room() -> Iterator[Room]:
    room = Room(START, 4 * SEGMENT)
    bridge._active.room = room
    yield room
    bridge._active.room = None
    assert room.error is None


def test_torch_gets_segments_and_gives_them_back_from_anywhere(room: Room) -> None:
    one, other = take(SEGMENT, 0, None), take(2 * SEGMENT, 0, None)
    assert (one, other) == (START, START + SEGMENT)
    assert take(2 * SEGMENT, 0, None) is None
    assert room.refused == 2 * SEGMENT
    bridge._active.room = None
    assert take(SEGMENT, 0, None) is None  # a thread that uses no pool
    for pointer in (other, one):
        give_back(pointer, SEGMENT, 0, None)
    assert room.empty
    give_back(one, SEGMENT, 0, None)  # what is not there does no harm
    assert gc.isenabled()


def test_an_error_never_leaves_a_call(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: int) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(room, "take", fails)
    assert take(SEGMENT, 0, None) is None
    assert isinstance(room.error, KeyboardInterrupt)
    room.error = None
    assert gc.isenabled()


INTERRUPTED = """
import ctypes, os, signal, sys, threading
from contextlib import nullcontext
from cubroker.integrations import torch as bridge
from cubroker.integrations.torch import Room

room = bridge._active.room = Room(512, 1 << 62)
libc, numbers = ctypes.CDLL(None), (ctypes.c_int64 * 3000)()
(take, _), pid, stop = bridge._calls, os.getpid(), threading.Event()

def interrupt():
    while not stop.wait(0.01):
        os.kill(pid, signal.SIGINT)

thread = threading.Thread(target=interrupt)
raised = 0
with bridge._signals_wait() if sys.argv[1] == "waits" else nullcontext():
    try:
        thread.start()
        libc.qsort(numbers, len(numbers), 8, take)  # calls it as torch does, many times in one call from here
        stop.wait(60)  # an interrupt is on its way
    except KeyboardInterrupt:
        raised += 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
stop.set()
print(raised, room.error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False])
def test_an_interrupt_comes_behind_the_call(*, waits: bool) -> None:
    """Without what makes it wait, it would come in the middle."""
    command = ["-c", INTERRUPTED, "waits" if waits else ""]
    done = forkserver.run(command, preload=TORCH, measured=False, capture_output=True, text=True, timeout=100)
    came_behind = (done.returncode, done.stdout) == (0, "1 None\n") and "Traceback" not in done.stderr
    assert came_behind == waits, done


def test_handlers_that_are_set_inside_stay() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with bridge._signals_wait():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# -- a pool, with a stand-in for torch's allocator -----------------------------------------------------


class Allocator:
    """As much of torch's caching allocator as a pool needs, in host memory: a segment for every tensor."""

    def __init__(self, _: object) -> None:
        self.blocks: dict[int, int] = {}

    def make(self, *shape: int) -> torch.Tensor:
        """Return a tensor in a new segment; its bytes are not freed with it."""
        nbytes = 4 * math.prod(shape)
        pointer = take(SEGMENT, 0, None)
        if pointer is None:
            raise torch.cuda.OutOfMemoryError
        self.blocks[pointer] = nbytes
        data = np.frombuffer((ctypes.c_char * nbytes).from_address(pointer), np.float32)
        return torch.from_numpy(data).reshape(shape)

    def snapshot(self) -> list[dict[str, object]]:
        blocks = [(pointer, {"size": size, "state": "active_allocated"}) for pointer, size in self.blocks.items()]
        rest = {"size": SEGMENT, "state": "inactive"}
        return [{"address": pointer, "blocks": [block, rest]} for pointer, block in blocks]

    def __del__(self) -> None:
        for pointer in self.blocks:
            give_back(pointer, SEGMENT, 0, None)


@pytest.fixture
def pool(lender: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemPool]:
    """A pool of four segments on a host device."""
    monkeypatch.setattr(bridge, "_check_torch", lambda *_: None)
    monkeypatch.setattr(bridge, "_allocator", lambda: None)
    monkeypatch.setattr(MemPool, "_warm_up", lambda _: None)
    monkeypatch.setattr(torch.cuda, "MemPool", Allocator)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda *_: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    with Broker(lender.directory) as broker:
        name = f"mempool-{next(NUMBERS)}"  # other modules have pools on the same broker
        made = MemPool(broker, name, 4 * SEGMENT, device=0)
        yield made
        made.close()
        del made
        gc.collect()
        if any((info.name, info.state) == (name, "current") for info in broker.pools()):
            broker.retire(name)
        eventually(lambda: all(info.name != name for info in broker.pools()), "the end of the pool")


class Net(nn.Module):
    def __init__(self, allocator: Allocator) -> None:
        super().__init__()
        self.weight = nn.Parameter(allocator.make(30, 20))
        self.tied = self.weight
        self.register_buffer("scales", allocator.make(20), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scales) @ self.tied.T


@torch.no_grad()
def test_a_model_is_sealed_where_it_is(lender: BrokerProcess, pool: MemPool) -> None:
    allocator: Any = pool._torch
    with pool.use():
        model = Net(allocator)
        model.weight.copy_(torch.arange(600).reshape(30, 20))
        model.scales.fill_(2)
        with pytest.raises(Invalid, match="sealed inside of use"):
            pool.seal(model)
    x = torch.ones(1, 20)
    made, pointer = model(x), model.weight.data_ptr()
    assert pool.left == 2 * SEGMENT
    assert pool.seal(model) == 1
    assert (model.weight.data_ptr(), pool.pool.version) == (pointer, 1)
    assert torch.equal(model(x), made)
    with Broker(lender.directory) as other, other.attach(pool.pool.name) as reader:
        assert list(reader) == ["weight", "tied"]
        assert torch.equal(torch.from_dlpack(reader["tied"]), model.weight)
    with pytest.raises(Invalid, match="takes no more tensors"), pool.use():
        pass
    pool.close()
    assert torch.equal(model(x), made)
    with pytest.raises(Invalid, match="is closed; make another"):
        pool.seal(model)
    del allocator, model


@torch.no_grad()
def test_what_is_not_published_keeps_a_pool_from_being_sealed(pool: MemPool) -> None:
    allocator: Any = pool._torch
    with pool.use():
        weight, cache = allocator.make(30, 20), allocator.make(100)
    with pytest.raises(Invalid, match=r"1 allocations of torch.* \(400 bytes at"):
        pool.seal({"weight": weight})
    with pytest.raises(Invalid, match="'outside' lies in other memory"):
        pool.seal({"weight": weight, "cache": cache, "outside": torch.ones(3)})
    assert pool.seal({"weight": weight, "cache": cache}) == 1
    del allocator, weight, cache


def test_the_base_of_a_view_that_was_replaced_by_a_copy_keeps_no_pool_open(pool: MemPool) -> None:
    allocator: Any = pool._torch
    with pool.use():
        turned, copied = allocator.make(30, 20).t(), allocator.make(20, 30)
    with pytest.raises(Invalid, match="'turned' has gaps"):
        pool.seal({"turned": turned})
    turned.data = copied  # as seal(copy=True) does
    assert pool.seal({"turned": turned}) == 1
    del allocator, turned, copied


def test_running_out_of_room_says_how_much_there_would_have_to_be(pool: MemPool) -> None:
    allocator: Any = pool._torch
    with pool.use():
        for _ in range(4):
            allocator.make(1)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            allocator.make(1)
    with pytest.raises(OutOfRoom, match=f"of its {4 * SEGMENT} are 0 free; make it with nbytes={5 * SEGMENT} or more"):
        exhaust(pool, allocator)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="not ours"), pool.use():
        raise torch.cuda.OutOfMemoryError("not ours")
    del allocator


def exhaust(pool: MemPool, allocator: Any) -> None:
    with pool.use():
        allocator.make(1)


def test_an_error_in_a_call_is_raised_at_the_end_of_the_block(pool: MemPool, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator: Any = pool._torch

    def fails(_: int) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(pool._room, "take", fails)
    with pytest.raises(ZeroDivisionError):
        exhaust(pool, allocator)
    monkeypatch.undo()
    del allocator


# -- sizes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], 0),
        ([0, 0], 0),
        ([1], 2 * MIB),
        ([1] * 4096, 2 * MIB),
        ([1] * 4097, 4 * MIB),
        ([MIB, MIB], 2 * MIB),
        ([MIB + 1], 20 * MIB),
        ([5 * MIB] * 4, 20 * MIB),
        ([5 * MIB] * 5, 40 * MIB),
        ([9 * MIB, 12 * MIB], 32 * MIB),
        ([9 * MIB, 10 * MIB], 20 * MIB),
        ([12 * MIB + 1, 100 * MIB], 114 * MIB),
    ],
)
def test_the_room_of_tensors_is_that_of_torchs_segments(sizes: list[int], expected: int) -> None:
    assert segments(sizes) == expected


def test_a_model_on_the_meta_device_says_how_much_room_it_takes() -> None:
    with torch.device("meta"):
        model = nn.Linear(1024, 4096, dtype=torch.float32)
        model.register_buffer("cache", torch.empty(100), persistent=False)
    assert MemPool.size_of(model) == 18 * MIB == MemPool.size_of(dict(model.state_dict()))
    model.tied = model.weight
    assert MemPool.size_of(model) == 18 * MIB


# -- refusals ------------------------------------------------------------------------------------------


def test_a_host_device_is_refused_with_what_to_do(lender: BrokerProcess) -> None:
    with Broker(lender.directory) as broker, pytest.raises(Unsupported, match="needs a GPU: torch lets no one else"):
        MemPool(broker, "m", MIB)


def test_running_out_of_room_is_an_error_of_both_libraries() -> None:
    assert issubclass(OutOfRoom, CubrokerError)
    assert issubclass(OutOfRoom, torch.cuda.OutOfMemoryError)
    assert OutOfRoom("so").code == "out_of_memory"
