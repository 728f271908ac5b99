"""A shelf is a folder of equals: a file that defines the shelf's constant is a member.

Listing reads file names only and imports nothing; loading imports one member by its name.
"""

from __future__ import annotations

import importlib
import importlib.util
import pydoc
from pathlib import Path
from typing import Any

from steplab.core.errors import UserError, did_you_mean


def names(package: str, constant: str) -> list[str]:
    """Return the sorted member names of the shelf `package`, without importing any of them.

    A member is a module whose source assigns `constant` at the start of a line, or a folder
    whose `__init__.py` does.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not a package")
    found = []
    for path in Path(spec.submodule_search_locations[0]).iterdir():
        source = path / "__init__.py" if path.is_dir() else path
        if path.stem == "__init__":  # the shelf itself, which may lie on another one
            continue
        if source.suffix == ".py" and source.is_file() and _assigns(source, constant):
            found.append(path.stem)
    return sorted(found)


def summary(package: str, name: str) -> str:
    """Return the first line of a member's docstring, without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, package
    path = Path(spec.submodule_search_locations[0]) / name
    file = path / "__init__.py" if path.is_dir() else path.with_name(f"{name}.py")
    return pydoc.synopsis(str(file)) or ""


def load(package: str, name: str, constant: str) -> Any:
    """Return the member `name` of a shelf, or raise a UserError that names the nearest one."""
    known = names(package, constant)
    if name not in known:
        kind = constant.lower()
        raise UserError(f"There is no {kind} called {name!r}.", did_you_mean(name, known))
    return getattr(importlib.import_module(f"{package}.{name}"), constant)


def _assigns(source: Path, constant: str) -> bool:
    with source.open(encoding="utf-8") as lines:
        return any(line.startswith((f"{constant} =", f"{constant}:")) for line in lines)
