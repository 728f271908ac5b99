"""Fuzz the readers for some minutes and print a table.

    PYTHONPATH=src python -m tests.fuzz --minutes 30 [--seed 1] [--save] [READER ...]

`--save` keeps every input that did something wrong in tests/fuzz/corpus, where CI opens it again.
"""

from __future__ import annotations

import argparse
import sys
from itertools import count
from time import monotonic

from steplab.core import Column, Table
from steplab.report.export import to_markdown
from tests.fuzz.campaign import Inputs, Sandbox, Tally, check_honest, fuzz, readers, save

ROUND = 150  # inputs of one reader before the next reader has its turn


def main() -> int:
    """Fuzz, print what was found as it comes, and the table at the end."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz the readers.")
    parser.add_argument("readers", nargs="*", metavar="READER")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    chosen, inputs, begun = readers(args.readers), Inputs(), monotonic()
    tallies = {reader.name: Tally(reader.name) for reader in chosen}

    def in_time() -> bool:
        return monotonic() - begun < 60 * args.minutes

    with Sandbox() as sandbox:
        for reader in chosen:
            check_honest(reader, sandbox, inputs)
        begun = monotonic()  # the minutes are those of damaged inputs
        for number in count(args.seed):
            for reader in chosen:
                if in_time():
                    tally = tallies[reader.name]
                    found = fuzz(reader, sandbox, inputs, tally, ROUND, number, in_time)
                    if found is not None:
                        print(f"{reader.name}: {found.args[0]}\n  {found.args[1]}", flush=True)
                        if args.save:
                            print(f"  {save(reader, found.args[1], inputs)}", flush=True)
            if not in_time():
                break
            total = sum(tally.tried for tally in tallies.values())
            print(f"{(monotonic() - begun) / 60:.1f} min: {total:,} inputs", flush=True)
    print(to_markdown(table(list(tallies.values()))))
    return int(any(tally.findings for tally in tallies.values()))


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
