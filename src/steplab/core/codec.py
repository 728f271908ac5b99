"""Frozen dataclasses to plain JSON data and back, strictly: an unknown key is an error."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from steplab.core.errors import UserError, did_you_mean
from steplab.core.input_file import shorten

JSON = Any
LONGEST = 60  # letters of a key or a value that a message repeats
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(value: Any) -> JSON:
    """Turn a record into dicts, lists, strings and numbers that strict JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def decode(kind: Any, data: JSON, where: str = "record") -> Any:
    """Build a value of type `kind` from JSON data; `where` names the place in error messages."""
    if kind is Any:
        return data
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _decode_union(args, data, where)
    if origin is Literal:
        if data not in args:
            raise UserError(f"{where} is {_shown(data)}.", did_you_mean(str(data), map(str, args)))
        return data
    if origin is tuple:
        items = _items(data, where)
        if args[-1] is not Ellipsis and len(args) != len(items):
            raise UserError(f"{where} must have {len(args)} items, not {len(items)}.")
        if args[0] in (float, str) and {args[0]}.issuperset(map(type, items)):
            return tuple(items)  # nothing to check one by one: most of a Run is samples
        return tuple(decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(items))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(data, dict):
            raise UserError(f"{where} must be an object, not {type(data).__name__}.")
        return {key: decode(args[1], item, _inside(where, key)) for key, item in data.items()}
    if dataclasses.is_dataclass(kind):
        return decode_record(kind, data, where)
    return _decode_plain(kind, data, where)


def decode_record(kind: Any, data: JSON, where: str) -> Any:
    """Build the dataclass `kind`; missing keys take their defaults, unknown keys are refused."""
    if not isinstance(data, dict):
        raise UserError(f"{where} must be an object, not {type(data).__name__}.")
    hints = type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key in data:
        if key not in fields:
            raise UserError(f"{where} has an unknown key {_shown(key)}.", did_you_mean(key, fields))
    missing = [name for name, f in fields.items() if name not in data and _is_required(f)]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}.")
    return kind(
        **{key: decode(hints[key], item, _inside(where, key)) for key, item in data.items()}
    )


def read_word(kind: Any, word: str, where: str) -> Any:
    """Read a word of a command line as a value of `kind`, or raise a UserError about `where`."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if word not in choices:
            raise UserError(f"{where} cannot be {_shown(word)}.", did_you_mean(word, choices))
        return word
    if kind is bool:
        if word.lower() not in ("true", "false"):
            raise UserError(f"{where} is true or false, not {_shown(word)}.")
        return word.lower() == "true"
    try:
        return kind(word)
    except ValueError:
        raise UserError(f"{where} needs {kind.__name__}, not {_shown(word)}.") from None


@functools.cache
def type_hints(kind: Any) -> dict[str, Any]:
    """Return the resolved annotations of a dataclass (cached: resolving costs about 50 us)."""
    return get_type_hints(kind)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _items(data: JSON, where: str) -> list[Any]:
    if not isinstance(data, list):
        raise UserError(f"{where} must be a list, not {type(data).__name__}.")
    return data


def _inside(where: str, key: str) -> str:
    return f"{where}.{shorten(key, LONGEST)}"


def _shown(data: JSON) -> str:
    return shorten(repr(data), LONGEST)


def _decode_union(args: tuple[Any, ...], data: JSON, where: str) -> Any:
    if data is None and type(None) in args:
        return None
    choices = [arg for arg in args if arg is not type(None)]
    for choice in choices[:-1]:
        try:
            return decode(choice, data, where)
        except UserError:
            continue
    return decode(choices[-1], data, where)


def _decode_plain(kind: Any, data: JSON, where: str) -> Any:
    if kind is float and isinstance(data, str) and data in NON_FINITE:
        return NON_FINITE[data]
    if kind in (int, float) and isinstance(data, bool):
        raise UserError(f"{where} must be a number, not {data!r}.")
    if kind in (int, float) and isinstance(data, int) and data.bit_length() > 64:
        raise UserError(f"{where} is {_shown(data)}, which is out of range.")
    if kind is float and isinstance(data, int):
        return float(data)
    if not isinstance(data, kind):
        found = type(data).__name__
        raise UserError(f"{where} must be {kind.__name__}, not {found} ({_shown(data)}).")
    return data
