"""The parts of MemPool that need no GPU: the room in a draft, what torch calls, and how much room a model takes."""

from __future__ import annotations

import gc
import itertools
import signal
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from cubroker.client import Broker
from cubroker.integrations.torch import BLOCK, SEGMENT, MemPool, OutOfRoom, Room, segments
from cubroker.protocol.errors import CubrokerError, Invalid, Unsupported
from tests import forkserver
from tests.brokers import BrokerProcess, eventually
from tests.forkserver import TORCH
from tests.unit.integrations.torch_allocator import calls, make, standing_in

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


# -- a pool, with a stand-in for torch's allocator -----------------------------------------------------


@pytest.fixture
def pool(lender: BrokerProcess) -> Iterator[MemPool]:
    """A pool of four segments on a host device."""
    with standing_in(), Broker(lender.directory) as broker:
        name = f"mempool-{next(NUMBERS)}"  # other modules have pools on the same broker
        made = MemPool(broker, name, 4 * SEGMENT, device=0)
        yield made
        made.close()
        del made
        gc.collect()
        if any((info.name, info.state) == (name, "current") for info in broker.pools()):
            broker.retire(name)
        eventually(lambda: all(info.name != name for info in broker.pools()), "the end of the pool")


def test_torch_gets_segments_and_gives_them_back_from_anywhere(pool: MemPool) -> None:
    (view,) = pool.pool.allocation_views
    with pool.use():
        take, give_back = calls()
        one, other = take(SEGMENT, 0, None), take(2 * SEGMENT, 0, None)
        assert (one, other) == (view.pointer, view.pointer + SEGMENT)
        assert take(2 * SEGMENT, 0, None) is None
    assert take(SEGMENT, 0, None) is None  # a thread that uses no pool
    assert pool.left == SEGMENT
    for pointer in (other, one):
        give_back(pointer, SEGMENT, 0, None)
    assert pool.left == 4 * SEGMENT
    give_back(one, SEGMENT, 0, None)  # what is not there does no harm
    assert pool.left == 4 * SEGMENT
    assert gc.isenabled()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_error_never_leaves_a_call_and_is_raised_at_the_end_of_the_block(
    pool: MemPool, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fails(*_: object) -> int:
        raise error

    came: list[object] = []

    def asks() -> None:
        with pool.use():
            take, _ = calls()
            came.extend((take(SEGMENT, 0, None), gc.isenabled()))

    monkeypatch.setattr(Room, "take", fails)
    with pytest.raises(error):
        asks()
    assert came == [None, True]


INTERRUPTED = """
import ctypes, os, signal, sys, threading
from contextlib import nullcontext
from cubroker.client import Broker
from cubroker.integrations.torch import SEGMENT, MemPool
from tests.unit.integrations.torch_allocator import calls, standing_in

libc, numbers = ctypes.CDLL(None), (ctypes.c_int64 * 3000)()
pid, stop = os.getpid(), threading.Event()
if sys.argv[2] != "waits":
    bridge._signals_wait = nullcontext

def interrupt():
    while not stop.wait(0.01):
        os.kill(pid, signal.SIGINT)

thread = threading.Thread(target=interrupt)
raised = 0
with standing_in(), Broker(sys.argv[1]) as broker, MemPool(broker, "interrupted", SEGMENT, device=0) as pool:
    with pool.use():
        take, _ = calls()
        try:
            thread.start()
            libc.qsort(numbers, len(numbers), 8, take)  # calls it as torch does, many times in one call from here
            stop.wait(60)  # an interrupt is on its way
        except KeyboardInterrupt:
            raised += 1
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop.set()
    print(raised)
"""


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False])
def test_an_interrupt_comes_behind_the_call(lender: BrokerProcess, *, waits: bool) -> None:
    """Without what makes it wait, it would come in the middle."""
    command = ["-c", INTERRUPTED, str(lender.directory), "waits" if waits else ""]
    done = forkserver.run(command, preload=TORCH, measured=False, capture_output=True, text=True, timeout=100)
    came_behind = (done.returncode, done.stdout) == (0, "1\n") and "Traceback" not in done.stderr
    assert came_behind == waits, done


def test_handlers_that_are_set_inside_stay(pool: MemPool) -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with pool.use():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(make(30, 20))
        self.tied = self.weight
        self.register_buffer("scales", make(20), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scales) @ self.tied.T


@torch.no_grad()
def test_a_model_is_sealed_where_it_is(lender: BrokerProcess, pool: MemPool) -> None:
    with pool.use():
        model = Net()
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
    del model


@torch.no_grad()
def test_what_is_not_published_keeps_a_pool_from_being_sealed(pool: MemPool) -> None:
    with pool.use():
        weight, cache = make(30, 20), make(100)
    with pytest.raises(Invalid, match=r"1 allocations of torch.* \(400 bytes at"):
        pool.seal({"weight": weight})
    with pytest.raises(Invalid, match="'outside' lies in other memory"):
        pool.seal({"weight": weight, "cache": cache, "outside": torch.ones(3)})
    assert pool.seal({"weight": weight, "cache": cache}) == 1
    del weight, cache


def test_the_base_of_a_view_that_was_replaced_by_a_copy_keeps_no_pool_open(pool: MemPool) -> None:
    with pool.use():
        turned, copied = make(30, 20).t(), make(20, 30)
    with pytest.raises(Invalid, match="'turned' has gaps"):
        pool.seal({"turned": turned})
    turned.data = copied  # as seal(copy=True) does
    assert pool.seal({"turned": turned}) == 1
    del turned, copied


def test_running_out_of_room_says_how_much_there_would_have_to_be(pool: MemPool) -> None:
    with pool.use():
        for _ in range(4):
            make(1)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            make(1)
    with pytest.raises(OutOfRoom, match=f"of its {4 * SEGMENT} are 0 free; make it with nbytes={5 * SEGMENT} or more"):
        exhaust(pool)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="not ours"), pool.use():
        raise torch.cuda.OutOfMemoryError("not ours")


def exhaust(pool: MemPool) -> None:
    with pool.use():
        make(1)


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
