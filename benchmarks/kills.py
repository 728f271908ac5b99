"""A command of steplab that is killed: started, sent a signal at a moment, watched to its end.

Linux only: processes are found in /proc.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep

SOURCE = Path(__file__).parents[1] / "src"
PATIENCE = 120.0  # seconds in which a process must end by itself or after a signal
GONE = 20.0  # seconds in which its workers must be gone
ENDED = "nothing: it had ended"


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
    process = start(words, folder, token)
    out, err = folder / "out.txt", folder / "err.txt"
    try:
        early = kill is not None and not _kill(process, kill, (out, err))
        code = process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        code, early = process.wait(), False
        with err.open("a") as file:
            file.write(f"\nstill there after {PATIENCE:.0f} s\n")
    left = still_there(token)
    if left:
        with err.open("a") as file:
            file.write(f"\n{left} worker processes stayed behind\n")
    return Ending(code, early, out.read_text(), err.read_text())


def start(words: str, folder: Path, token: str) -> subprocess.Popen[bytes]:
    """Start a command of steplab in `folder`, which gets its out.txt and err.txt."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # the same bits are asked for, whatever machine it is
        "KILL_CAMPAIGN": token,  # by which its workers are found
    }
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "out.txt").open("wb") as stdout, (folder / "err.txt").open("wb") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "steplab", *words.split()],
            cwd=folder,
            env=environment,
            stdout=stdout,
            stderr=stderr,
            preexec_fn=_default_signals,
        )


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


def still_there(token: str) -> int:
    """Return how many processes of a command are left once they had time to notice its end."""
    deadline = monotonic() + GONE
    while (left := processes(f"KILL_CAMPAIGN={token}")) and monotonic() < deadline:
        sleep(0.1)
    return len(left)


def processes(*variables: str) -> list[int]:
    """Return the processes that were started with all these environment variables."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            environment = path.read_bytes().split(b"\0")
            if all(variable.encode() in environment for variable in variables):
                found.append(int(path.parent.name))
    return found


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
