"""Every reader of steplab: an honest input, the files of it that are damaged, who opens it."""

from __future__ import annotations

import gzip
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.damage import Layer

MEMORY = "256MiB"  # what every command is allowed to take for one file
Files = dict[str, bytes]


@dataclass(frozen=True)
class Reader:
    """`make` fills an empty folder, in which the `commands` are run as a user would.

    A command is a command line, or one of the words of `sandbox.OPENERS` where a reader is reached
    only after minutes of other work. `finish` is done to the files after the damage.
    """

    name: str
    make: Callable[[Path], None]
    commands: tuple[str, ...]
    layers: Mapping[str, Layer | None]  # the files that are damaged, and their trees
    finish: Callable[[Files], Files] = lambda files: files

    def honest(self, folder: Path) -> Files:
        """Return the files of an honest input, by name; `folder` is empty."""
        self.make(folder)
        found = sorted(path for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.read_bytes() for path in found}


# --- layers


def _dumps(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def _rows(tree: Any) -> bytes:
    return "\n".join(",".join(str(cell) for cell in row) for row in tree).encode("utf-8", "replace")


def _cells(data: bytes) -> Any:
    return [line.split(",") for line in data.decode().splitlines()]


def _read_sealed(data: bytes) -> Any:
    return json.loads(data)["content"]


def _write_sealed(tree: Any) -> bytes:
    """Compute the checksum anew, as somebody would who changes a checkpoint on purpose."""
    from steplab.core.upgrade import VERSION

    crc32 = zlib.crc32(json.dumps(tree, sort_keys=True).encode())
    return _dumps({"steplab_checkpoint": VERSION, "crc32": crc32, "content": tree})


def _read_header(data: bytes) -> Any:
    """Return the header of a safetensors file, with the tensors' bytes beside it."""
    (size,) = struct.unpack("<Q", data[:8])
    return [json.loads(data[8 : 8 + size]), data[8 + size :].decode("latin-1")]


def _write_header(tree: Any) -> bytes:
    header = json.dumps(tree[0]).encode()
    return struct.pack("<Q", len(header)) + header + tree[1].encode("latin-1", "replace")


def _read_zip(data: bytes) -> Any:
    """Return the names of an archive with what is in them; documents as trees."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [
            [name, json.loads(archive.read(name)) if name.endswith("run.json") else "text"]
            for name in archive.namelist()
        ]


def _write_zip(tree: Any) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in tree:
            text = content if isinstance(content, str) else json.dumps(content)
            archive.writestr(str(name), text.encode("utf-8", "replace"))
    return out.getvalue()


def _read_npy(data: bytes) -> Any:
    import ast

    (size,) = struct.unpack("<H", data[8:10])
    header = ast.literal_eval(data[10 : 10 + size].decode())
    return [{**header, "shape": list(header["shape"])}, data[10 + size :].decode("latin-1")]


def _write_npy(tree: Any) -> bytes:
    header = dict(tree[0])
    if isinstance(header.get("shape"), list):
        header["shape"] = tuple(header["shape"])
    text = repr(header).encode("latin-1", "replace") + b"\n"
    if len(text) >= 2**16:
        raise ValueError("a header of version 1 has two bytes for its length")
    start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text
    return start + tree[1].encode("latin-1", "replace")


def _reseal(files: Files) -> Files:
    """Write the sizes and checksums of the damaged tensor files into checkpoint.json."""
    content = _read_sealed(files[f"{STEP}/checkpoint.json"])
    for name in content["files"]:
        data = files[f"{STEP}/{name}"]
        content["files"][name] = {"size": len(data), "crc32": zlib.crc32(data)}
    return {**files, f"{STEP}/checkpoint.json": _write_sealed(content)}


JSON = Layer(json.loads, _dumps)
GZIP = Layer(
    lambda data: json.loads(gzip.decompress(data)), lambda tree: gzip.compress(_dumps(tree), 1)
)
LINES = Layer(
    lambda data: [json.loads(line) for line in data.splitlines()],
    lambda tree: b"\n".join(map(_dumps, tree)),
)
CSV = Layer(_cells, _rows)
WORDS = Layer(
    lambda data: data.decode().split(),
    lambda tree: "\n".join(str(word) for word in tree).encode("utf-8", "replace"),
)
SEALED = Layer(_read_sealed, _write_sealed)
HEADER = Layer(_read_header, _write_header)
ZIP = Layer(_read_zip, _write_zip)
NPY = Layer(_read_npy, _write_npy)


# --- honest inputs


def _trace_events() -> list[dict[str, Any]]:
    from tests.trace.traces import call, copy, kernel, launched, memory, op, python, range_

    events, two = [], ["float", "float"]
    for step in range(2):
        at = 100_000 * step
        events += [
            range_(f"ProfilerStep#{step}", at, 90_000),
            range_("forward", at + 1_000, 30_000),
            python("model.py(12): forward", at + 1_500, 20_000),
            op("aten::mm", at + 2_000, 5_000, shapes=[[8, 64], [64, 32]], dtypes=two,
               strides=[[64, 1], [32, 1]], values=["", ""], sequence=step + 1),
            *launched("gemm_128x64", at + 3_000, at + 4_000, at + 9_000, 9_000, 10 * step + 1),
            range_("backward", at + 40_000, 30_000),
            op("aten::add", at + 42_000, 4_000, shapes=[[8, 32], [8, 32]], dtypes=two),
            *launched("vector_add", at + 43_000, at + 44_000, at + 50_000, 3_000, 10 * step + 2),
            copy("Memcpy HtoD (Pageable -> Device)", at + 60_000, 2_000, 10 * step + 3, 4_096),
            call("cudaStreamSynchronize", at + 70_000, 5_000, 10 * step + 4),
            kernel("without_a_launch", at + 80_000, 1_000, 10 * step + 5),
            memory(at + 5_000, 1_024, address=step + 1, allocated=2_048),
        ]  # fmt: skip
    return events


def _make_trace(folder: Path) -> None:
    from tests.trace.traces import write_trace

    card = {"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150 << 30, "numSms": 132}
    card |= {"computeMajor": 9, "computeMinor": 0}
    write_trace(folder / "trace.json", _trace_events(), properties={"deviceProperties": [card]})


def _make_gz(folder: Path) -> None:
    from tests.trace.traces import write_trace

    write_trace(folder / "trace.json.gz", _trace_events())


def _make_store(folder: Path) -> Any:
    from steplab.store import Store
    from tests.compare.sides import run_of

    store = Store(folder / "store")
    for number, ms in enumerate((3.0, 4.0)):
        run = run_of((ms, ms + 0.1) * 6, recipe={"optimizer": {"kind": "fused"}} if number else {})
        store.save(_with_id(run, f"20260101-00000{number}-000000-gpt-tiny-00000{number}"))
    return store


def _with_id(run: Any, run_id: str) -> Any:
    from dataclasses import replace

    return replace(run, id=run_id)


RUN = "store/runs/20260101-000001-000000-gpt-tiny-000001/run.json"


def _make_pack(folder: Path) -> None:
    import shutil

    from steplab.store import pack_runs

    store = _make_store(folder)
    pack_runs(store, store.ids(), folder / "pack.zip")
    shutil.rmtree(store.root)


def _make_ladder(folder: Path) -> None:
    import torch

    from steplab.core import Recipe, RunSpec
    from steplab.core.ladder import Check, Ladder, Rung
    from steplab.tune.folder import LadderFolder
    from steplab.verify.numerics import NumericsSnapshot, save_snapshot
    from steplab.verify.shapes import GateShape
    from tests.compare.sides import ENVIRONMENT

    spec = RunSpec("gpt", {"width": 32, "context": 16}, "tiny", batch=2)
    faster = Recipe({"optimizer": {"kind": "fused"}})
    rung = Rung("optimizer", {"kind": "fused"}, faster, spec.recipe, "kept", 0.5, 0.2, "optimizer",
                checks=(Check("loss", True, "equal"),), seconds=3.0)  # fmt: skip
    ladder = Ladder("ladder", spec, ENVIRONMENT, "time", "2026-01-01", (rung,), winner=faster)
    place = LadderFolder(folder / "ladder")
    place.save(ladder)
    place.save_shapes([GateShape("own", "", spec)])
    groups = {"loss": {"step 0": torch.ones((), dtype=torch.float64)}}
    save_snapshot(
        NumericsSnapshot(groups, {}, "fp32", 8), place.references / "own-fp64.safetensors"
    )


def _make_checkpoint(folder: Path) -> None:
    from steplab.train.loop import Stop, Trainer
    from tests.train.tiny_runs import make_spec, silent

    spec = make_spec(folder / "checkpoints", steps_per_epoch=2, checkpoint_every=2)
    Trainer(spec, silent()).run(Stop())
    np.save(folder / "series.npy", np.sin(np.arange(60, dtype=np.float32))[None])


STEP = "checkpoints/step-00000002"


def _make_text(folder: Path) -> None:
    """A model of bytes: what it continues is a prompt."""
    from steplab.train.log import TrainingLog
    from steplab.train.loop import train
    from steplab.train.stop import Stop
    from tests.train.test_text import make_spec

    text = folder / "text.txt"
    text.write_text("the quick brown fox " * 200)
    spec = make_spec(folder / "checkpoints", text, steps_per_epoch=1, checkpoint_every=1)
    train(spec, TrainingLog(lambda line: None, None, perf=False), Stop())
    text.unlink()
    (folder / "prompt.txt").write_text("def f(x):\n    return x\n")


def _make_time_moe(folder: Path) -> None:
    from tests.workloads.tsmoe.time_moe_folders import random_tensors, write_folder

    write_folder(folder / "model", random_tensors())
    np.save(folder / "series.npy", np.sin(np.arange(60, dtype=np.float32))[None])


def _make_recipes(folder: Path) -> None:
    words = {"techniques": {"precision": {"dtype": "bf16"}, "compile": {"scope": "blocks"}}}
    (folder / "recipe.json").write_text(json.dumps(words))
    (folder / "recipe.toml").write_text(
        '[precision]\ndtype = "bf16"\n\n[compile]\nscope = "blocks"\nmode = "default"\n'
    )


def _make_series(folder: Path) -> None:
    from steplab.cli.main import main

    np.save(folder / "wave.npy", np.sin(np.arange(600, dtype=np.float32)).reshape(3, 200))
    main(["data", "pack", str(folder / "wave.npy"), "--out", str(folder / "series")])
    (folder / "wave.npy").unlink()


def _make_table(folder: Path) -> None:
    rows = ["item_id,timestamp,target"]
    rows += [f"{name},2026-01-{day:02d},{day * 0.5}" for name in "ab" for day in range(1, 21)]
    (folder / "table.csv").write_text("\n".join(rows) + "\n")


def _make_parquet(folder: Path) -> None:
    import pandas

    _make_table(folder)
    pandas.read_csv(folder / "table.csv").to_parquet(folder / "table.parquet")
    (folder / "table.csv").unlink()


def _make_documents(folder: Path) -> None:
    series = [{"sequence": [float(i * n) for i in range(20)]} for n in (1, 2)]
    (folder / "series.jsonl").write_text("\n".join(map(json.dumps, series)))
    (folder / "series.json").write_text(json.dumps(series))


def _make_arrays(folder: Path) -> None:
    wave = np.sin(np.arange(60, dtype=np.float32)).reshape(2, 30)
    np.save(folder / "wave.npy", wave)
    np.savez(folder / "waves.npz", a=wave[0], b=wave[1])


COMMAND_LINES = {
    "bench": "bench step gpt --size tiny --batch 2 4 --recipe precision=bf16,compile=blocks "
    "--mode full --steps 3 --context 16 32 --out table.csv",
    "train": "train --hidden-size 16 --lr 1e-3 --horizons 1,8 --dataset-path a:1,b:2 --epochs 2",
    "tune": "tune gpt --size tiny --budget 1 --memory-limit 2 --against optimizer=fused",
    "profile": "profile gpt --size tiny --batch 2 --recipe production-training,compile=off",
    "forecast": "forecast table.csv --horizon 4 --quantiles 0.1,0.5 --freq D --batch 3",
    "compare": "compare last last --fail-if-slower 3% --rerun 8 --out table.md",
    "runs": "runs last --newest 3 --max-memory 2GiB --status ok",
    "ops": "bench attention --context 128 --heads 2 --dtype bf16 --impl reference tiled",
}


def _make_words(folder: Path) -> None:
    for name, words in COMMAND_LINES.items():
        (folder / f"{name}.words").write_text("\n".join(words.split()))


STORED = "--store store"
FORECAST = "forecast series.npy --horizon 2 --device cpu --checkpoint"
READERS = (
    Reader("trace", _make_trace,
           ("explain trace.json", "explain trace.json --page page.html",
            "compare trace.json trace.json"),
           {"trace.json": JSON}),
    Reader("trace.gz", _make_gz, ("explain trace.json.gz",), {"trace.json.gz": GZIP}),
    Reader("run", lambda folder: _make_store(folder) and None,
           (f"runs {STORED}", f"runs last --json {STORED}", f"explain {STORED}",
            f"compare 000000 last {STORED}", f"report {STORED}", f"runs {STORED} --out t.md"),
           {RUN: JSON, "store/last": None}),
    Reader("pack", _make_pack, ("runs --unpack pack.zip --store store",), {"pack.zip": ZIP}),
    Reader("ladder", _make_ladder, ("ladder",),
           {"ladder/ladder.json": JSON, "ladder/gate.json": JSON,
            "ladder/references/own-fp64.safetensors": HEADER}),
    Reader("checkpoint", _make_checkpoint,
           (f"{FORECAST} checkpoints", "export checkpoints --out exported", "train --resume"),
           {f"{STEP}/checkpoint.json": SEALED}),
    Reader("safetensors", _make_checkpoint,
           (f"{FORECAST} checkpoints", "train --resume"),
           {f"{STEP}/model.safetensors": HEADER, f"{STEP}/optimizer.safetensors": HEADER,
            f"{STEP}/rng.safetensors": HEADER}, _reseal),
    Reader("Time-MoE", _make_time_moe, (f"{FORECAST} model",),
           {"model/config.json": JSON, "model/model.safetensors": HEADER}),
    Reader("recipe", _make_recipes, ("recipe recipe.json", "recipe recipe.toml"),
           {"recipe.json": JSON, "recipe.toml": None}),
    Reader("series folder", _make_series, ("data info series", "data clean series --out clean"),
           {"series/meta.json": JSON, "series/data-1-of-1.bin": None}),
    Reader("csv", _make_table, ("data info table.csv",), {"table.csv": CSV}),
    Reader("parquet", _make_parquet, ("data info table.parquet",), {"table.parquet": None}),
    Reader("json, jsonl", _make_documents, ("data info series.jsonl", "data info series.json"),
           {"series.jsonl": LINES, "series.json": JSON}),
    Reader("npy, npz", _make_arrays, ("data info wave.npy", "data info waves.npz"),
           {"wave.npy": NPY, "waves.npz": None}),
    Reader("prompt", _make_text,
           ("generate --prompt-file prompt.txt --checkpoint checkpoints --length 2 --device cpu",),
           {"prompt.txt": None},
           # Reading a longer one is as much work as its square: 26 s for 25,000 bytes.
           lambda files: {**files, "prompt.txt": files["prompt.txt"][:8192]}),
    Reader("words", _make_words, tuple(f"words {name}.words" for name in COMMAND_LINES),
           {f"{name}.words": WORDS for name in COMMAND_LINES}),
)  # fmt: skip
