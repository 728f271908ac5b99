"""Kill `train` and `tune` at random moments, start them again, and check that nothing is lost.

    PYTHONPATH=src python benchmarks/kill_campaign.py --kills-train 100 --kills-tune 50 --seed 1

`--processes 10` divides the kills among ten campaigns, each with its own folders and seed.

A training is killed again and again until it ends, then another one begins. Whatever happened to
it, every step that it logged must have the loss of an undisturbed run, bit for bit; no step may be
missing; after a signal that can be caught none may be computed twice; and its last checkpoint must
hold the same bytes. A search must go on with the ladder that it left, every Run in its store must
be readable, and none of its worker processes may stay behind. Linux only: processes are counted in
/proc.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from time import monotonic, sleep

from steplab.core import Column, Run, Table
from steplab.core.errors import SteplabError, UserError
from steplab.core.ladder import Ladder
from steplab.probes.environment import capture_environment
from steplab.report.export import to_markdown
from steplab.report.terminal import print_table
from steplab.store import Store
from steplab.train.checkpoint import read_progress
from steplab.train.checkpoint_files import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    RNG_FILE,
    list_checkpoints,
    newest_checkpoint,
    read_verified_manifest,
)
from steplab.tune.folder import LadderFolder

SOURCE = Path(__file__).parents[1] / "src"
PAGE = Path(__file__).with_name("kill_campaign_cpu.md")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STEPS, SAVE_EVERY = 150, 3
TRAIN = (
    "train --hidden-size 16 --n-decoder-layers 2 --n-head 2 --num-experts 4 --d-ff 16 --d-expert 8 "
    f"--seq-max-len 40 --horizons 1,8 --batch-size 4 --steps-per-epoch {STEPS} --log-every 1 "
    f"--checkpoint-every {SAVE_EVERY} --validate-every 0 --validation-batches 1 --keep-last 2"
)
TUNE = (
    "tune gpt --size tiny --width 32 --ff-width 64 --layers 1 --heads 2 --context 16 "
    "--vocab-size 64 --batch 2 --budget 1"
)
SEARCH = 60.0  # seconds of that budget
# Half of the kills count from the start of the process, which is mostly `import torch`; the others
# from its first step or rung, so that short moments like saving are hit as often.
FROM_START = 0.5
PATIENCE = 120.0  # seconds in which a process must end by itself or after a signal
ENDED = "nothing: it had ended"
GONE = 20.0  # seconds in which its workers must be gone


@dataclass(frozen=True)
class Kill:
    """When a process is killed: so many seconds after its start, or after its output has `mark`."""

    number: signal.Signals
    seconds: float
    mark: str = ""


@dataclass(frozen=True)
class Ending:
    """What a process that was to be killed has left."""

    code: int  # negative: the signal that ended it
    early: bool  # it had ended before the signal
    text: str
    error: str


@dataclass
class Tally:
    """What the kills of one command led to."""

    command: str
    kills: Counter[tuple[str, str]] = field(default_factory=Counter)  # by stage and signal
    ended: int = 0  # trainings or searches that reached their end
    repeated: int = 0  # steps computed again after SIGKILL
    faults: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """All kills."""
        return sum(self.kills.values())

    def add(self, other: Tally) -> None:
        """Add what another campaign saw."""
        self.kills += other.kills
        self.ended += other.ended
        self.repeated += other.repeated
        self.faults += other.faults

    def note(self, kill: Kill, stage: str, faults: Iterable[str]) -> None:
        """Count a kill, unless it came too late; print it, and what it broke."""
        self.kills[stage, kill.number.name] += stage != ENDED
        print(f"{self.command} {self.count}: {kill.number.name} while {stage}", flush=True)
        for fault in faults:
            self.faults.append(f"{self.command} {self.count}, {kill.number.name}, {stage}: {fault}")
            print(f"  FAULT {fault}", flush=True)


def run(words: str, folder: Path, kill: Kill | None) -> Ending:
    """Run a command of steplab in `folder` and kill it; None lets it end by itself."""
    token = secrets.token_hex(8)
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # the same bits are asked for, whatever machine it is
        "KILL_CAMPAIGN": token,  # by which its workers are found
    }
    folder.mkdir(parents=True, exist_ok=True)
    out, err = folder / "out.txt", folder / "err.txt"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "steplab", *words.split()],
            cwd=folder,
            env=environment,
            stdout=stdout,
            stderr=stderr,
            preexec_fn=_default_signals,
        )
    try:
        early = kill is not None and not _kill(process, kill, (out, err))
        code = process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        code, early = process.wait(), False
        with err.open("a") as file:
            file.write(f"\nstill there after {PATIENCE:.0f} s\n")
    left = _still_there(token)
    if left:
        with err.open("a") as file:
            file.write(f"\n{left} worker processes stayed behind\n")
    return Ending(code, early, out.read_text(), err.read_text())


def _default_signals() -> None:
    """A shell starts background jobs with SIGINT ignored, and nohup with SIGHUP ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _kill(process: subprocess.Popen[bytes], kill: Kill, files: tuple[Path, Path]) -> bool:
    """Send the signal at its moment; return whether there was still somebody to receive it."""
    deadline = monotonic() + PATIENCE
    while kill.mark and not any(kill.mark in file.read_text() for file in files):
        if process.poll() is not None or monotonic() > deadline:
            return False
        sleep(0.01)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(kill.seconds)
        return False
    process.send_signal(kill.number)
    return True


