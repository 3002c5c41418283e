"""Tables: aligned, folded in one column only, and never broken by a cell."""

from __future__ import annotations

from cubroker.cli.table import Column, render

POOLS = (Column("POOL", fold=True), Column("SIZE", right=True), Column("OWNER"))


def test_columns_are_aligned_and_lines_end_where_their_text_does() -> None:
    rows = [("llama@2", "14.9 GiB", "root"), ("bert@1", "9 B", "a-long-name")]
    assert list(render(POOLS, rows)) == [
        "POOL         SIZE  OWNER",
        "llama@2  14.9 GiB  root",
        "bert@1        9 B  a-long-name",
    ]


def test_a_narrow_terminal_folds_one_column_and_loses_nothing() -> None:
    name = "models/" + "abcdefghij" * 5
    lines = list(render(POOLS, [(name, "14.9 GiB", "root")], limit=50))
    assert max(map(len, lines)) <= 50
    assert lines[1].endswith("14.9 GiB  root")
    assert "".join(line.split()[0] for line in lines[1:]) == name


def test_nothing_is_folded_where_there_is_room_or_no_terminal() -> None:
    name = "n" * 200
    for limit in (None, 300):
        assert list(render(POOLS, [(name, "9 B", "root")], limit))[1] == f"{name}   9 B  root"


def test_a_column_keeps_a_readable_width_in_the_narrowest_terminal() -> None:
    lines = list(render(POOLS, [("n" * 40, "9 B", "root")], limit=5))
    assert [len(line.split()[0]) for line in lines[1:]] == [16, 16, 8]


def test_a_cell_cannot_break_the_table() -> None:
    lines = list(render(POOLS, [("evil\nname\x1b[0m", "9 B", "root")]))
    assert len(lines) == 2
    assert lines[1].startswith(r"evil\nname\x1b[0m")


def test_an_empty_cell_keeps_its_place() -> None:
    assert list(render(POOLS, [("", "9 B", "root")]))[1] == "       9 B  root"
