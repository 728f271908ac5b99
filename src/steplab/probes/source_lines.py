"""Where something is written in the user's own files: what was set or made before the step ran.

A trace has the lines that ran in a step. A switch that was turned on, an optimizer or a layer was
written elsewhere: in one of the few files of the process that are the user's.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from steplab.trace.lines import frame_line, line_text

MOST_LETTERS = 2**20  # of a file; longer ones are data or generated
ADDING = ("append", "appendleft", "extend", "insert", "add", "update", "setdefault", "put")
MOST_PLACES = 3  # of which one is likely meant; a name that is written more often tells nothing


def written_lines(names: Mapping[str, Collection[str]]) -> dict[str, tuple[str, ...]]:
    """Return for each key the lines that write one of its names, where these are few.

    `name` is written where it is called, given as a keyword, or is a string, as the keys of
    `os.environ` and of parameter groups are; `torch.name` wherever it stands, as a decorator too;
    `name=` where something is assigned or added to it.
    """
    found: dict[str, list[str]] = defaultdict(list)
    sought = {name for several in names.values() for name in several}
    for path in _user_files():
        for name, line, function in sorted(_written(path, sought), key=lambda one: one[1]):
            if name in sought:
                for key in (key for key, several in names.items() if name in several):
                    found[key].append(line_text(path, line, function))
    distinct = {key: tuple(dict.fromkeys(lines)) for key, lines in found.items()}
    return {key: lines for key, lines in distinct.items() if len(lines) <= MOST_PLACES}


def is_written(*names: str) -> bool:
    """Whether a file of the user writes one of these names."""
    return any(name in names for path in _user_files() for name, _, _ in _written(path, names))


def _user_files() -> list[str]:
    """Return the files of imported modules that are the user's, not steplab's own models."""
    named = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    files = (path for path in dict.fromkeys(named) if isinstance(path, str))
    own = str(Path(__file__).parents[1])
    others = (path for path in files if path.endswith(".py") and not path.startswith(own))
    return [path for path in others if frame_line((path, 1, "<module>"))]


def _written(path: str, sought: Collection[str]) -> Iterator[tuple[str, int, str]]:
    """Yield the names in a file with their line and function, if one of those sought is in it.

    Reading a file takes 0.1 ms, parsing it 10: of many files only the few are parsed.
    """
    try:
        with tokenize.open(path) as file:
            text = file.read(MOST_LETTERS + 1)
        if len(text) > MOST_LETTERS or not any(name.rstrip("=") in text for name in sought):
            return
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    waiting: list[tuple[ast.AST, str]] = [(tree, "<module>")]
    while waiting:
        node, function = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        for name in _names(node):
            yield name, getattr(node, "lineno", 0), function
        waiting += [(child, function) for child in ast.iter_child_nodes(node)]


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call):
        yield _last_name(node.func)
        if isinstance(node.func, ast.Attribute) and node.func.attr in ADDING:
            yield f"{_last_name(node.func.value)}="
    elif isinstance(node, ast.keyword):
        yield node.arg or ""
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield f"{_last_name(node.value)}.{node.attr}"
    elif isinstance(getattr(node, "ctx", None), ast.Store):
        target = node.value if isinstance(node, ast.Subscript) else node
        yield f"{_last_name(target)}="


def _last_name(node: ast.AST) -> str:
    """Return "append" of `self.kept.append`."""
    return getattr(node, "attr", "") or getattr(node, "id", "")
