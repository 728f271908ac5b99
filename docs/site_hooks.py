"""Let the pages of docs/ read well on the site and in the repository alike.

In the repository a page links to `../benchmarks/x.md` or `../examples/own_model.py`. Here the
published numbers are pages of their own, and source files are named instead of linked.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the published tables of benchmarks/: Markdown as pages, text and CSV as files."""
    published = (p for p in (ROOT / "benchmarks").iterdir() if p.suffix in (".md", ".txt", ".csv"))
    for path in sorted(published):
        name = "index.md" if path.name == "README.md" else path.name
        content = path.read_text(encoding="utf-8")
        files.append(File.generated(config, f"benchmarks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: object, config: MkDocsConfig, files: Files) -> str:
    """Turn links that leave docs/ into links of the site, or into the name of the file."""

    def link(found: re.Match[str]) -> str:
        text, path, anchor = found[1], found[2], found[3] or ""
        name = path.replace("benchmarks/README.md", "benchmarks/index.md")
        if files.get_file_from_path(name):
            return f"[{text}]({name}{anchor})"
        return f"{text} (`{path}`)"

    return OUTSIDE.sub(link, markdown)
