"""Kill `train` and `tune` at random moments, start them again, and check that nothing is lost.

    PYTHONPATH=src python benchmarks/kill_campaign.py --kills-train 100 --kills-ranks 30 \\
        --kills-tune 50 --seed 1

`--processes 10` divides the kills among ten campaigns, each with its own folders and seed.

A training is killed again and again until it ends, then another one begins. Whatever happened to
it, every step that it logged must have the loss of an undisturbed run, bit for bit; no step may be
missing; after a signal that can be caught none may be computed twice; and its last checkpoint must
hold the same bytes. So must one on two ranks, whether a rank or their launcher is killed
(`kill_ranks.py`). A search must go on with the ladder that it left, every Run in its store must
be readable, and none of its worker processes may stay behind. Linux only: processes are counted in
/proc.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import monotonic

from kill_ranks import Group, choose_kill
from kills import ENDED, Ending, Kill, Tally, check_ending, run

from steplab.core import Column, Run, Table
from steplab.core.errors import SteplabError, UserError
from steplab.core.ladder import Ladder
from steplab.probes.environment import capture_environment
from steplab.report.export import to_markdown
from steplab.report.terminal import print_table
from steplab.store import Store
from steplab.train.checkpoint import read_progress
from steplab.train.checkpoint_files import (
    list_checkpoints,
    newest_checkpoint,
    read_verified_manifest,
)
from steplab.tune.folder import LadderFolder

PAGE = Path(__file__).with_name("kill_campaign_cpu.md")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STEPS, SAVE_EVERY = 150, 3
TRAIN = (
    "train --hidden-size 16 --n-decoder-layers 2 --n-head 2 --num-experts 4 --d-ff 16 --d-expert 8 "
    f"--seq-max-len 40 --horizons 1,8 --batch-size 4 --steps-per-epoch {STEPS} --log-every 1 "
    f"--checkpoint-every {SAVE_EVERY} --validate-every 0 --validation-batches 1 --keep-last 2"
)
RANKS = f"{TRAIN} --ranks 2 --max-restarts 1000 --recipe parallel=fsdp"
TUNE = (
    "tune gpt --size tiny --width 32 --ff-width 64 --layers 1 --heads 2 --context 16 "
    "--vocab-size 64 --batch 2 --budget 1"
)
SEARCH = 60.0  # seconds of that budget
# Half of the kills count from the start of the process, which is mostly `import torch`; the others
# from its first step or rung, so that short moments like saving are hit as often.
FROM_START = 0.5


def choose(chance: random.Random, life: float, mark: str, rest: float) -> Kill:
    """Draw a signal and a moment: within `life` seconds of the start, or `rest` of the mark."""
    number = chance.choice(SIGNALS)
    if chance.random() < FROM_START:
        return Kill(number, chance.uniform(0.0, life))
    return Kill(number, chance.uniform(0.0, rest), mark)


# --- train


@dataclass(frozen=True)
class Undisturbed:
    """A training that nobody killed: its losses by step, its last checkpoint, its seconds."""

    losses: dict[int, float]
    last: Path
    seconds: float
    seconds_of_steps: float


def undisturbed_training(folder: Path, words: str) -> Undisturbed:
    """Train once without a kill."""
    begun = monotonic()
    ending = run(f"{words} --checkpoint-dir checkpoints", folder, None)
    seconds = monotonic() - begun
    if ending.code:
        raise UserError(f"The undisturbed training ended with {ending.code}: {ending.error}")
    rows, _ = read_rows(folder)
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    newest = newest_checkpoint(folder / "checkpoints")
    assert newest is not None and len(losses) == STEPS
    steps = sum(row.get("train/step_time_ms", 0.0) for row in rows) / 1e3
    # Saving takes several times as long as the step of so small a model.
    return Undisturbed(losses, newest, seconds, 4 * steps)


def read_rows(folder: Path) -> tuple[list[dict[str, float]], list[str]]:
    """Return the rows of metrics.jsonl, and what is wrong with lines that are none."""
    rows, faults = [], []
    path = folder / "checkpoints" / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            faults.append(f"metrics.jsonl has the line {line[:60]!r}")
    return rows, faults


def kill_training(kills: int, chance: random.Random, folder: Path) -> Tally:
    """Kill trainings `kills` times, each until it ends; check what is there after every kill."""
    whole = undisturbed_training(folder / "undisturbed", TRAIN)
    tally, seen = Tally("train"), 0
    place = folder / "killed"
    while tally.count < kills:
        resume = " --resume" if newest_checkpoint(place / "checkpoints") else ""
        words = f"{TRAIN} --checkpoint-dir checkpoints{resume}"
        kill = choose(chance, whole.seconds, "step=", whole.seconds_of_steps)
        ending = run(words, place, kill)
        faults = check_ending(ending, kill)
        more, repeated = check_training(place, whole, kill, seen)
        seen = len(read_rows(place)[0])
        tally.repeated += repeated
        tally.note(kill, training_stage(place, ending), [*faults, *more])
        if is_trained(place):
            finish_training(place, whole, tally, seen)
            seen = 0
    if place.exists():  # the last one is led to its end as well
        resume = " --resume" if newest_checkpoint(place / "checkpoints") else ""
        ending = run(f"{TRAIN} --checkpoint-dir checkpoints{resume}", place, None)
        assert ending.code == 0, ending.error
        finish_training(place, whole, tally, seen)
    return tally


def is_trained(folder: Path) -> bool:
    """Whether the training in `folder` has done its last step."""
    newest = newest_checkpoint(folder / "checkpoints")
    return newest is not None and read_progress(newest).step == STEPS


def finish_training(folder: Path, whole: Undisturbed, tally: Tally, seen: int) -> None:
    """Check the log and the weights of a training that has ended, and remove it."""
    faults, repeated = check_training(folder, whole, Kill(signal.SIGKILL, 0.0), seen)
    newest = newest_checkpoint(folder / "checkpoints")
    if newest is None or not is_trained(folder):
        faults.append("has not come to its end")
    else:
        faults += same_files(newest, whole)
    tally.faults += [f"{tally.command}, training {tally.ended}: {fault}" for fault in faults]
    tally.ended += 1
    tally.repeated += repeated
    shutil.rmtree(folder)


def training_stage(folder: Path, ending: Ending) -> str:
    """Return what a training was doing when it was killed, by what it left."""
    if ending.early:
        return ENDED
    if any(path.name.startswith(".draft") for path in (folder / "checkpoints").glob(".*")):
        return "saving"
    if "stopped by a signal" in ending.text or "step=" in ending.text:
        return "training"
    return "starting"


def check_training(
    folder: Path, whole: Undisturbed, kill: Kill, seen: int
) -> tuple[list[str], int]:
    """Return what is wrong with a training that was killed, and how many steps it did again.

    `seen` rows of its log were checked after an earlier kill.
    """
    rows, faults = read_rows(folder)
    for path in list_checkpoints(folder / "checkpoints"):
        try:
            read_verified_manifest(path)
        except SteplabError as error:
            faults.append(str(error))
    at, repeated = 0, 0
    for index, row in enumerate(rows):
        if "train/resumed_at" in row:
            again = at - int(row["train/resumed_at"])
            repeated += again if index >= seen else 0
            at -= again
            if again < 0 or again > SAVE_EVERY:
                faults.append(f"resumed at step {row['step']} after step {at + again}")
        elif "train/loss" in row:
            if row["step"] == 1 and at <= SAVE_EVERY:  # killed before anything was saved
                repeated += at if index >= seen else 0
                at = 0
            at += 1
            if row["step"] != at:
                faults.append(f"step {row['step']} follows step {at - 1}")
                at = row["step"]
            if row["train/loss"] != whole.losses[at]:
                faults.append(f"step {at}: loss {row['train/loss']}, not {whole.losses[at]}")
    newest = newest_checkpoint(folder / "checkpoints")
    saved = read_progress(newest).step if newest else 0
    stepped = any("train/loss" in row for row in rows[seen:])  # else the last rows are older
    if stepped and kill.number != signal.SIGKILL and saved != at:
        faults.append(f"stopped after step {at}, but saved step {saved}")
    return faults, repeated


def same_files(newest: Path, whole: Undisturbed) -> list[str]:
    """Return which files of the last checkpoint differ from those of the undisturbed training."""
    found, expected = _tensor_files(newest), _tensor_files(whole.last)
    names = sorted(found.keys() | expected.keys())
    return [f"{name} differs" for name in names if found.get(name) != expected.get(name)]


def _tensor_files(checkpoint: Path) -> dict[str, bytes]:
    """Return the content of all files of tensors, by name; ranks have written slices."""
    files = checkpoint.rglob("*.safetensors")
    return {file.relative_to(checkpoint).as_posix(): file.read_bytes() for file in files}


# --- train --ranks


def kill_ranks(kills: int, chance: random.Random, folder: Path) -> Tally:
    """Kill trainings on two ranks `kills` times, each until it ends; check after every kill."""
    whole = undisturbed_training(folder / "undisturbed", RANKS)
    words = f"{RANKS} --checkpoint-dir checkpoints"
    tally, place, group, seen = Tally("train --ranks 2"), folder / "killed", None, 0
    while tally.count < kills:
        group, kill = group or Group(words, place), choose_kill(chance)
        stage = group.suffer(kill)
        faults = group.outcome(kill, stage)
        more, repeated = check_training(place, whole, kill.kill, seen)
        seen = len(read_rows(place)[0])
        tally.repeated += repeated
        tally.note(kill.kill, stage, [*faults, *more])
        if group.is_over:
            group = None
            if is_trained(place):
                finish_training(place, whole, tally, seen)
                seen = 0
    if place.exists():  # the last one is led to its end as well
        (group or Group(words, place)).end()
        finish_training(place, whole, tally, seen)
    return tally


# --- tune


def kill_search(kills: int, chance: random.Random, folder: Path) -> Tally:
    """Kill searches `kills` times, each until it ends; check what is there after every kill."""
    tally, number, rungs = Tally("tune"), 1, ()
    place = folder / "killed"
    while tally.count < kills:
        kill = choose(chance, SEARCH, "[1]", SEARCH / 2)
        # Another seed is another ladder, in the same store.
        ending = run(f"{TUNE} --seed {number} --store store", place, kill)
        ladder, faults = check_search(place, number, rungs)
        stage = search_stage(ladder, ending)
        tally.note(kill, stage, [*check_ending(ending, kill), *faults])
        rungs = rung_words(ladder)
        if ending.code == 0:
            tally.ended += 1
            tally.faults += check_outcome(ending, number)
            number, rungs = number + 1, ()
    ending = run(f"{TUNE} --seed {number} --store store", place, None)
    _, faults = check_search(place, number, rungs)
    tally.faults += [*check_outcome(ending, number), *faults]
    tally.ended += 1
    return tally


def rung_words(ladder: Ladder | None) -> tuple[str, ...]:
    """Return the rungs of a ladder as text: what was tried, and what came of it."""
    rungs = ladder.rungs if ladder else ()
    return tuple(f"{r.label} {r.outcome} {r.gain}" for r in rungs)


def search_stage(ladder: Ladder | None, ending: Ending) -> str:
    """Return what a search was doing when it was killed, by what it left."""
    if ending.early:
        return ENDED
    if ladder is None:
        return "starting"
    if "going on with" in ending.error:
        return "going on after a kill"
    return f"on rung {len(ladder.rungs) + 1}" if ladder.baseline_run else "measuring the baseline"


def check_search(
    folder: Path, number: int, before: tuple[str, ...]
) -> tuple[Ladder | None, list[str]]:
    """Return the ladder of search `number` and what is wrong with it and the store."""
    store, faults = Store(folder / "store"), []
    for run_id, found in store.all():
        if not isinstance(found, Run):
            faults.append(f"Run {run_id} cannot be read: {found}")
            continue
        files = {path.name for path in (store.runs / run_id).iterdir()}
        if files != {"run.json", *found.artifacts}:
            faults.append(f"Run {run_id} has the files {sorted(files)}")
    ladders = []
    for path in (store.root / "ladders").glob("*/ladder.json"):
        try:
            ladder = LadderFolder(path.parent).load()
        except SteplabError as error:
            faults.append(str(error))
            continue
        if ladder.spec.seed == number:
            ladders.append(ladder)
            known = set(store.ids())
            named = {ladder.baseline_run, ladder.winner_run, *(r.run for r in ladder.rungs)}
            faults += [f"the ladder names the Run {r}" for r in named - known - {""}]
    if len(ladders) > 1:
        faults.append(f"{len(ladders)} ladders of one search")
    ladder = ladders[0] if ladders else None
    after = rung_words(ladder)
    if after[: len(before)] != before:
        faults.append(f"the rungs were {before} and are {after}")
    return ladder, faults


def check_outcome(ending: Ending, number: int) -> list[str]:
    """Return what is wrong with a search that has reached its end."""
    reports = [line for line in ending.text.splitlines() if line.startswith("report ")]
    good = ending.code == 0 and len(reports) == 1
    return [] if good else [f"search {number} ended with {ending.code}: {ending.error[-300:]}"]


# --- the page


def table(tallies: Iterable[Tally]) -> Table:
    """Return the kills by command, stage and signal."""
    names = [number.name for number in SIGNALS]
    rows = []
    for tally in tallies:
        stages = sorted({stage for (stage, _), count in tally.kills.items() if count})
        for stage in stages:
            counts = [tally.kills[stage, name] for name in names]
            rows.append((tally.command, stage, *counts, sum(counts)))
    columns = tuple(map(Column, ("command", "killed while", *names, "all")))
    return Table("kills", columns, tuple(rows))


def summary(tally: Tally) -> str:
    """Return one line about the kills of a command."""
    what = "searches" if tally.command == "tune" else "trainings"
    again = f", {tally.repeated} steps computed again after SIGKILL"
    again = "" if tally.command == "tune" else again
    faults = "no fault" if not tally.faults else f"{len(tally.faults)} FAULTS"
    return f"{tally.command}: {tally.count} kills, {tally.ended} {what} ended{again}: {faults}"


def campaign(shares: dict[str, int], seed: int) -> list[Tally]:
    """Kill each command so many times, in a folder of its own."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="kill-campaign-") as folder:
        return [
            KILLERS[command](kills, chance, Path(folder) / command)
            for command, kills in shares.items()
            if kills
        ]


