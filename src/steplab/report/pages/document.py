"""The frame of every page: title, style, sections, script, and the file it is written to."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from steplab.report.pages.colours import colour_rules
from steplab.report.pages.markup import NOTHING, Html, element, join
from steplab.store.atomic import disk_errors, write_file


@dataclass(frozen=True)
class Section:
    """A heading with what stands under it; `key` is its anchor. Without content it is left out."""

    key: str
    title: str
    content: Html
    note: str = ""


def write_page(path: Path, title: str, head: Html, sections: Sequence[Section], foot: Html) -> None:
    """Write a page that needs nothing but itself."""
    shown = [section for section in sections if section.content]
    links = [element("a", s.title, href=f"#{s.key}") for s in shown]
    body = join(
        [
            element("header", element("h1", title), head),
            element("nav", *links) if len(links) > 1 else NOTHING,
            element("main", *map(_section, shown)),
            element("footer", foot),
        ]
    )
    # A name may hold half of a surrogate pair, which UTF-8 cannot write.
    data = _document(title, body).encode("utf-8", errors="replace")
    with disk_errors(path.parent, "--out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data)


def _section(section: Section) -> Html:
    note = element("p", section.note, class_="note") if section.note else NOTHING
    heading = element("h2", section.title)
    return element("section", heading, note, section.content, id=section.key)


def _document(title: str, body: Html) -> str:
    own = files("steplab.report.pages")
    style = own.joinpath("style.css").read_text(encoding="utf-8") + colour_rules()
    script = own.joinpath("script.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # The browser itself is told to load nothing and to run this one script only.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{title} - steplab"),
        element("style", Html(style)),
    )
    tip = element("div", id="tip", hidden="")
    page = element("body", body, tip, element("script", Html(script)))
    return f"<!doctype html>\n{element('html', head, page, lang='en')}\n"
