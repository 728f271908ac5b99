"""Climb the ladders of the benchmarks, one after another; each may be named alone.

    PYTHONPATH=src python benchmarks/tune_ladders.py OUT MINUTES [NAME ...]

OUT/store holds the Runs and the ladders: called again with the same OUT, a ladder that was
interrupted, or whose minutes were spent, goes on. OUT/NAME.md is the table of a ladder, ceiling
against gain for every rung; it is written anew after every rung, so that one which is killed has
its table too. OUT/NAME/ has recipe and report. A ladder that fails does not stop the others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import time
from typing import Any

from steplab.cli.command import Parser
from steplab.errors import SteplabError, UserError, did_you_mean
from steplab.record.ladder import Ladder
from steplab.report.export import to_markdown
from steplab.techniques.situation import where
from steplab.tune.impact import impact_table, reasons_table, total_line, untried_table
from steplab.tune.peer import peer_line
from steplab.tune.state import LadderFolder
from steplab.tune.stopwatch import told

ROOT = Path(__file__).parents[1]  # where the commands below are run
# The first design: a dense mask, expert by expert, torch's own ops, autocast, torch's update.
FIRST = (
    "precision=bf16,impl.experts=loop,impl.attention=dense_mask,impl.router=reference,"
    "impl.feed_forward=reference,impl.rms_norm=aten,impl.rotary=reference"
)
LADDERS = {
    "tsmoe_flagship": f"tsmoe --size flagship --batch 16 --recipe {FIRST} "
    "--against recipes/flagship.toml",
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
    # `timeout` ends this process; what it has started must end with it.
    signal.signal(signal.SIGTERM, _interrupted)
    args.out.mkdir(parents=True, exist_ok=True)
    codes = [climb(n, args.out, args.minutes) for n in args.names or list(LADDERS)[:-1]]
    return max(codes)


def _interrupted(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def climb(name: str, out: Path, minutes: float) -> int:
    """Run `steplab tune`, show and keep what it prints, and write the table after every rung."""
    words = [*LADDERS[name].split(), "--budget", str(minutes)]
    words += ["--store", str(out.resolve() / "store"), "--out", str(out.resolve() / name)]
    begun = time()
    print(f"== {name}: steplab tune {' '.join(words)}", flush=True)
    child = subprocess.Popen(
        [sys.executable, "-m", "steplab", "tune", *words],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        with (out / f"{name}.log").open("a") as log:
            for line in _lines(child):
                print(f"{time() - begun:6.1f} {line}", end="", flush=True)
                log.write(line)
                if line.startswith("["):
                    write(name, words, out, begun)
        return child.wait()
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            child.wait()
        write(name, words, out, begun)


def _lines(child: subprocess.Popen[str]) -> Iterator[str]:
    assert child.stdout is not None
    yield from child.stdout


def write(name: str, words: Sequence[str], out: Path, begun: float) -> None:
    """Write the ladder that was touched last, if there is one, as a table."""
    files = sorted(
        (out / "store" / "ladders").glob("*/ladder.json"), key=lambda p: p.stat().st_mtime
    )
    if not files or files[-1].stat().st_mtime < begun:
        return
    ladder = LadderFolder(files[-1].parent).load()
    (out / f"{name}.md").write_text(page(ladder, words), encoding="utf-8")


def page(ladder: Ladder, words: Sequence[str]) -> str:
    """Return the tables and what belongs to them."""
    lines = [f"`steplab tune {' '.join(words[:-4])}`, {ladder.seconds:.0f} s\n"]
    lines += [to_markdown(impact_table(ladder)), "", f"- {total_line(ladder)}"]
    lines += [f"- {peer_line(ladder.peer)}"] if ladder.peer else []
    if ladder.waits:
        lines.append(f"- the baseline waits {len(ladder.waits)} times: {where(ladder.waits)}")
    lines.append(f"- stopped: {ladder.stopped or 'interrupted'}")
    lines += [f"- left: {', '.join(ladder.left)}"] if ladder.left else []
    lines.append(f"- seconds outside the rungs: {told(ladder.parts)}")
    lines += [f"- {rung.label}, {rung.seconds:.1f} s: {told(rung.parts)}" for rung in ladder.rungs]
    more = [reasons_table(ladder, all_rungs=False), untried_table(ladder)]
    return "\n".join([*lines, "", *(to_markdown(table) for table in more if table.rows)])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(124)
