"""What is read from which source: stories of a few pieces, and any order of events."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cubroker.integrations.cluster.striping import (
    DEPTH,
    HURRY,
    PIECE,
    PIECES,
    UNIT,
    Runs,
    Striping,
    VersionPiece,
    by_room,
    cut,
    piece_size,
)

# -- the choice ----------------------------------------------------------------------------------------


def test_hosts_with_the_most_room_come_first_and_full_ones_not_at_all() -> None:
    hosts = {
        "a": (4, 8),
        "b": (8, 8),
        "c": (1, 8),
        "d": (1, 2),
        "e": (0, 0),
    }
    found = by_room(hosts, Random(1))
    assert found[0] == "c"
    assert sorted(found[1:]) == ["a", "d"]


def test_equal_hosts_come_in_any_order() -> None:
    hosts = dict.fromkeys("abcd", (0, 8))
    first = [by_room(hosts, Random(seed))[0] for seed in range(100)]
    assert {*first} == {*"abcd"}


@given(
    st.lists(st.integers(1, 100), max_size=5), st.lists(st.integers(0, 7), unique=True, max_size=3), st.integers(1, 40)
)
def test_pieces_cover_every_byte_of_every_replica_once(sizes: list[int], replicas: list[int], limit: int) -> None:
    pieces = list(cut(sizes, replicas, limit))
    covered = [
        (piece.replica, piece.allocation, byte)
        for piece in pieces
        for byte in range(piece.offset, piece.offset + piece.nbytes)
    ]
    expected = [(r, a, byte) for a, size in enumerate(sizes) for r in replicas for byte in range(size)]
    assert sorted(covered) == sorted(expected)
    assert all(0 < piece.nbytes <= limit and piece.offset % limit == 0 for piece in pieces)


def test_an_allocation_is_cut_into_pieces_of_16_mib_and_a_small_version_into_more() -> None:
    assert [piece.nbytes for piece in cut([PIECES * PIECE + 1], [0])] == [*[PIECE] * PIECES, 1]
    assert [piece.nbytes for piece in cut([PIECES * (2 * UNIT) + 3], [0])] == [*[2 * UNIT] * PIECES, 3]
    assert [piece.nbytes for piece in cut([UNIT + 1], [0])] == [UNIT, 1]


@given(st.lists(st.integers(0, 5 * UNIT + 9), max_size=5), st.data())
def test_runs_are_counted_as_they_are_cut(sizes: list[int], data: st.DataObject) -> None:
    pieces = list(cut(sizes, [0]))
    this = Runs(sizes)
    assert (this.count, this.total, this.piece) == (len(pieces), sum(sizes), piece_size(sum(sizes)))
    have = data.draw(st.integers(0, (1 << len(pieces)) - 1))
    there = [each.nbytes for number, each in enumerate(pieces) if have >> number & 1]
    assert this.nbytes(have.to_bytes(-(-have.bit_length() // 8), "little")) == sum(there)


# -- striping ------------------------------------------------------------------------------------------


def striping(count: int = 8, depth: int = 2, *sources: int, chance: Random | None = None) -> Striping:
    """A version of ``count`` pieces of 10 bytes, and sources that joined at second 0."""
    found = Striping(cut([10 * count], [0], 10), depth, chance)
    for source in sources:
        found.join(source, 0.0)
    return found


def begin(striping: Striping, source: int, now: float = 0.0) -> list[int]:
    """What a source begins, until it has no room: the numbers of pieces."""
    found: list[int] = []
    while (piece := striping.begin(source, now)) is not None:
        found.append(piece.offset // 10)
    return found


def piece(number: int) -> VersionPiece:
    """A piece of :func:`striping`."""
    return VersionPiece(0, 0, 10 * number, 10)


def test_pieces_go_to_the_source_that_has_room_in_their_order() -> None:
    this = striping(8, 2, 1, 2)
    assert (begin(this, 1), begin(this, 2), begin(this, 1)) == ([0, 1], [2, 3], [])
    assert not this.end(2, piece(2), 1.0)
    assert (begin(this, 1), begin(this, 2)) == ([], [4])
    assert (this.nbytes, this.total, this.finished) == (10, 80, False)


def test_an_allocation_is_whole_with_its_last_piece() -> None:
    this = Striping(cut([20, 10], [0, 1], 10))
    this.join(1, 0.0)
    whole = []
    while (piece := this.begin(1, 0.0)) is not None:
        whole += [piece[:2]] if this.end(1, piece, 1.0) else []
    assert sorted(whole) == [(replica, allocation) for replica in (0, 1) for allocation in (0, 1)]
    assert this.finished


def test_there_is_nothing_to_do_for_a_version_without_bytes() -> None:
    this = striping(0, 2, 1)
    assert this.finished
    assert begin(this, 1) == []


def test_what_a_lost_source_has_not_brought_is_begun_again_by_another() -> None:
    this = striping(4, 2, 1, 2)
    assert (begin(this, 1), begin(this, 2)) == ([0, 1], [2, 3])
    this.end(1, piece(0), 1.0)
    this.lose(1)
    this.end(2, piece(2), 1.0)
    assert begin(this, 2, 1.0) == [1]


def test_what_another_source_brings_as_well_is_not_begun_a_third_time_when_one_is_lost() -> None:
    this = striping(2, 1, 1, 2)
    assert (begin(this, 1), begin(this, 2)) == ([0], [1])
    this.end(2, piece(1), 1.0)
    assert begin(this, 2, 10.0) == [0]
    this.lose(1)
    this.join(3, 10.0)
    assert begin(this, 3, 10.0) == []
    assert this.end(2, piece(0), 11.0)
    assert this.finished


def test_a_source_that_waits_reads_what_a_slower_one_has_not_brought() -> None:
    this = striping(4, 3, 1, 2)
    assert (begin(this, 1), begin(this, 2)) == ([0, 1, 2], [3])
    this.end(2, piece(3), 1.0)  # 10 bytes a second; the other one has brought none
    assert begin(this, 2, 1.0) == [2]  # the one that comes last there
    this.end(2, piece(2), 2.0)
    assert begin(this, 2, 2.0) == [1], "not what is there already, though it is still under way"
    this.end(2, piece(1), 3.0)
    this.end(1, piece(0), 3.0)
    assert this.finished
    assert not this.end(1, piece(1), 9.0)  # the first copy counted
    assert this.nbytes == this.total


def test_a_piece_is_not_begun_again_where_that_brings_it_no_sooner() -> None:
    this = striping(3, 1, 1, 2)
    begin(this, 1), begin(this, 2)
    this.end(1, piece(0), 1.0)
    this.end(2, piece(1), 1.0)  # both bring 10 bytes a second
    assert begin(this, 1, 1.0) == [2]
    assert begin(this, 2, 1.0) == []
    assert begin(this, 2, 1.5) == []
    this.join(3, 1.0)
    assert begin(this, 3, 2.0) == [], "what a source can do that has brought nothing is not known"


def test_two_sources_that_wait_read_different_pieces_of_a_slow_one() -> None:
    this = striping(6, 2, 1, 2, 3)
    assert (begin(this, 1), begin(this, 2), begin(this, 3)) == ([0, 1], [2, 3], [4, 5])
    for source, number in ((2, 2), (2, 3), (3, 4), (3, 5)):
        this.end(source, piece(number), 1.0)
    assert begin(this, 2, 1.0) + begin(this, 3, 1.0) == [1, 0]


def test_a_copy_from_a_source_that_is_stuck_in_its_turn_is_read_a_third_time() -> None:
    this = striping(4, 1, 1, 2, 3)
    begin(this, 1), begin(this, 2), begin(this, 3)
    this.end(2, piece(1), 1.0)
    this.end(3, piece(2), 1.0)
    assert begin(this, 3, 1.0) == [3]
    assert begin(this, 2, 1.0) == [0]
    this.end(3, piece(3), 2.0)
    assert begin(this, 3, 2.0) == []  # source 2 is about to bring it
    assert begin(this, 3, 3.5) == [0]  # and does not


def test_what_a_source_does_not_bring_that_was_fast_until_then_is_read_from_another() -> None:
    this = striping(100, 1, 1, 2)
    for now in range(49):
        for source in (1, 2):
            (number,) = begin(this, source, now)
            this.end(source, piece(number), now + 1.0)
    assert (begin(this, 1, 49.0), begin(this, 2, 49.0)) == ([98], [99])
    this.end(2, piece(99), 50.0)
    assert begin(this, 2, 50.0) == []
    assert begin(this, 2, 49.0 + 2 * HURRY) == [98]


def test_an_allocation_that_is_wrong_is_brought_again_and_its_sources_are_named() -> None:
    this = Striping(cut([20, 20], [0], 10), 2)
    this.join(1, 0.0), this.join(2, 0.0)
    begun = [(source, this.begin(source, 0.0)) for source in (1, 2, 1, 2)]
    for source, each in begun:
        assert each is not None
        this.end(source, each, 1.0)
    assert this.finished
    assert this.again(0, 1) == {1, 2}
    assert (this.nbytes, this.finished) == (20, False)
    assert [this.begin(1, 2.0), this.begin(1, 2.0)] == [VersionPiece(0, 1, 0, 10), VersionPiece(0, 1, 10, 10)]
    assert not this.end(1, VersionPiece(0, 1, 10, 10), 3.0)
    assert this.end(1, VersionPiece(0, 1, 0, 10), 3.0)


def test_a_source_that_still_brings_a_piece_does_not_begin_it_when_it_is_wanted_again() -> None:
    this = striping(3, 2, 1, 2)
    assert (begin(this, 1), begin(this, 2)) == ([0, 1], [2])
    this.end(2, piece(2), 1.0)
    this.end(1, piece(1), 1.0)
    assert begin(this, 2, 10.0) == [0]
    this.end(2, piece(0), 11.0)
    assert this.again(0, 0) == {1, 2}
    assert begin(this, 1, 11.0) == [1]  # it still brings piece 0
    assert begin(this, 2, 11.0) == [], "one brings all of it"
    assert not this.end(1, piece(0), 12.0)
    assert begin(this, 1, 12.0) == [2]


def test_what_came_wrong_is_brought_by_one_source_and_the_next_if_that_is_lost() -> None:
    this = striping(4, 2, 1, 2)
    assert (begin(this, 1), begin(this, 2)) == ([0, 1], [2, 3])
    for source, number in ((1, 0), (1, 1), (2, 2), (2, 3)):
        this.end(source, piece(number), 1.0)
    assert this.again(0, 0) == {1, 2}
    assert (begin(this, 2, 2.0), begin(this, 1, 2.0)) == ([0, 1], [])
    this.end(2, piece(0), 3.0)
    this.lose(2)
    assert begin(this, 1, 4.0) == [1, 2]
    for number in (1, 2):
        this.end(1, piece(number), 5.0)
    assert begin(this, 1, 5.0) == [3]
    assert this.end(1, piece(3), 6.0)
    assert this.again(0, 0) == {1, 2}


def test_what_another_source_had_under_way_of_it_counts_for_nothing() -> None:
    this = striping(2, 1, 1, 2)
    assert (begin(this, 1), begin(this, 2)) == ([0], [1])
    this.end(2, piece(1), 1.0)
    assert begin(this, 2, 10.0) == [0]
    this.end(2, piece(0), 11.0)
    assert this.again(0, 0) == {1, 2}
    assert begin(this, 2, 11.0) == [0]
    assert not this.end(1, piece(0), 12.0)
    this.end(2, piece(0), 13.0)
    assert begin(this, 2, 13.0) == [1]
    assert this.end(2, piece(1), 14.0)
    assert this.again(0, 0) == {1, 2}, "the first one may have written last, and is named"


def test_what_a_source_claims_to_have_beyond_the_version_is_nothing() -> None:
    this = Striping(cut([20], [0, 1], 10), 9)
    this.join(1, 0.0, 0b100)
    assert this.begin(1, 0.0) is None


def test_a_source_is_silent_from_its_last_piece_or_its_first_request_on() -> None:
    this = striping(3, 2, 1)
    assert this.silent(1, 100.0) == 0  # it was asked for nothing
    begin(this, 1, 100.0)
    assert this.silent(1, 103.0) == 3
    this.end(1, piece(0), 104.0)
    assert this.silent(1, 105.0) == 1
    this.end(1, piece(1), 105.0)
    assert this.silent(1, 106.0) == 0


# -- parts ---------------------------------------------------------------------------------------------


def test_a_source_is_asked_for_what_it_has() -> None:
    this = striping(4, 4, chance=Random(1))
    this.join(1, 0.0, 0b0100)
    assert begin(this, 1) == [2]
    this.has(1, 0b0111)
    assert sorted(begin(this, 1)) == [0, 1]


def test_what_no_other_source_has_is_taken_first() -> None:
    this = striping(6, 2, 1)
    this.join(2, 0.0, 0b010111)
    assert begin(this, 1) == [3, 5]
    assert begin(this, 2) == [0, 1]


def test_the_readers_of_a_source_begin_with_different_pieces() -> None:
    readers = [striping(6, 2, chance=Random(place)) for place in range(3)]
    for place, this in enumerate(readers):
        this.join(1, 0.0, place=(place, 3))
    assert [sorted(begin(this, 1)) for this in readers] == [[0, 3], [1, 4], [2, 5]]
    for number in (0, 3):
        readers[0].end(1, piece(number), 1.0)
    assert set(begin(readers[0], 1)) < {1, 2, 4, 5}  # and go on with those of the others


def test_hosts_that_take_pieces_by_chance_take_different_ones() -> None:
    first = {begin(striping(64, 1, 1, chance=Random(seed)), 1)[0] for seed in range(64)}
    assert len(first) > 20


def test_hosts_that_fetch_at_once_take_little_more_than_one_copy_from_the_origin() -> None:
    """Each second each of three hosts gets a piece from the origin, and one from each other host, if that has any."""
    origin, hosts = 3, [striping(240, DEPTH, chance=Random(seed)) for seed in range(3)]
    flying: dict[tuple[int, int], list[VersionPiece]] = {}
    for slot, this in enumerate(hosts):
        this.join(origin, 0.0, place=(slot, 8))
        for other in {0, 1, 2} - {slot}:
            this.join(other, 0.0, 0)
    sent, now = 0, 0.0
    while not all(this.finished for this in hosts):
        told, now = [this.have for this in hosts], now + 1
        for host, this in enumerate(hosts):
            for source in {0, 1, 2, origin} - {host}:
                if source != origin:
                    this.has(source, told[source])
                under_way = flying.setdefault((host, source), [])
                while (begun := this.begin(source, now)) is not None:
                    under_way.append(begun)
                    sent += source == origin
                if under_way:
                    this.end(source, under_way.pop(0), now)
    assert 1 <= sent / 240 < 1.25


def test_a_part_is_one_of_every_replica() -> None:
    this = Striping(cut([20, 10], [0, 3], 10), 9)
    this.join(1, 0.0, 0b110)
    begun = []
    while (each := this.begin(1, 0.0)) is not None:
        begun.append(each)
    assert sorted(begun) == [VersionPiece(replica, *run) for replica in (0, 3) for run in ((0, 10, 10), (1, 0, 10))]
    for each in begun:
        this.end(1, each, 1.0)
    assert (this.nbytes, this.from_parts) == (40, 20), "of each replica"


def test_a_source_without_anything_that_is_wanted_is_useless_until_it_has_something() -> None:
    this = striping(4, 2, 1)
    this.join(2, 0.0, 0b0001)
    assert begin(this, 2, 1.0) == [0]
    this.end(2, piece(0), 2.0)
    assert begin(this, 2, 2.0) == []
    assert (this.useless(2, 5.0), this.useless(1, 5.0)) == (3.0, 0.0)
    this.has(2, 0b0011)
    assert begin(this, 2, 6.0) == [1]
    assert this.useless(2, 7.0) == 0
    this.end(2, piece(1), 8.0)
    assert begin(this, 1, 8.0) == [2, 3]
    assert begin(this, 2, 8.0) == []
    assert this.useless(2, 9.0) == 0, "everything has been begun"


def test_at_the_end_a_source_reads_again_only_what_it_has() -> None:
    this = striping(3, 1, 1)
    this.join(2, 0.0, 0b010)
    assert (begin(this, 1), begin(this, 2)) == ([0], [1])
    this.end(2, piece(1), 1.0)
    this.end(1, piece(0), 1.0)
    assert begin(this, 1, 1.0) == [2]
    assert begin(this, 2, 60.0) == []
    this.has(2, 0b111)
    this.end(1, piece(2), 61.0)
    assert this.finished


def test_what_is_there_is_what_no_source_writes_any_more() -> None:
    this = striping(3, 1, 1, 2)
    assert (begin(this, 1), begin(this, 2), this.have) == ([0], [1], 0)
    this.end(2, piece(1), 1.0)
    assert this.have == 0b010
    assert begin(this, 2, 1.0) == [2]
    this.end(2, piece(2), 2.0)
    assert begin(this, 2, 10.0) == [0]
    this.end(2, piece(0), 11.0)
    assert this.have == 0b110, "the other source still writes piece 0"
    this.lose(1)
    assert this.have == 0b111
    this.again(0, 0)
    assert this.have == 0


def test_a_part_is_there_when_it_is_in_the_first_replica() -> None:
    this = Striping(cut([20], [0, 3], 10), 9)
    this.join(1, 0.0)
    pieces = [this.begin(1, 0.0) for _ in range(4)]
    for each, have in zip(pieces, (0b01, 0b11, 0b11, 0b11), strict=True):
        assert each is not None
        this.end(1, each, 1.0)
        assert this.have == have


def test_what_came_wrong_is_brought_by_sources_that_have_all_of_it() -> None:
    this = striping(2, 2, 1)
    this.join(2, 0.0, 0b11)
    assert begin(this, 2) == [0, 1]
    for number in (0, 1):
        this.end(2, piece(number), 1.0)
    assert this.from_parts == 20
    assert (this.again(0, 0), this.from_parts) == ({2}, 0)
    assert begin(this, 2, 2.0) == []
    assert begin(this, 1, 2.0) == [0, 1]
    this.end(1, piece(0), 3.0)
    this.lose(1)
    assert begin(this, 2, 4.0) == []
    assert this.useless(2, 5.0) == 3.0
    this.has(2, None)  # it has published it
    assert begin(this, 2, 5.0) == [1]
    assert this.end(2, piece(1), 6.0)


def test_what_a_part_brings_after_it_is_known_to_be_wrong_counts_for_nothing() -> None:
    this = striping(2, 2, 1)
    this.join(2, 0.0, 0b11)
    assert (begin(this, 2), begin(this, 1)) == ([0, 1], [])
    this.join(3, 0.0)
    this.end(2, piece(1), 1.0)
    assert begin(this, 3, 99.0) == []
    this.lose(3)
    this.join(3, 0.0, 0b11)
    this.end(2, piece(0), 1.0)
    this.again(0, 0)
    assert begin(this, 1, 2.0) == [0, 1]
    this.join(4, 2.0, 0b11)
    assert begin(this, 4, 2.0) == []
    assert not this.end(1, piece(0), 3.0)
    assert this.end(1, piece(1), 3.0)
    assert this.late == {}


def test_who_ends_a_piece_that_another_one_brings_may_have_overwritten_it() -> None:
    this = striping(4, 1, 1, 2, 3)
    assert (begin(this, 1), begin(this, 2), begin(this, 3)) == ([0], [1], [2])
    this.end(2, piece(1), 1.0)
    this.end(3, piece(2), 1.0)
    assert begin(this, 2, 1.0) == [3]
    assert begin(this, 3, 10.0) == [0]
    assert this.writing == {1, 2, 3}
    this.end(3, piece(0), 11.0)
    this.lose(1)
    assert (this.writing, this.late) == ({2}, {(0, 0): {1}})
    assert this.end(2, piece(3), 12.0)
    assert this.again(0, 0) == {1, 2, 3}
    assert this.late == {}


# -- any order of events -------------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Sources come, bring, stall, and go in any order; a model counts along."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = list(cut([50, 20, 30], [0, 2], 10))
        self.this = Striping(self.pieces, 3, Random(1))
        self.runs = len(self.pieces) // 2
        self.now = 0.0
        self.there: set[VersionPiece] = set()
        self.flying: dict[int, list[VersionPiece]] = {}
        self.have: dict[int, set[tuple[int, int]]] = {}
        self.whole: set[int] = set()
        self.strict: set[VersionPiece] = set()
        self.sole: dict[tuple[int, int], int] = {}
        self.count = 0

    def runs_of(self, have: int) -> set[tuple[int, int]]:
        """Allocation and offset of runs that are given as bits."""
        first = [each for each in self.pieces if each.replica == 0]
        return {each[1:3] for number, each in enumerate(first) if have >> number & 1}

    @rule(have=st.none() | st.integers(0, 2**10 - 1), place=st.integers(0, 3))
    def join(self, have: int | None, place: int) -> None:
        self.count += 1
        self.this.join(self.count, self.now, have, (place, 4))
        self.flying[self.count] = []
        self.has_now(self.count, have)

    def has_now(self, source: int, have: int | None) -> None:
        self.have[source] = self.runs_of(2**10 - 1 if have is None else have)
        (self.whole.add if have is None else self.whole.discard)(source)
        if have is not None:
            self.sole = {key: sole for key, sole in self.sole.items() if sole != source}

    @rule(data=st.data(), have=st.none() | st.integers(0, 2**10 - 1))
    @precondition(lambda self: self.flying)
    def has(self, data: st.DataObject, have: int | None) -> None:
        source = data.draw(st.sampled_from([*self.flying]))
        self.this.has(source, have)
        self.has_now(source, have)

    @rule(data=st.data())
    @precondition(lambda self: self.flying)
    def begin(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from([*self.flying]))
        self.begun(source)

    def begun(self, source: int) -> VersionPiece | None:
        """Have a source begin, and check what."""
        piece = self.this.begin(source, self.now)
        if piece is not None:
            assert piece not in self.there
            assert piece not in self.flying[source]
            assert piece[1:3] in self.have[source]
            if piece in self.strict:
                assert source in self.whole
                assert self.sole.setdefault(piece[:2], source) == source
            self.flying[source].append(piece)
            assert len(self.flying[source]) <= 3
        return piece

    @rule(data=st.data())
    @precondition(lambda self: any(self.flying.values()))
    def end(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from([source for source, pieces in self.flying.items() if pieces]))
        self.ended(source, data.draw(st.sampled_from(self.flying[source])))

    def ended(self, source: int, piece: VersionPiece) -> None:
        """Have a source bring a piece."""
        self.flying[source].remove(piece)
        new = piece not in self.there and self.counts_of(source, piece)
        self.there |= {piece} if new else set()
        whole = all(each in self.there for each in self.pieces if each[:2] == piece[:2])
        assert self.this.end(source, piece, self.now) == (new and whole)

    @rule(data=st.data())
    @precondition(lambda self: self.flying)
    def lose(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from([*self.flying]))
        self.this.lose(source)
        del self.flying[source], self.have[source]
        self.whole.discard(source)
        self.sole = {key: sole for key, sole in self.sole.items() if sole != source}

    def counts_of(self, source: int, piece: VersionPiece) -> bool:
        """Whether a piece counts that a source brings: of what was wrong, that of the one which brings it again."""
        return piece not in self.strict or self.sole.get(piece[:2]) == source

    @rule(replica=st.sampled_from([0, 2]), allocation=st.integers(0, 2))
    def again(self, replica: int, allocation: int) -> None:
        found = {each for each in self.there if each[:2] == (replica, allocation)}
        if len(found) == sum(each[:2] == (replica, allocation) for each in self.pieces):
            assert self.this.again(replica, allocation)
            self.there -= found
            self.strict |= found
            self.sole.pop((replica, allocation), None)

    @rule(seconds=st.sampled_from([0.1, 1.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def counts(self) -> None:
        assert self.this.nbytes == sum(each.nbytes for each in self.there)
        assert self.this.finished == (len(self.there) == len(self.pieces))
        written = {each for pieces in self.flying.values() for each in pieces}
        first = [each for each in self.pieces if each.replica == 0]
        there = {first[number][1:3] for number in range(len(first)) if self.this.have >> number & 1}
        assert there == {each[1:3] for each in self.there - written if each.replica == 0}

    def teardown(self) -> None:
        """However it went, one source that has all brings what is left once the others are gone."""
        for source in [*self.flying]:
            self.this.lose(source)
        self.flying.clear()
        self.sole.clear()
        self.join(None, 0)
        while (piece := self.begun(self.count)) is not None:
            self.now += 1.0
            self.ended(self.count, piece)
        assert self.this.finished
        assert {*self.there} == {*self.pieces}


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestAnyOrder = pytest.mark.slow(AnyOrder.TestCase)


def rounds(this: Striping, speeds: dict[int, float]) -> Iterator[tuple[int, VersionPiece]]:
    """Have sources of these speeds, pieces a second, bring one piece at a time until all are there."""
    busy: dict[int, tuple[float, VersionPiece]] = {}
    now = 0.0
    while not this.finished:
        for source in speeds.keys() - busy.keys():
            if speeds[source] and (piece := this.begin(source, now)):
                busy[source] = now + 1 / speeds[source], piece
        now, source = min((when, source) for source, (when, _) in busy.items())
        _, piece = busy.pop(source)
        this.end(source, piece, now)
        yield source, piece


@pytest.mark.parametrize("chance", [None, Random(1)])
def test_each_source_brings_as_much_as_it_can(chance: Random | None) -> None:
    this = striping(120, DEPTH, 1, 2, 3, chance=chance)
    brought = [source for source, _ in rounds(this, {1: 1.0, 2: 2.0, 3: 9.0})]
    counts = [brought.count(source) for source in (1, 2, 3)]
    assert counts == [pytest.approx(120 * part / 12, abs=3) for part in (1, 2, 9)]
