"""Kills of a training on two ranks: of a rank or the launcher, at the start, in a step, in a save.

The launcher starts killed ranks again (`--max-restarts`). After anything that ends the launcher,
the same command must be given again, as a user would.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from kills import ENDED, PATIENCE, Ending, Kill, check_ending, processes, start, still_there

LAUNCHER = "launcher"
VICTIMS = ("rank 0", "rank 1", LAUNCHER)
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)  # two of three cannot be caught
STARTING, TRAINING, SAVING = "starting", "training", "saving"
START_S = 4.0  # in which ranks import torch and meet
STEPS_S = 0.5  # of steps and saves before the moment of a kill
SAVE_S = 0.02  # from the first to the last file of a checkpoint


@dataclass(frozen=True)
class RankKill:
    """Whom to kill, how, and when."""

    victim: str
    moment: str
    kill: Kill  # so many seconds after the start or the first row of the log

    @property
    def ends_the_launcher(self) -> bool:
        """Whether the same command must be given again; else the launcher restarts its ranks."""
        return self.victim == LAUNCHER or self.kill.number != signal.SIGKILL


def choose_kill(chance: random.Random) -> RankKill:
    """Draw a victim, a moment and a signal."""
    moment = chance.choice((STARTING, TRAINING, SAVING))
    seconds = chance.uniform(0.0, START_S if moment == STARTING else STEPS_S)
    return RankKill(chance.choice(VICTIMS), moment, Kill(chance.choice(SIGNALS), seconds))


class Group:
    """A launcher and its ranks, which train in `folder`."""

    def __init__(self, words: str, folder: Path) -> None:
        self.folder, self.token = folder, secrets.token_hex(8)
        self.process = start(words, folder, self.token)
        self.restarts = 0
        self._note_start()

    def _note_start(self) -> None:
        self.begun = monotonic()
        self.steps_before, self.drafts_before = self._steps(), self._drafts()

    def suffer(self, kill: RankKill) -> str:
        """Kill at the moment asked for; return what it was doing, or ENDED if it came too late."""
        if kill.moment == STARTING:
            self._wait_until(lambda: monotonic() > self.begun + kill.kill.seconds)
        else:
            self._wait_until(self._has_stepped)
            sleep(kill.kill.seconds)
        self._wait_until(lambda: self._process(kill.victim) is not None)
        process = self._process(kill.victim)
        if kill.moment == SAVING:
            self._wait_until(self._is_saving, 0.0005)
            sleep(kill.kill.seconds / STEPS_S * SAVE_S)
        saving, stepped = self._is_saving(), self._has_stepped()
        if process is None or self.is_over:
            return ENDED
        try:
            os.kill(process, kill.kill.number)
        except ProcessLookupError:
            return ENDED
        stage = SAVING if saving else TRAINING if stepped else STARTING
        return f"{stage}, {kill.victim}"

    def outcome(self, kill: RankKill, stage: str) -> list[str]:
        """Wait until the ranks are started again or all is over; return what is wrong with it."""
        if kill.ends_the_launcher or stage == ENDED:
            return check_ending(self.end(), kill.kill)
        self.restarts += 1
        said, error = f"restart {self.restarts} of", self.folder / "err.txt"
        if not self._wait_until(lambda: said in error.read_text()):
            return ["the ranks were not started again", *check_ending(self.end(), kill.kill)]
        self._note_start()
        return []

    def end(self) -> Ending:
        """Wait for the end of the launcher, then for that of its ranks."""
        late = ""
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code, late = self.process.wait(), "still there"
        left = still_there(self.token)
        error = (self.folder / "err.txt").read_text() + late
        error += f"{left} ranks stayed behind" if left else ""
        return Ending(code, code == 0, (self.folder / "out.txt").read_text(), error)

    @property
    def is_over(self) -> bool:
        """Whether the launcher has ended."""
        return self.process.poll() is not None

    def _wait_until(self, condition: Callable[[], bool], poll: float = 0.01) -> bool:
        """Wait; return False when the launcher has ended, or nothing has come of it."""
        deadline = monotonic() + PATIENCE
        while not condition():
            if self.process.poll() is not None or monotonic() > deadline:
                return False
            sleep(poll)
        return True

    def _steps(self) -> int:
        log = self.folder / "checkpoints" / "metrics.jsonl"
        return log.read_text().count("train/loss") if log.exists() else 0

    def _has_stepped(self) -> bool:
        return self._steps() > self.steps_before

    def _drafts(self) -> set[str]:
        return {path.name for path in (self.folder / "checkpoints").glob(".draft*")}

    def _is_saving(self) -> bool:
        return bool(self._drafts() - self.drafts_before)  # others were left by dead ranks

    def _process(self, victim: str) -> int | None:
        if victim == LAUNCHER:
            return self.process.pid
        found = processes(f"KILL_CAMPAIGN={self.token}", f"RANK={victim[-1]}")
        return found[0] if found else None
