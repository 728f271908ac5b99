"""Documents that were damaged on purpose, as hypothesis strategies.

`hostile_json(document)` draws bytes: the document with a few of its parts replaced, removed or
multiplied, and sometimes cut. Every reader is tried with them; so is the fuzzing.
"""

import copy
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis")
from hypothesis import strategies as st

ESCAPES = "\x1b[2J\x9b31m\u202e\r<script>alert(1)</script>|](javascript:1)"
FORMULA = '=HYPERLINK("http://x","y")'
DEEP = 1500  # levels; Python's stack ends near 1,000
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2,
    10**12,
    -(2**63),
    2**64,
    10**400,
    1e308,
    -1e308,
    5e-324,
    float("nan"),
    float("inf"),
    "NaN",
    "-Infinity",
    "",
    "x",
    "cuda",
    "x" * 5000,
    "../../../etc/passwd",
    "/dev/zero",
    "a\0b",
    ESCAPES,
    FORMULA,
    "\ud800",
    [],
    {},
    [[]],
    [1.0],
    ["x"] * 3,
    {"": {}},
    {"x": [1, 2]},
)
FIXTURE = Path(__file__).parent / "fixtures" / "v0_1.zip"


def recorded(name: str) -> Any:
    """A document that steplab has written: a file of the fixture, parsed."""
    with zipfile.ZipFile(FIXTURE) as archive:
        return json.loads(archive.read(name))


def recorded_runs() -> list[Any]:
    """The Runs of the fixture's pack: plain, profiled, of a user's own model."""
    with (
        zipfile.ZipFile(FIXTURE) as archive,
        archive.open("runs.zip") as inner,
        zipfile.ZipFile(inner) as pack,
    ):
        return [json.loads(pack.read(name)) for name in sorted(pack.namelist())]


def hostile_json(document: Any, most: int = 3) -> st.SearchStrategy[bytes]:
    """The document with up to `most` of its parts damaged."""

    @st.composite
    def damaged(draw: st.DrawFn) -> bytes:  # hypothesis prints arguments, and documents are long
        changed = copy.deepcopy(document)
        for _ in range(draw(st.integers(1, most))):
            _damage(draw, changed)
        text = json.dumps(changed).encode()
        kind = draw(st.sampled_from(["whole"] * 12 + ["cut", "deep", "more", "bytes"]))
        if kind == "cut":
            return text[: draw(st.integers(0, len(text)))]
        if kind == "deep":
            return b"[" * DEEP + text + b"]" * DEEP
        if kind == "more":
            return text + draw(st.binary(max_size=5))
        return draw(st.binary(max_size=50)) if kind == "bytes" else text

    return damaged()


def _damage(draw: st.DrawFn, document: Any) -> None:
    """Walk down to a part at random, and replace, remove or multiply it."""
    place, key = document, None
    while isinstance(place, (dict, list)) and place:
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key = draw(st.sampled_from(keys))
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or draw(st.integers(0, 5)) == 0:
            break
        place = inner
    if key is None:
        return
    kind = draw(st.sampled_from(["replace", "replace", "replace", "remove", "copy", "deep"]))
    if kind == "remove":
        del place[key]
    elif kind == "copy" and isinstance(place, list):
        place.extend([copy.deepcopy(place[key])] * draw(st.integers(1, 20)))
    elif kind == "copy":
        place[draw(st.sampled_from(["x", ESCAPES, ""]))] = copy.deepcopy(place[key])
    elif kind == "deep":
        place[key] = json.loads("[" * 150 + "]" * 150)
    else:
        place[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))


def seal(data: bytes) -> bytes:
    """A checkpoint.json with the checksum of its content, whatever that is."""
    try:
        document = json.loads(data)
        content = json.dumps(document["content"], sort_keys=True).encode()
    except (ValueError, KeyError, TypeError, RecursionError):
        return data
    document["crc32"] = zlib.crc32(content)
    return json.dumps(document).encode()
