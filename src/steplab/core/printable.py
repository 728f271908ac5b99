"""Text from files and drivers, made harmless for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return the text with "?" for control characters: a name must not steer the terminal.

    Lines stay lines. Marks that turn the direction of writing are control characters too.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
