"""What is still open about fp8 and its neighbors, answered within one call on one GPU.

    PYTHONPATH=src python benchmarks/fp8_questions.py FOLDER [PART ...] [--seconds N] [--tiny]

Each part is a command that answers one question and may take so many seconds. They run in this
order; one that no longer fits into the call is left for the next call with the same FOLDER, which
goes on with what is not answered, the convergence study from its finished trainings. FOLDER gets
what the parts print, their tables and a store. `--tiny` runs the same commands with tiny models and
recipes that a CPU can take: a typo shows before it costs minutes on a card.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from steplab.cli.command import Parser
from steplab.cli.flags import exit_without_gpu
from steplab.core import Cell, Column, Table
from steplab.core.errors import SteplabError, UserError, did_you_mean
from steplab.report.export import write_table
from steplab.report.terminal import print_table

HERE = Path(__file__).parent
STEP = "steplab bench step"
TINY = "--mode full --size tiny --batch 2 --device cpu"
FP8 = "flagship,precision=fp8-bf16-weights"
# The best bf16 recipe that `tune` found for gpt xl, and the same in fp8.
XL = "optimizer=one-pass,compile=blocks,cuda_graph=step,precision={}bf16-weights"
HYDRA = "precision=bf16-weights,optimizer=one-pass,compile=blocks,cuda_graph=step"


class Part(NamedTuple):
    """A question and the command that answers it, but for the files that it writes."""

    question: str
    seconds: int  # that it may take
    command: str
    tiny: str  # the same for a CPU


PARTS = {
    "gate": Part(
        "Is the flagship in fp8 green before the gate?",
        400,
        f"gate.py tsmoe --size flagship --batch 1 --device cuda --recipe {FP8}",
        "gate.py tsmoe --recipe precision=bf16 --batch 2 --steps 2 --device cpu",
    ),
    "flagship": Part(
        "How fast is it beside bf16?",
        120,
        "flagship.py ours 'ours, fp8' --steps 20",
        f"{STEP} tsmoe {TINY} --steps 2 --recipe plain precision=bf16",
    ),
    "xl": Part(
        "What does torchao's fp8 give gpt xl? (1.15 times its best bf16 recipe is asked for)",
        150,
        f"{STEP} gpt --mode full --size xl --batch 16 --context 256 1024 --device cuda "
        f"--recipe {XL.format('')} {XL.format('fp8-')}",
        f"{STEP} gpt {TINY} --context 16 32 --steps 2 --recipe plain precision=bf16",
    ),
    "small": Part(
        "The small launch-bound mixture: at least 760,000 tokens/s?",
        60,
        "flagship.py ours --size small --batch 4 --steps 50",
        f"{STEP} tsmoe {TINY} --steps 2 --recipe precision=bf16",
    ),
    "hydra": Part(
        "hydra 100m at batch 16: an MFU of at least 44 %?",
        90,
        f"{STEP} hydra --mode full --size 100m --batch 16 --device cuda --recipe {HYDRA}",
        f"{STEP} hydra {TINY} --steps 2 --recipe precision=bf16",
    ),
    "decode": Part(
        "How fast does Megalodon write, and the others in bf16?",
        90,
        "decode.py megalodon hydra-bf16 gpt-bf16 tsmoe-bf16 --device cuda",
        "decode.py megalodon gpt --tiny --length 8 --device cpu",
    ),
    "convergence": Part(
        "Does it learn what bf16 learns, and what is its speed at equal loss?",
        520,
        "steplab bench convergence tsmoe --size flagship-reduced --pairs 4 --steps 1000 "
        f"--reference flagship --recipe {FP8} --device cuda",
        "steplab bench convergence tsmoe --size tiny --pairs 4 --steps 20 --batch-size 2 "
        "--validation-batches 1 --reference plain --recipe precision=bf16 --device cpu",
    ),
}
ANSWERS = (0, 1)  # a red gate and a gap that is too wide are answers too
STARTED = 20  # seconds below which no part is begun
COLUMNS = (Column("part"), Column("question"), Column("took", "s"), Column("status"))


def main() -> int:
    """Run the parts that fit, print what became of each; return the exit code."""
    parser = Parser("fp8_questions.py", "What is still open about fp8, within one call.")
    add = parser.add_argument
    add("folder", type=Path, help="for tables, Runs and what the parts print")
    add("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    add("--seconds", type=float, default=580.0, help="that the whole call may take")
    add("--tiny", action="store_true", help="tiny models on a CPU, to try the commands")
    try:
        args = parser.parse(sys.argv[1:])
        for word in args.parts:
            if word not in PARTS:
                raise UserError(f"There is no part {word!r}.", did_you_mean(word, PARTS))
        if not args.tiny:
            exit_without_gpu(__file__)
        args.folder.mkdir(parents=True, exist_ok=True)
        rows = answered(args.parts or list(PARTS), args.folder, args.seconds, args.tiny)
        note = "details in FOLDER/PART.txt; the same command goes on with what is not answered"
        table = Table("Open questions", COLUMNS, tuple(rows), note)
        print_table(table)
        print(loss_matched(args.folder))
        write_table(table, args.folder / "questions.md")
    except SteplabError as error:
        print(f"fp8_questions.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0 if all(str(row[-1]).startswith("answered") for row in rows) else 1


def answered(names: list[str], folder: Path, seconds: float, tiny: bool) -> list[tuple[Cell, ...]]:
    """Run parts while there is time; return a row for each."""
    started, rows = perf_counter(), []
    for name in names:
        part, done = PARTS[name], folder / f"{name}.done"
        left = seconds - (perf_counter() - started)
        if done.exists():
            rows.append((name, part.question, None, "answered before"))
        elif left < STARTED:
            rows.append((name, part.question, None, "no time was left"))
        else:
            began = perf_counter()
            status = run_part(name, folder, min(left, part.seconds), tiny)
            if status.startswith("answered"):
                done.touch()
            rows.append((name, part.question, perf_counter() - began, status))
        print(f"{name}: {rows[-1][-1]}", file=sys.stderr, flush=True)
    return rows


def run_part(name: str, folder: Path, seconds: float, tiny: bool) -> str:
    """Run one part, with what it prints in FOLDER/PART.txt; return what became of it."""
    words = command_of(name, folder, tiny)
    source = str(HERE.parent / "src")
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    with (folder / f"{name}.txt").open("w") as printed:
        # In a session of its own, so that its workers can be ended with it.
        done = subprocess.Popen(
            words, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        try:
            done.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)
            done.wait()
            return f"stopped after {seconds:.0f} s"
    if done.returncode in ANSWERS:
        return "answered" if done.returncode == 0 else "answered: red"
    last = (folder / f"{name}.txt").read_text().strip().splitlines()
    return f"failed ({done.returncode}): {last[-1] if last else 'nothing was printed'}"


def command_of(name: str, folder: Path, tiny: bool) -> list[str]:
    """Return the words of a part's command."""
    part = PARTS[name]
    first, *words = shlex.split(part.tiny if tiny else part.command)
    program = [str(HERE / first)]
    if first == "steplab":
        program, words = ["-m", first], [*words, "--store", str(folder / "store")]
    written = [str(folder / f"{name}.{kind}") for kind in ("md", "json")]
    return [sys.executable, *program, *words, "--out", *written]


def loss_matched(folder: Path) -> str:
    """Return the flagship's speed in fp8 at equal loss, once speed and losses are known; else "".

    The share of its tokens that bf16 needs for the same loss is that of the reduced flagship.
    """
    speeds, losses = folder / "flagship.json", folder / "convergence.recipes.json"
    if not (speeds.exists() and losses.exists()):
        return ""
    cells = {row["cell"]: row["tokens/s"] for row in records(speeds)}
    bf16, fp8 = (cells.get(name) for name in ("ours", "ours, fp8"))
    *_, recipe = records(losses)
    rate, matched = recipe["tokens/s"], recipe["loss-matched tokens/s"]
    if not (bf16 and fp8 and rate and matched):
        return ""
    equal = fp8 * matched / rate
    return (
        f"fp8 {fp8:,.0f} tokens/s, loss-matched {equal:,.0f}: {equal / bf16:.3f} times bf16's "
        f"{bf16:,.0f}"
    )


def records(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a table that was written as JSON, by the names of the columns."""
    table = json.loads(path.read_text())
    names = [column["name"] for column in table["columns"]]
    return [dict(zip(names, row, strict=True)) for row in table["rows"]]


if __name__ == "__main__":
    sys.exit(main())
