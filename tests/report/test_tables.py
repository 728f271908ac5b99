import contextlib
import csv
import io
import json
import re

import pytest

pytest.importorskip("rich")

from steplab.core import Column, Table
from steplab.core.codec import decode
from steplab.core.errors import UserError
from steplab.report.export import csv_line, to_csv, to_json, to_markdown, to_svg, write_table
from steplab.report.terminal import print_table

TABLE = Table(
    "a title",
    (Column("name"), Column("time", "ms"), Column("done")),
    (("a|b", 1234.5678, True), ("[red]x", None, False), ("c", 0.00001234, True)),
    "a note [with brackets]",
)


def test_terminal_shows_every_character():
    out = io.StringIO()
    print_table(TABLE, out)
    text = out.getvalue()
    for part in ("a title", "time [ms]", "1,235", "unknown", "[red]x", "1.23e-05", "yes"):
        assert part in text
    assert "a note [with brackets]" in text


class Terminal(io.StringIO):
    """A terminal; its width is that of the variable COLUMNS."""

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch, width, show):
    """Return what `show` prints on a terminal of this width, without colors."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with contextlib.redirect_stdout(out):
        show()
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())


def drawn(table, monkeypatch, width):
    return on_terminal(monkeypatch, width, lambda: print_table(table))


def test_a_narrow_terminal_folds_texts_and_drops_columns_but_no_results(monkeypatch):
    """A list of Runs in 80 columns showed no times; recipes that begin alike were cut alike."""
    same = "precision=bf16-weights,optimizer=one-pass,compile=blocks"
    table = Table(
        "Runs",
        (
            Column("run", whole=True),
            Column("device", dispensable=2),
            Column("mode", dispensable=1),
            Column("recipe"),
            Column("step median", "ms"),
            Column("tokens/s"),
        ),
        (("r" * 40, "cuda", "full", f"{same}Q", 1111.0, 3333),
         ("s" * 40, "cuda", "full", f"{same}Z", 2222.0, 4444)),
    )  # fmt: skip
    for width in (80, 100):
        text = drawn(table, monkeypatch, width)
        assert max(map(len, text.splitlines())) <= width
        assert all(number in text for number in ("r" * 40, "1,111", "2,222", "3,333", "4,444"))
        assert ("no room for: device" in text) == (width == 80) and "…" not in text
        # The ends of the recipes, in which they differ, are there.
        assert "Q" in text and "Z" in text
    assert "no room" not in drawn(table, monkeypatch, 200)


def test_columns_that_tell_nothing_apart_are_the_first_to_go(monkeypatch):
    columns = (
        Column("recipe", dispensable=9),
        Column("batch", dispensable=1),
        Column("peak", "GiB", dispensable=2),
        Column("step median", "ms"),
    )
    rows = (("optimizer=fused", 8, 1.5, 2.5), ("optimizer=plain", 8, 1.5, 3.5))
    text = drawn(Table("steps", columns, rows), monkeypatch, 26)
    assert "no room for: batch (8)," in text and "peak (1.500 GiB)" in text.replace("\n", " ")
    assert "fused" in text and "plain" in text


def test_recipes_are_folded_between_their_parts(monkeypatch):
    recipe = "compile=blocks,impl.attention=math,optimizer.lr=0.5,prefetch=2"
    table = Table("steps", (Column("recipe"), Column("step", "ms")), ((recipe, 1.0),))
    text = drawn(table, monkeypatch, 26)
    lines = ["compile=blocks,", "impl.attention=", "math,", "optimizer.lr=0.5,", "prefetch=2"]
    assert [line.split()[0] for line in text.splitlines()[-5:]] == lines


def test_headings_are_folded_before_what_people_read_in_one_piece(monkeypatch):
    titles = ("step median", "peak memory", "data wait", "samples a second")
    columns = (Column("recipe"), *(Column(title, "unit") for title in titles))
    table = Table("steps", columns, (("optimizer=foreach", 1.0, 2.0, 3.0, 4.0),))
    text = drawn(table, monkeypatch, 60)
    assert "optimizer=foreach" in text and "second [unit]" not in text
    assert max(map(len, text.splitlines())) <= 60


def test_texts_are_folded_between_words_where_there_is_room_for_words(monkeypatch):
    recipe = "bf16, compile=blocks, prefetch.workers=2"
    table = Table("steps", (Column("recipe"), Column("reason")), ((recipe, "no gain " * 9),))
    text = drawn(table, monkeypatch, 40)
    assert all(word in text for word in recipe.split())


def test_numbers_stay_whole_where_no_room_is_enough(monkeypatch):
    columns = tuple(Column(f"reading {i}", "GiB") for i in range(12))
    numbers = tuple(1234.0 + i for i in range(12))
    table = Table("readings", columns, (numbers,), "a note of many words " * 8)
    text = drawn(table, monkeypatch, 60)
    assert all(f"{number:,.0f}" in text for number in numbers)
    assert all(len(line) <= 60 for line in text.splitlines() if "words" in line)


def test_csv_keeps_full_precision():
    rows = list(csv.reader(io.StringIO(to_csv(TABLE))))
    assert rows[0] == ["name", "time [ms]", "done"]
    assert rows[1] == ["a|b", "1234.5678", "True"] and rows[2][1] == ""


def test_markdown_escapes_pipes():
    lines = to_markdown(TABLE).splitlines()
    assert lines[2] == "| name | time [ms] | done |" and lines[3] == "| --- | ---: | --- |"
    assert lines[4].startswith("| a\\|b | 1,235 |")


def test_json_is_the_record():
    assert decode(Table, json.loads(to_json(TABLE))) == TABLE


def test_svg_is_self_contained_and_escaped():
    from xml.etree import ElementTree

    text = to_svg(TABLE)
    ElementTree.fromstring(text)
    assert "a&#160;title" in text and "[red]x" in text and "@font-face" not in text


def test_files(tmp_path):
    write_table(TABLE, tmp_path / "new" / "t.csv")
    assert (tmp_path / "new" / "t.csv").read_text() == to_csv(TABLE)
    with pytest.raises(UserError, match="suffix"):
        write_table(TABLE, tmp_path / "t.xls")


def test_a_name_does_not_steer_the_terminal():
    out = io.StringIO()
    print_table(Table("\x1b[2Jtitle", (Column("name"),), (("a\x1b]0;b\x07\u202ec",),)), out)
    assert "a?]0;b??c" in out.getvalue() and "\x1b[2J" not in out.getvalue()


EVIL = "\x1b[2J\u202e<script>alert(1)</script>|![x](http://x)\nnext"
NASTY = Table(
    EVIL,
    (Column(EVIL), Column("n")),
    ((EVIL, 1.5), ('=HYPERLINK("x")', -2), ("+cmd|' /C calc'!A0", None), ("@SUM(A1)", True)),
    EVIL,
)


def test_markdown_from_hostile_names_is_text():
    text = to_markdown(NASTY)
    assert "\x1b" not in text and "\u202e" not in text and "<script" not in text
    assert "![" not in text and "](" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(NASTY.rows), "no cell ends its row"


def test_csv_from_hostile_names_is_no_formula_and_numbers_stay_numbers():
    rows = list(csv.reader(io.StringIO(to_csv(NASTY))))
    assert [row[0][0] for row in rows[2:]] == ["'", "'", "'"]
    assert [row[1] for row in rows[1:]] == ["1.5", "-2", "", "True"]
    assert "\x1b" not in to_csv(NASTY)


@pytest.mark.parametrize("text", ["-", "-5 %", "+1.2e-05", "-1,234.5 ms", "3 - 2", "a=b", ""])
def test_csv_leaves_signs_and_numbers_alone(text):
    (row,) = csv.reader(io.StringIO(csv_line([text])))
    assert row == [text]


@pytest.mark.parametrize("text", ["=1", "-x", "+cmd", "@a", "\t=1", "-1+cmd|x", "--flag"])
def test_csv_marks_what_a_spreadsheet_would_compute(text):
    (row,) = csv.reader(io.StringIO(csv_line([text])))
    assert row == [f"'{text}"]


def test_the_picture_and_the_terminal_show_no_escapes():
    out = io.StringIO()
    print_table(NASTY, out)
    assert "\x1b[2J" not in out.getvalue() and "\u202e" not in out.getvalue()
    assert "<script" not in to_svg(NASTY) and "\x1b" not in to_svg(NASTY)


def test_rows_must_fit_their_columns():
    with pytest.raises(UserError, match="has 1 cells for 2 columns"):
        Table("t", (Column("a"), Column("b")), (("x",),))


def test_digits_without_end_are_cut():
    table = Table("t", (Column("a", digits=10**9),), ((1.5,),))
    assert "1.5" in to_markdown(table)
