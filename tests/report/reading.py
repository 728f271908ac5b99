"""Pages as a browser reads them."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "br", "img"}


class Page(HTMLParser):
    """Elements, attributes and texts of a page; fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self):
        return "".join(data for tag, data in self.texts if tag not in ("style", "script"))

    def ids(self):
        return [attributes["id"] for attributes in self.all("section")]