def _still_there(token: str) -> int:
    """Return how many processes of a command are left once they had time to notice its end."""
    deadline = monotonic() + GONE
    while (count := _count_processes(token)) and monotonic() < deadline:
        sleep(0.1)
    return count


def _count_processes(token: str) -> int:
    count = 0
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            count += f"KILL_CAMPAIGN={token}".encode() in environment.read_bytes()
    return count


def choose(chance: random.Random, life: float, mark: str, rest: float) -> Kill:
    """Draw a signal and a moment: within `life` seconds of the start, or `rest` of the mark."""
    number = chance.choice(SIGNALS)
    if chance.random() < FROM_START:
        return Kill(number, chance.uniform(0.0, life))
    return Kill(number, chance.uniform(0.0, rest), mark)


def check_ending(ending: Ending, kill: Kill) -> list[str]:
    """Return what is wrong with how a process ended: its exit code, its words, its workers."""
    faults = []
    allowed = {-kill.number, 128 + kill.number} if not ending.early else {0}
    if ending.code not in allowed and not (ending.code == 0 and kill.number != signal.SIGKILL):
        faults.append(f"exit code {ending.code}")
    for words in ("Traceback", "Exception ignored", "stayed behind", "still there", "Warning"):
        if words in ending.error:
            faults.append(" | ".join(ending.error.strip().splitlines()[-3:]))
            break
    return faults


# --- train


@dataclass(frozen=True)
class Undisturbed:
    """A training that nobody killed: its losses by step, its last checkpoint, its seconds."""

    losses: dict[int, float]
    last: Path
    seconds: float
    seconds_of_steps: float


def undisturbed_training(folder: Path) -> Undisturbed:
    """Train once without a kill."""
    begun = monotonic()
    ending = run(f"{TRAIN} --checkpoint-dir checkpoints", folder, None)
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
    whole = undisturbed_training(folder / "undisturbed")
    tally, number, seen = Tally("train"), 0, 0
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
        newest = newest_checkpoint(place / "checkpoints")
        if newest is not None and read_progress(newest).step == STEPS:
            tally.faults += [f"training {number}: {fault}" for fault in same_files(newest, whole)]
            tally.ended += 1
            number, seen = number + 1, 0
            shutil.rmtree(place)
    if place.exists():  # the last one is led to its end as well
        resume = " --resume" if newest_checkpoint(place / "checkpoints") else ""
        ending = run(f"{TRAIN} --checkpoint-dir checkpoints{resume}", place, None)
        newest = newest_checkpoint(place / "checkpoints")
        assert ending.code == 0 and newest is not None, ending.error
        tally.faults += [f"training {number}: {fault}" for fault in same_files(newest, whole)]
        tally.ended += 1
    return tally


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
            if row["step"] == 1 and at < SAVE_EVERY:  # killed before anything was saved
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
    names = (MODEL_FILE, OPTIMIZER_FILE, RNG_FILE)
    return [
        f"{name} differs"
        for name in names
        if (newest / name).read_bytes() != (whole.last / name).read_bytes()
    ]


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
    what = "trainings" if tally.command == "train" else "searches"
    again = f", {tally.repeated} steps computed again after SIGKILL"
    again = again if tally.command == "train" else ""
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


KILLERS = {"train": kill_training, "tune": kill_search}


def main() -> int:
    """Kill, print the table, write the page; return 1 where something was lost."""
    parser = argparse.ArgumentParser(description="Kill train and tune at random moments.")
    parser.add_argument("--kills-train", type=int, default=100)
    parser.add_argument("--kills-tune", type=int, default=50)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1, help="of the first process")
    parser.add_argument("--out", type=Path, default=None, help=f"for example {PAGE.name}")
    args = parser.parse_args()
    begun, sums = monotonic(), {}
    kills = {"train": args.kills_train, "tune": args.kills_tune}
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
        command = f"python benchmarks/kill_campaign.py --kills-train {args.kills_train} "
        command += f"--kills-tune {args.kills_tune} --processes {args.processes} --seed {args.seed}"
        about = f"`{command}`, {(monotonic() - begun) / 60:.0f} minutes; {machine.cpu}, "
        about += f"torch {machine.torch}, Python {machine.python}, steplab {machine.steplab}"
        text = "\n\n".join([f"# {PAGE.stem}", about, to_markdown(shown), *lines, *faults])
        args.out.write_text(text + "\n", encoding="utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