KILLERS = {"train": kill_training, "ranks": kill_ranks, "tune": kill_search}


def main() -> int:
    """Kill, print the table, write the page; return 1 where something was lost."""
    parser = argparse.ArgumentParser(description="Kill train and tune at random moments.")
    parser.add_argument("--kills-train", type=int, default=100)
    parser.add_argument("--kills-ranks", type=int, default=30)
    parser.add_argument("--kills-tune", type=int, default=50)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1, help="of the first process")
    parser.add_argument("--out", type=Path, default=None, help=f"for example {PAGE.name}")
    args = parser.parse_args()
    if args.processes < 1:
        parser.error(f"--processes must be at least 1, not {args.processes}")
    begun, sums = monotonic(), {}
    kills = {"train": args.kills_train, "ranks": args.kills_ranks, "tune": args.kills_tune}
    shares = [
        {command: (count + i) // args.processes for command, count in kills.items()}
        for i in range(args.processes)
    ]
    seeds = range(args.seed, args.seed + args.processes)
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=fresh) as pool:
        for tally in chain.from_iterable(pool.map(campaign, shares, seeds)):
            sums.setdefault(tally.command, Tally(tally.command)).add(tally)
    tallies = list(sums.values())
    shown = table(tallies)
    print_table(shown)
    lines = [summary(tally) for tally in tallies]
    faults = [fault for tally in tallies for fault in tally.faults]
    print("\n".join([*lines, *faults]))
    if args.out:
        machine = capture_environment()
        flags = " ".join(f"--kills-{command} {count}" for command, count in kills.items())
        command = f"python benchmarks/kill_campaign.py {flags} "
        command += f"--processes {args.processes} --seed {args.seed}"
        about = f"`{command}`, {(monotonic() - begun) / 60:.0f} minutes; {machine.cpu}, "
        about += f"torch {machine.torch}, Python {machine.python}, steplab {machine.steplab}"
        text = "\n\n".join([f"# {PAGE.stem}", about, to_markdown(shown), *lines, *faults])
        args.out.write_text(text + "\n", encoding="utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
