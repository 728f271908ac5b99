"""Elements of HTML and SVG. Every text is escaped, unless it is markup made here."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any


class Html(str):
    """Text that is markup already, and so is not escaped again."""


NOTHING = Html("")
SELF_CLOSING = frozenset({"meta", "rect", "line", "circle", "br"})  # where they hold nothing


def element(tag: str, /, *children: str, **attributes: str | float | None) -> Html:
    """Return `<tag ...>children</tag>`; plain texts among children and attributes are escaped.

    An attribute that is a Python word ends in an underscore (`class_`); other underscores become
    hyphens; None leaves an attribute out.
    """
    words = [tag]
    for key, value in attributes.items():
        if value is not None:
            text = f"{value:.6g}" if isinstance(value, float) else str(value)
            words.append(f'{key.rstrip("_").replace("_", "-")}="{html.escape(text, quote=True)}"')
    opening = f"<{' '.join(words)}"
    if tag in SELF_CLOSING and not children:
        return Html(f"{opening}/>")
    return Html(f"{opening}>{join(children)}</{tag}>")


def join(children: Iterable[str]) -> Html:
    """Return children one after another, each escaped unless it is markup."""
    return Html("".join(c if isinstance(c, Html) else html.escape(c) for c in children))


def data_block(identity: str, value: Any) -> Html:
    """Return JSON for the page's script, in which no character can end the element."""
    text = json.dumps(value, separators=(",", ":"))  # ASCII only: U+2028 and the like are escaped
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json" id="{html.escape(identity)}">{text}</script>')
