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
    entries = _folder(package).iterdir()
    found = {path.stem for path in entries if path.is_dir() or path.suffix == ".py"}
    return sorted(name for name in found if _is_member(package, name, constant))


def summary(package: str, name: str) -> str:
    """Return the first line of a member's docstring, without importing it."""
    docstring = ast.get_docstring(ast.parse(_source(package, name).read_text("utf-8"))) or ""
    return docstring.partition("\n")[0]


def load(package: str, name: str, constant: str) -> Any:
    """Return the constant of the member `name`, or raise a UserError that names the nearest."""
    if not (name.isidentifier() and _is_member(package, name, constant)):
        known = did_you_mean(name, names(package, constant))
        raise UserError(f"There is no {constant.lower()} called {name!r}.", known)
    return getattr(importlib.import_module(f"{package}.{name}"), constant)


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not a package")
    return Path(spec.submodule_search_locations[0])


def _source(package: str, name: str) -> Path:
    path = _folder(package) / name
    return path / "__init__.py" if path.is_dir() else path.with_name(f"{name}.py")


def _is_member(package: str, name: str, constant: str) -> bool:
    source = _source(package, name)
    # The package itself may be a member of another registry.
    if name == "__init__" or not source.is_file():
        return False
    text = f"\n{source.read_text('utf-8')}"
    return f"\n{constant} =" in text or f"\n{constant}:" in text
