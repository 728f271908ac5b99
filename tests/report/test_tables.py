import csv
import io
import json

import pytest

pytest.importorskip("rich")

from steplab.core import Column, Table
from steplab.core.codec import decode
from steplab.core.errors import UserError
from steplab.report.export import to_csv, to_json, to_markdown, to_svg, write_table
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
