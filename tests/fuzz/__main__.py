"""Fuzz the readers for some minutes and print a table.

    PYTHONPATH=src python -m tests.fuzz [--minutes 30] [--processes 12] [--seed 1] [--save] [READER]

Every process has its own seed, sandbox and folders; the table adds them up. `--save` keeps every
input that did something wrong in tests/fuzz/corpus, where CI opens it again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from steplab.core import Column, Table
from steplab.report.export import to_markdown
from tests.fuzz.campaign import Tally, add_up, fuzz_in_turn
from tests.fuzz.readers import READERS


def main() -> int:
    """Fuzz, print what was found as it comes, and the table at the end."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz the readers.")
    parser.add_argument("readers", nargs="*", metavar="READER")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1, help="of the first process")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if args.processes < 1:
        parser.error(f"--processes must be at least 1, not {args.processes}")
    known = [reader.name for reader in READERS]
    for name in args.readers:
        if name not in known:
            parser.error(f"there is no reader {name!r}; known: {'; '.join(known)}")
    one = partial(fuzz_in_turn, args.readers, args.minutes, args.save)
    seeds = range(args.seed, args.seed + args.processes)
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=fresh) as pool:
        tallies = add_up(pool.map(one, seeds))
    print(to_markdown(table(tallies)))
    return int(any(tally.findings for tally in tallies))


def table(tallies: list[Tally]) -> Table:
    """Return inputs and findings by reader."""
    names = ("reader", "inputs", "tracebacks", "hangs, memory", "code, files outside", "words")
    rows = []
    for tally in tallies:
        counts = (tally.count("traceback", "crash"), tally.count("hang", "memory"))
        rest = (tally.count("code", "outside"), tally.count("words", "escape"))
        rows.append((tally.reader, tally.tried, *counts, *rest))
    rows.append(("all", *(sum(row[i] for row in rows) for i in range(1, len(names)))))
    return Table("fuzzing", tuple(map(Column, names)), tuple(rows))


if __name__ == "__main__":
    sys.exit(main())
