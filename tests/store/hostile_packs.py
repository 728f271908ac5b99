"""Packs that are damaged or meant to harm, as files, for tests and fuzzing."""

import io
import struct
import zipfile
from collections.abc import Callable

from steplab.core import Run, run_to_json
from tests.store.test_store import make_run


def pack(files: dict[str, bytes | str]) -> bytes:
    """A zip file with these entries."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def good_pack(run: Run | None = None, **artifacts: bytes) -> bytes:
    """A pack of one Run; artifacts by their stem are .json files."""
    run = run or make_run()
    files = {f"{run.id}/{name}.json": content for name, content in artifacts.items()}
    return pack({f"{run.id}/run.json": run_to_json(run), **files})


def encrypted() -> bytes:
    """A pack whose entries say that they are encrypted."""
    data = bytearray(good_pack())
    for signature, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        at = data.index(signature) + offset
        data[at] |= 1
    return bytes(data)


def unknown_method() -> bytes:
    """A pack that is compressed in a way nobody knows."""
    data = bytearray(good_pack())
    for signature, offset in ((b"PK\3\4", 8), (b"PK\1\2", 10)):
        at = data.index(signature) + offset
        data[at : at + 2] = struct.pack("<H", 77)
    return bytes(data)


def broken_stream() -> bytes:
    """A pack whose compressed bytes are damaged."""
    data = bytearray(good_pack())
    at = data.index(b"run.json") + 12
    data[at : at + 20] = bytes(20)
    return bytes(data)


def wrong_checksum() -> bytes:
    """A pack whose content is not what its checksum says."""
    data = bytearray(good_pack(trace=b"{}"))
    at = data.rindex(b"PK\1\2") + 16
    data[at] ^= 1
    return bytes(data)


def lying_size() -> bytes:
    """A pack that says its trace is a byte long."""
    data = bytearray(good_pack(trace=b"[" * 5000))
    at = data.rindex(b"PK\1\2") + 24
    data[at : at + 4] = struct.pack("<I", 1)
    return bytes(data)


def huge_index() -> bytes:
    """A pack whose list of files has no end."""
    entry = b"PK\1\2" + bytes(42)
    count = (17 << 20) // len(entry)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0, 0, count * len(entry), 0, 0)
    return entry * count + end


def deep_run() -> bytes:
    """A pack whose run.json nests a hundred thousand levels deep."""
    return pack({"x/run.json": "[" * 100_000})


def escapes() -> bytes:
    """A pack with a name that steers a terminal."""
    return pack({"a\x1b[2Jb/run.json": "{}"})


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "encrypted": (encrypted, "is encrypted"),
    "unknown method": (unknown_method, "is not a pack of Runs, or it is damaged"),
    "broken stream": (broken_stream, "is not a pack of Runs, or it is damaged"),
    "wrong checksum": (wrong_checksum, "is not a pack of Runs, or it is damaged"),
    "lying size": (lying_size, "is not a pack of Runs, or it is damaged"),
    "huge index": (huge_index, "too many files"),
    "deep run": (deep_run, "nests deeper"),
    "escapes": (escapes, r"a\\x1b\[2Jb"),
    "empty": (lambda: b"", "is not a pack of Runs, or it is damaged"),
    "too short": (lambda: b"PK\5\6", "is not a pack of Runs, or it is damaged"),
    "a long name": (lambda: pack({f"{'x' * 5000}/run.json": "{}"}), "does not belong"),
    "a hidden name": (lambda: pack({".draft-x/run.json": "{}"}), "does not belong"),
    "no record": (lambda: pack({"x/trace.json": "{}"}), "has no run.json"),
    "another id": (lambda: pack({"x/run.json": run_to_json(make_run())}), "holds the Run"),
}
