"""Registries are packages: a file that assigns the registry's constant is a member.

`steplab.techniques` has TECHNIQUE, `steplab.probes` PROBE, `steplab.cli` COMMAND and so on. Listing
members reads their sources and imports nothing; loading imports one member by its name.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from steplab.core.errors import UserError, did_you_mean


def names(package: str, constant: str) -> list[str]:
    """Return the sorted member names of the registry `package`, without importing any of them.

    A member is a module whose source assigns `constant` at the start of a line, or a folder
    whose `__init__.py` does.
    """
    found = []
    for path in _folder(package).iterdir():
        source = path / "__init__.py" if path.is_dir() else path
        if path.stem == "__init__":  # the package itself may be a member of another registry
            continue
        if source.suffix == ".py" and source.is_file() and _assigns(source, constant):
            found.append(path.stem)
    return sorted(found)


def summary(package: str, name: str) -> str:
    """Return the first line of a member's docstring, without importing it."""
    path = _folder(package) / name
    file = path / "__init__.py" if path.is_dir() else path.with_name(f"{name}.py")
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def load(package: str, name: str, constant: str) -> Any:
    """Return the constant of the member `name`, or raise a UserError that names the nearest."""
    known = names(package, constant)
    if name not in known:
        kind = constant.lower()
        raise UserError(f"There is no {kind} called {name!r}.", did_you_mean(name, known))
    return getattr(importlib.import_module(f"{package}.{name}"), constant)


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not a package")
    return Path(spec.submodule_search_locations[0])


def _assigns(source: Path, constant: str) -> bool:
    with source.open(encoding="utf-8") as lines:
        return any(line.startswith((f"{constant} =", f"{constant}:")) for line in lines)
