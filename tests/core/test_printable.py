import io
import sys

import pytest

from steplab.core.printable import printable, printable_output, raw_stream

HARMLESS = ["plain", "two\nlines\tand a tab", "µs, 20 ms ± 1", "データ　1", "a\u00a0b", "🙂"]


@pytest.mark.parametrize("text", HARMLESS)
def test_text_stays_as_it_is(text):
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", "?[2J"),
        ("\x9b2J", "?2J"),
        ("safe\rEVIL", "safe?EVIL"),
        ("a\u202eb\u2066", "a?b?"),
        ("\x00\x07\x08\x7f", "????"),
        ("\udcff\u2028", "??"),
    ],
)
def test_what_steers_a_terminal_is_replaced(text, shown):
    assert printable(text) == shown


def test_everything_that_is_printed_goes_through_it(capsys):
    raw = sys.stdout
    with printable_output():
        print("\x1b]0;title\x07")
        print("\x1b[31m", file=sys.stderr)
        assert raw_stream(sys.stdout) is raw
        assert sys.stdout.isatty() == raw.isatty()
    assert sys.stdout is raw and raw_stream(raw) is raw
    assert capsys.readouterr() == ("?]0;title?\n", "?[31m\n")


def test_the_streams_are_restored_after_an_error():
    before = sys.stdout
    with pytest.raises(ZeroDivisionError), printable_output():
        _ = 1 / 0
    assert sys.stdout is before
    assert raw_stream(io.StringIO()).getvalue() == ""
