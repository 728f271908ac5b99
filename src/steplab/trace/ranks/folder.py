"""A folder of traces, one per rank: which file is which rank's, and reading them side by side."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from steplab.core import Run
from steplab.core.input_file import memory_limit, set_memory_limit
from steplab.trace.ranks.analysis import RanksAnalysis, analyze_ranks
from steplab.trace.ranks.rank_trace import RankTrace, read_rank
from steplab.trace.reading.refusals import (
    RUN_FILE,
    folder_error,
    no_ranks_error,
    run_folder_error,
    trace_names,
)

# In names as people and tools write them: rank-0, rank_3, rank12; worker0 of TensorBoard's handler.
RANK_IN_NAME = re.compile(r"(?:rank|worker)[-_]?(\d{1,6})", re.IGNORECASE)
SMALL = 4 << 20  # bytes of all files: starting processes takes longer than reading them
LISTED = 8  # ranks named in a note


def analyze_folder(folder: Path) -> RanksAnalysis:
    """Analyze a folder with traces of several ranks, gzip or not, whoever recorded them."""
    names = trace_names(folder)
    if RUN_FILE in names:
        raise run_folder_error(folder)
    if not names:
        raise folder_error(folder)
    found = read_ranks([(folder / name, None) for name in names])
    told = _ranks_of(dict(zip(names, found, strict=True)))
    if len(told) < len(names):
        raise no_ranks_error(folder)
    ranks, notes = _one_each(found, [told[name] for name in names])
    return analyze_ranks(ranks, notes)


def analyze_run_ranks(run: Run, folder: Path) -> RanksAnalysis | None:
    """Analyze the first trace of every rank of a profiled Run; None: one rank, or no traces."""
    if run.spec.ranks == 1 or run.profile is None or not run.profile.traces:
        return None
    pairs = []
    for rank in range(run.spec.ranks):
        trace = folder / rank_file(run.profile.traces[0], rank)
        detail = folder / rank_file(run.profile.detail, rank) if run.profile.detail else None
        pairs.append((trace, detail if detail and detail.is_file() else None))
    if not all(path.is_file() for path, _ in pairs):
        return None
    return analyze_ranks([_numbered(one, rank) for rank, one in enumerate(read_ranks(pairs))])


def rank_file(name: str, rank: int) -> str:
    """Return what the file of a Run is called that rank `rank` wrote; rank 0's has no prefix."""
    return f"rank{rank}_{name}" if rank else name


def read_ranks(pairs: Sequence[tuple[Path, Path | None]]) -> list[RankTrace]:
    """Read traces and, where there are any, detailed ones, in as many processes as help.

    Together they take no more memory than reading one file may.
    """
    size = sum(path.stat().st_size for path, _ in pairs)
    processes = min(len(pairs), os.cpu_count() or 1)
    if size < SMALL or processes == 1:
        return [read_rank(*pair) for pair in pairs]
    share = memory_limit() // processes
    with ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=set_memory_limit, initargs=(share,)
    ) as pool:
        return list(pool.map(read_rank, *zip(*pairs, strict=True)))


def _ranks_of(found: Mapping[str, RankTrace]) -> dict[str, int]:
    """Return the rank of every file that tells one: inside, or where that clashes, by its name."""
    inside = {name: trace.place.rank for name, trace in found.items()}
    named = {name: _rank_in_name(name) for name in found}
    told = named if _clashes(named) < _clashes(inside) else inside
    if len(found) == 1:
        return {name: rank or 0 for name, rank in told.items()}
    return {name: rank for name, rank in told.items() if rank is not None}


def _one_each(
    found: Sequence[RankTrace], ranks: Sequence[int]
) -> tuple[list[RankTrace], list[str]]:
    """Return one trace per rank, the newest, and what has to be told of the others."""
    newest: dict[int, RankTrace] = {}
    for rank, trace in sorted(
        zip(ranks, found, strict=True), key=lambda pair: pair[1].windows[0].start
    ):
        newest[rank] = _numbered(trace, rank)
    several = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if not several:
        return list(newest.values()), []
    which = ", ".join(map(str, several[:LISTED]))
    return list(newest.values()), [
        f"ranks with several traces, of which the newest counts: {which}"
    ]


def _rank_in_name(name: str) -> int | None:
    said = RANK_IN_NAME.search(name)
    return int(said[1]) if said else None


def _clashes(ranks: Mapping[str, int | None]) -> int:
    """Return how many files claim a rank that another one claims, too, or none."""
    counts = Counter(ranks.values())
    return sum(count for rank, count in counts.items() if count > 1 or rank is None)


def _numbered(trace: RankTrace, rank: int) -> RankTrace:
    return replace(trace, place=replace(trace.place, rank=rank))
