"""Tune models that others wrote, each in a process of its own, and write one table.

    PYTHONPATH=$PWD/src python benchmarks/foreign_models.py OUT [NAME ...] --minutes 2 --table FILE

The factories are in benchmarks/foreign_models/; those of transformers and x-transformers need these
libraries. OUT/NAME.log is what `steplab tune` printed, OUT/NAME/ its recipe and report. A model
that fails is a row. Seconds are those of the clock, CPU seconds those of all processes.
"""

from __future__ import annotations

import argparse
import ast
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from steplab.core import Column, Table
from steplab.core.ladder import Ladder, verdict
from steplab.report.export import to_markdown
from steplab.tune.folder import LADDER_FILE, LadderFolder
from steplab.tune.report import gains_nothing, interval, speed_up

FOLDER = Path(__file__).with_suffix("")
MODELS = {  # name in the table: the factory
    "HF BERT": "hugging_face.py:bert",
    "HF T5": "hugging_face.py:t5",
    "HF ViT": "hugging_face.py:vit",
    "HF Llama": "hugging_face.py:llama",
    "HF Qwen2-MoE": "hugging_face.py:qwen2_moe",
    "HF GPT-2": "hugging_face.py:gpt2",
    "x-transformers": "x_transformers_decoder.py:make",
    "nanochat-like": "nanochat_like.py:make",
    "nanoGPT-like": "nanogpt_like.py:make",
    "convnet": "convnets.py:plain",
    "ResNet": "convnets.py:resnet",
    "LSTM": "lstm.py:make",
    "Mamba-like": "mamba_like.py:make",
}
GAIN, NOTHING, UNCLEAR = "verified gain", "nothing to gain", "cannot tell"
FAILURE = "failure"
ENDS = (GAIN, NOTHING, UNCLEAR, FAILURE)
COLUMNS = (
    *("model", "lines to adopt", "truth", "plain step", "best recipe", "speed-up"),
    *("s", "CPU s", "load", "end"),
)


@dataclass(frozen=True)
class Tuned:
    """One search: how long it took, and what is left of it."""

    name: str
    code: int  # of `steplab tune`
    seconds: float
    cpu_seconds: float
    load: float  # average number of runnable processes over the last minute, on all cores
    last_line: str
    ladder: Ladder | None
    truth: str


def main() -> int:
    """Tune what is named, else all; return 1 where one of them ended in a failure."""
    parser = argparse.ArgumentParser(description="Tune models that others wrote.")
    parser.add_argument("out", type=Path, help="folder for logs, recipes and reports")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--minutes", type=float, default=2.0, help="of each search")
    parser.add_argument("--table", type=Path, help="Markdown file for the table")
    args = parser.parse_args()
    unknown = set(args.names) - set(MODELS)
    if unknown:
        parser.error(f"there is no model {', '.join(sorted(unknown))}")
    rows: list[tuple[str, ...]] = []
    for name in args.names or MODELS:
        rows.append(row(tune(name, args.out.resolve() / name.replace(" ", "_"), args.minutes)))
        print(" | ".join(rows[-1]), flush=True)
        if args.table is not None:  # after every model: an interrupted run has a table too
            args.table.write_text(to_markdown(table(rows)), encoding="utf-8")
    return int(any(row[-1].startswith(FAILURE) for row in rows))


def tune(name: str, out: Path, minutes: float) -> Tuned:
    """Run `steplab tune` on a model and read the ladder that it leaves."""
    out.mkdir(parents=True, exist_ok=True)
    log, store = out.with_suffix(".log"), out / "store"
    words = ["tune", MODELS[name], "--budget", str(minutes), "--store", str(store)]
    before, begun = _cpu_seconds(), monotonic()
    with log.open("wb") as printed:
        code = subprocess.run(
            [sys.executable, "-m", "steplab", *words, "--out", str(out)],
            cwd=FOLDER,
            stdout=printed,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    seconds, cpu = monotonic() - begun, _cpu_seconds() - before
    lines = log.read_text(encoding="utf-8").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    files = list(store.glob(f"ladders/*/{LADDER_FILE}"))
    newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
    ladder, truth = None, "-"
    if newest is not None:
        folder = LadderFolder(newest.parent)
        ladder = folder.load()
        shapes = folder.load_shapes(ladder.spec)
        truth = "operator by operator" if any(shape.widened for shape in shapes) else "fp64"
    return Tuned(name, code, seconds, cpu, os.getloadavg()[0], last, ladder, truth)


def _cpu_seconds() -> float:
    """Seconds of CPU that ended children have taken, their own children included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def row(tuned: Tuned) -> tuple[str, ...]:
    """Return the cells of one model."""
    ladder = tuned.ladder
    won = ladder is not None and ladder.winner != ladder.spec.recipe
    total = ladder.total if ladder else None
    file, _, factory = MODELS[tuned.name].partition(":")
    return (
        tuned.name,
        str(lines_to_adopt(FOLDER / file, factory)),
        tuned.truth,
        verdict(ladder.baseline_checks) if ladder else "-",
        ladder.winner.label if ladder and won else "-",
        f"{speed_up(total)}x ({interval(total)})" if total else "-",
        f"{tuned.seconds:.0f}",
        f"{tuned.cpu_seconds:.0f}",
        f"{tuned.load:.1f}",
        end(tuned),
    )


def end(tuned: Tuned) -> str:
    """Say how a search ended: with a gain, without one, in noise, or not as it should."""
    ladder = tuned.ladder
    if tuned.code or ladder is None:
        return f"{FAILURE}: {tuned.last_line}"
    if ladder.total is not None and ladder.total.high < 0:
        return GAIN
    verified = [rung for rung in ladder.rungs if rung.green]
    tried = ", ".join(f"{rung.label} {rung.outcome}" for rung in ladder.rungs)
    if not verified:
        return f"{FAILURE}: nothing was verified ({tried or 'no rung was finished'})"
    equal = ladder.total is None or gains_nothing(ladder.total)
    noisy = not equal or any(rung.green for rung in ladder.undecided)
    return f"{UNCLEAR if noisy else NOTHING} ({tried})"


def lines_to_adopt(file: Path, factory: str) -> int:
    """Count the lines of a factory and of the private functions that it uses, without docstrings.

    The public classes and functions of a file stand for what was there before steplab came.
    """
    text = file.read_text(encoding="utf-8")
    functions = {
        node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)
    }
    wanted, used = [factory], set[str]()
    while wanted:
        name = wanted.pop()
        used.add(name)
        named = {node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name)}
        wanted += [n for n in named & functions.keys() if n.startswith("_") and n not in used]
    return sum(_code_lines(functions[name], text) for name in used)


def _code_lines(function: ast.FunctionDef, text: str) -> int:
    lines = text.split("\n")[function.lineno - 1 : function.end_lineno]
    docstring = 1 if ast.get_docstring(function) else 0
    return sum(bool(line.strip()) for line in lines) - docstring


def table(rows: Sequence[tuple[str, ...]]) -> Table:
    """Return the table of all rows, with how many ended in which way."""
    ends = {word: sum(row[-1].startswith(word) for row in rows) for word in ENDS}
    note = f"{len(rows)} models: {', '.join(f'{n} {word}' for word, n in ends.items())}."
    columns = tuple(Column(name) for name in COLUMNS)
    return Table("models that others wrote", columns, tuple(rows), note)


if __name__ == "__main__":
    sys.exit(main())
