"""Climb the ladders of the benchmarks, one after another; each may be named alone.

    PYTHONPATH=src python benchmarks/tune_ladders.py OUT MINUTES [NAME ...]

OUT/store holds the Runs and the ladders: called again with the same OUT, a ladder that was
interrupted, or whose minutes were spent, goes on. OUT/NAME.md is the table of a ladder, ceiling
against gain for every rung; it is written anew after every rung, so that one which is killed has
its table too. OUT/NAME/ has recipe and report. A ladder that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, time
from typing import Any

from steplab.cli.command import Parser
from steplab.cli.tune import COMMAND, LadderView, search, show
from steplab.core.errors import SteplabError, UserError, did_you_mean
from steplab.core.ladder import Ladder, Rung
from steplab.report.export import to_markdown
from steplab.techniques.context import format_waits
from steplab.tune.folder import LadderFolder
from steplab.tune.progress import format_timings
from steplab.tune.report import impact_table, peer_line, reasons_table, total_line, untried_table
from steplab.verify.remote import ReferenceWorker
from steplab.workers.pool import WorkerPool

ROOT = Path(__file__).parents[1]  # where the commands below are run
# The first design: a dense mask, expert by expert, torch's own ops, autocast, torch's update.
FIRST = (
    "precision=bf16,impl.experts=loop,impl.attention=dense_mask,impl.router=reference,"
    "impl.feed_forward=reference,impl.rms_norm=aten,impl.rotary=reference"
)
LADDERS = {
    "tsmoe_flagship": f"tsmoe --size flagship --batch 16 --recipe {FIRST} --against flagship",
    "tsmoe_small": f"tsmoe --size small --batch 4 --recipe {FIRST}",
    "gpt_small": "gpt --size small --batch 4",
    "gpt_xl": "gpt --size xl --batch 4",
    "own_model": "examples/own_model.py:recurrent --batch 64",
    "tsmoe_tiny": "tsmoe --size tiny",  # for a CPU
}


def main() -> int:
    """Climb what is named, else all but the last; return the exit code."""
    parser = Parser("tune_ladders.py", "Climb the ladders of the benchmarks.")
    parser.add_argument("out", type=Path, help="folder for tables, recipes, reports and the store")
    parser.add_argument("minutes", type=float, help="of each ladder and call")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(LADDERS)}")
    try:
        args = parser.parse(sys.argv[1:])
        for name in args.names:
            if name not in LADDERS:
                raise UserError(f"There is no ladder {name!r}.", did_you_mean(name, LADDERS))
    except SteplabError as error:
        print(f"tune_ladders.py: {error}", file=sys.stderr)
        return error.exit_code
    signal.signal(signal.SIGTERM, _interrupted)  # as `timeout` does it
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler: two lines a step otherwise
    return climb_all(args.names or list(LADDERS)[:-1], out, args.minutes)


def _interrupted(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def climb_all(names: Sequence[str], out: Path, minutes: float) -> int:
    """Climb with one reference worker for all ladders: it imports torch once."""
    begun, code = monotonic(), 0
    with ReferenceWorker() as references, WorkerPool() as pool:
        try:
            for name in names:
                pool.refill()
                words = [*LADDERS[name].split(), "--budget", str(minutes)]
                print(f"== {name}: steplab tune {' '.join(words)}", flush=True)
                try:
                    climb(name, words, out, begun, references, pool)
                except SteplabError as error:
                    print(f"{name}: {error}", flush=True)
                    code = error.exit_code
                begun = monotonic()
        except KeyboardInterrupt:
            print("interrupted. The same command goes on from there.", flush=True)
            code = 124
    return code


def climb(
    name: str,
    words: Sequence[str],
    out: Path,
    begun: float,
    references: ReferenceWorker,
    pool: WorkerPool,
) -> None:
    """Climb one ladder, print what came of it, and write its table whatever happens."""
    parser = Parser("steplab tune", "climb one ladder")
    COMMAND.flags(parser, words)
    args: argparse.Namespace = parser.parse(words)
    args.store, args.out = out / "store", out / name
    view = Telling(name, words, out, begun)
    try:
        show(*search(args, begun, references, pool, view))
    finally:
        view.write()


class Telling(LadderView):
    """Prints with the seconds since the beginning; keeps the stages in a log, and the table."""

    def __init__(self, name: str, words: Sequence[str], out: Path, begun: float) -> None:
        super().__init__(in_ms=True)
        self.drawn = False
        self.begun, self.since = begun, time()
        self.title = f"`steplab tune {' '.join(words)}`"
        self.store, self.table, self.log = out / "store", out / f"{name}.md", out / f"{name}.log"

    def stage(self, text: str) -> None:
        """Note what is being done right now."""
        self._log(text)

    def say(self, text: str) -> None:
        """Print a line, and note it."""
        print(f"{monotonic() - self.begun:6.1f}  {text}", flush=True)
        self._log(text)

    def rung(self, rung: Rung) -> None:
        """Print a row and write the table."""
        super().rung(rung)
        self.write()

    def write(self) -> None:
        """Write the ladder that was touched last as a table, if it is of this call."""
        files = (self.store / "ladders").glob("*/ladder.json")
        newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
        if newest is not None and newest.stat().st_mtime >= self.since:
            ladder = LadderFolder(newest.parent).load()
            self.table.write_text(f"{self.title}\n\n{page(ladder)}", encoding="utf-8")

    def _log(self, text: str) -> None:
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"{monotonic() - self.begun:6.1f}  {text}\n")


def page(ladder: Ladder) -> str:
    """Return the tables and what belongs to them."""
    lines = [to_markdown(impact_table(ladder)), f"- {total_line(ladder)}"]
    lines += [f"- {peer_line(ladder.peer)}"] if ladder.peer else []
    if ladder.waits:
        lines.append(
            f"- the baseline waits {len(ladder.waits)} times: {format_waits(ladder.waits)}"
        )
    lines.append(f"- stopped after {ladder.seconds:.0f} s: {ladder.stopped or 'interrupted'}")
    lines += [f"- left: {', '.join(ladder.left)}"] if ladder.left else []
    lines.append(f"- seconds outside the rungs: {format_timings(ladder.parts)}")
    lines += [
        f"- {rung.label}, {rung.seconds:.1f} s: {format_timings(rung.parts)}"
        for rung in ladder.rungs
    ]
    more = [reasons_table(ladder, all_rungs=False), untried_table(ladder)]
    return "\n".join([*lines, "", *(to_markdown(table) for table in more if table.rows)])


if __name__ == "__main__":
    sys.exit(main())
