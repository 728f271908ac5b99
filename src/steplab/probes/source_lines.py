"""Where something is written in the user's own files: what was set or made before the step ran.

A trace has the lines that ran in a step. A switch that was turned on, an optimizer or a layer was
written elsewhere: in one of the few files of the process that are the user's.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from steplab.trace.lines import frame_line, line_text

MOST_FILES = 200
MOST_LETTERS = 2**20  # of a file; longer ones are data or generated
MOST_PLACES = 3  # of which one is likely meant; a name that is written more often tells nothing


def written_lines(names: Mapping[str, Collection[str]]) -> dict[str, tuple[str, ...]]:
    """Return for each key the lines that write one of its names, where these are few.

    A name is written where it is called, assigned as an attribute, or is a string, as the keys of
    `os.environ` and of parameter groups are.
    """
    found: dict[str, list[str]] = defaultdict(list)
    sought = {name for several in names.values() for name in several}
    for path in _user_files():
        for name, line, function in _written(path):
            if name in sought:
                for key in (key for key, several in names.items() if name in several):
                    found[key].append(line_text(path, line, function))
    distinct = {key: tuple(dict.fromkeys(lines)) for key, lines in found.items()}
    return {key: lines for key, lines in distinct.items() if len(lines) <= MOST_PLACES}


def _user_files() -> list[str]:
    """Return the files of imported modules that are the user's, the main script among them."""
    named = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    files = (path for path in dict.fromkeys(named) if isinstance(path, str))
    theirs = [p for p in files if p.endswith(".py") and frame_line((p, 1, "<module>"))]
    return theirs[:MOST_FILES]


def _written(path: str) -> Iterator[tuple[str, int, str]]:
    """Yield the names in a file with their line and function."""
    text = "".join(linecache.getlines(path))
    try:
        tree = ast.parse(text if len(text) <= MOST_LETTERS else "")
    except (SyntaxError, ValueError, RecursionError):
        return
    waiting: list[tuple[ast.AST, str]] = [(tree, "<module>")]
    while waiting:
        node, function = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        name = _name(node)
        if name:
            yield name, getattr(node, "lineno", 0), function
        waiting += [(child, function) for child in ast.iter_child_nodes(node)]


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        called = node.func
        return getattr(called, "attr", "") or getattr(called, "id", "")
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
