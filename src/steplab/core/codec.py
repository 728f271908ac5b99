"""Frozen dataclasses to plain JSON data and back, strictly: an unknown key is an error."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping
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
    return _reader(kind)(data, where)


# Where a value stands; it becomes words only in a message: most of a record is in order.
Place = str | tuple["Place", str | int]
Reader = Callable[[JSON, Place], Any]


def _reader(kind: Any) -> Reader:
    """Return the function that reads values of a type, which is taken apart here and only once.

    A Run is thousands of values of a few types. Types are no keys of a cache: `int | float` equals
    `float | int`, and they do not read the same.
    """
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda data, place: data
    if origin in (Union, types.UnionType):
        return _union_reader(args)
    if origin is Literal:
        return functools.partial(_read_literal, args)
    if origin is tuple:
        count = None if args[-1] is Ellipsis else len(args)
        return functools.partial(_read_tuple, args[0], _reader(args[0]), count)
    if origin is not None and issubclass(origin, Mapping):
        return functools.partial(_read_mapping, _reader(args[1]))
    if dataclasses.is_dataclass(kind):
        return functools.partial(_read_record, kind)
    return functools.partial(_read_plain, kind)


def _read_literal(choices: tuple[Any, ...], data: JSON, place: Place) -> Any:
    if data not in choices:
        raise UserError(
            f"{_words(place)} is {_shown(data)}.", did_you_mean(str(data), map(str, choices))
        )
    return data


def _read_tuple(
    kind: Any, read: Reader, count: int | None, data: JSON, place: Place
) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise UserError(f"{_words(place)} must be a list, not {type(data).__name__}.")
    if count is not None and count != len(data):
        raise UserError(f"{_words(place)} must have {count} items, not {len(data)}.")
    if kind in (float, str) and {kind}.issuperset(map(type, data)):
        return tuple(data)  # nothing to check one by one: most of a Run is samples
    return tuple(read(item, (place, i)) for i, item in enumerate(data))


def _read_mapping(read: Reader, data: JSON, place: Place) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise UserError(f"{_words(place)} must be an object, not {type(data).__name__}.")
    return {key: read(item, (place, key)) for key, item in data.items()}


def _read_record(kind: Any, data: JSON, place: Place) -> Any:
    """Build a dataclass; missing keys take their defaults, unknown keys are refused."""
    if not isinstance(data, dict):
        raise UserError(f"{_words(place)} must be an object, not {type(data).__name__}.")
    readers, required = _fields(kind)
    for key in data:
        if key not in readers:
            text = f"{_words(place)} has an unknown key {_shown(key)}."
            raise UserError(text, did_you_mean(key, readers))
    missing = [name for name in required if name not in data]
    if missing:
        raise UserError(f"{_words(place)} lacks {', '.join(missing)}.")
    return kind(**{key: readers[key](item, (place, key)) for key, item in data.items()})


@functools.cache
def _fields(kind: Any) -> tuple[dict[str, Reader], tuple[str, ...]]:
    """Return the readers of a dataclass's fields by name, and the names without a default."""
    fields = dataclasses.fields(kind)
    hints = type_hints(kind)
    readers = {field.name: _reader(hints[field.name]) for field in fields}
    return readers, tuple(field.name for field in fields if _is_required(field))


def _union_reader(kinds: tuple[Any, ...]) -> Reader:
    choices = [_reader(kind) for kind in kinds if kind is not type(None)]
    return functools.partial(_read_union, type(None) in kinds, choices)


def _read_union(may_be_null: bool, choices: list[Reader], data: JSON, place: Place) -> Any:
    if data is None and may_be_null:
        return None
    for choice in choices[:-1]:
        try:
            return choice(data, place)
        except UserError:
            continue
    return choices[-1](data, place)


def _read_plain(kind: Any, data: JSON, place: Place) -> Any:
    if type(data) is kind and kind is not int:
        return data
    if kind is float and isinstance(data, str) and data in NON_FINITE:
        return NON_FINITE[data]
    if kind in (int, float) and isinstance(data, bool):
        raise UserError(f"{_words(place)} must be a number, not {data!r}.")
    if kind in (int, float) and isinstance(data, int) and data.bit_length() > 64:
        raise UserError(f"{_words(place)} is {_shown(data)}, which is out of range.")
    if kind is float and isinstance(data, int):
        return float(data)
    if not isinstance(data, kind):
        found = type(data).__name__
        raise UserError(f"{_words(place)} must be {kind.__name__}, not {found} ({_shown(data)}).")
    return data


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


def _words(place: Place) -> str:
    if isinstance(place, str):
        return place
    outer, inner = place
    step = f"[{inner}]" if isinstance(inner, int) else f".{shorten(inner, LONGEST)}"
    return f"{_words(outer)}{step}"


def _shown(data: JSON) -> str:
    return shorten(repr(data), LONGEST)
