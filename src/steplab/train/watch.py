"""The watch of a rank: who is gone, who holds the others up, and one sentence about it.

Every rank has one. Ranks speak through the store at which they met, not through collectives, so
that they can speak while those are stuck. The first rank that fails tells the user; the others
then fail because of it and end without a word.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import NoReturn, Self

import torch
import torch.distributed as dist

import steplab
from steplab.core.codec import decode, encode
from steplab.core.errors import SteplabError
from steplab.core.spec import Backend
from steplab.parallel.environment import launched_rank, launched_size
from steplab.parallel.world import World, join_launched, leave
from steplab.step.failures import error_sentence, first_sentence
from steplab.trace.lines import innermost_line
from steplab.trace.user_frames import error_line
from steplab.train.stop import Stop, stop_on_signal

POLL_S = 1.0  # between two looks at the clock and the store
ANSWER_S = 5.0  # in which ranks say where they stand
LOST_S = 10.0  # in which a rank that has lost another one waits for somebody who knows why
RECORDED = 2000  # collectives that torch's flight recorder keeps
FAILED = 1  # exit code of a rank that ends because of another one
# gloo raises plain RuntimeErrors, whose text begins with a path inside gloo.
SIGNS_OF_LOSS = ("gloo", "NCCL", "Connection closed", "Connection reset", "Socket")


def run_as_rank(
    work: Callable[[Watch], int],
    device: str,
    backend: Backend | None,
    hang_timeout: float,
) -> int:
    """Join the group that a launcher has started, do the work and return the exit code.

    Whatever fails becomes one sentence, told by the rank where it failed, with its host and line.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))
    try:
        # The group's own limit comes into force only if this watch itself is stuck.
        world = join_launched(device, backend, 2 * hang_timeout + 60)
    except SteplabError as error:
        _say(World(launched_rank(), launched_size()), str(error))
        return error.exit_code
    if not world.is_first:
        warnings.simplefilter("ignore")  # rank 0 gives the same ones
    with stop_on_signal() as stop:
        watch = Watch(world, stop, hang_timeout)
        try:
            with watch:
                code = work(watch)
                dist.barrier()  # a launcher ends all ranks once one of them ends with an error
        except BaseException as error:
            code = watch.tell(error)
            sys.stdout.flush()
            os._exit(code)  # without the farewell of the group, which may wait for the dead
    leave()
    return code


@dataclass(frozen=True)
class Pending:
    """A collective that a rank has begun and that has not ended."""

    name: str  # as in "all_reduce"
    group: str  # the process group's name
    number: int  # which one of that group's it is, from 1


@dataclass(frozen=True)
class Standing:
    """Where a rank is, in its own words."""

    rank: int
    host: str
    step: int
    line: str  # that its main thread executes
    begun: Mapping[str, int] = field(default_factory=dict)  # collectives begun, by group
    pending: Pending | None = None  # the oldest one

    @property
    def name(self) -> str:
        """`rank 1 on node7`."""
        return f"rank {self.rank} on {self.host}"


class Watch:
    """A thread that looks after this rank; `with watch:` around its work.

    `beat(step)` says that the rank has got on. When no beat has come for `hang_timeout` seconds,
    all ranks say where they stand, one of them tells the user, and all end.
    """

    def __init__(self, world: World, stop: Stop, hang_timeout: float) -> None:
        self.world, self.stop, self.hang_timeout = world, stop, hang_timeout
        self.step, self.last_beat = 0, monotonic()
        self.main = threading.get_ident()
        # A connection of its own: the group's may be busy for as long as a collective is stuck.
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=ANSWER_S))
        self.store = dist.PrefixStore("watch", store)
        self.store.set(f"host {world.rank}", socket.gethostname())
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._look, name="steplab-watch", daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:  # else it goes on: the rank has still to end
            self.over.set()

    def beat(self, step: int) -> None:
        """Note that this rank has come to `step`."""
        self.step, self.last_beat = step, monotonic()

    def tell(self, error: BaseException) -> int:
        """Tell of a failure, unless another rank has told of its own; return the exit code."""
        if is_loss(error):
            return self._tell_of_loss(error)
        if isinstance(error, SteplabError):
            sentence, code = str(error), error.exit_code
        elif isinstance(error, KeyboardInterrupt):
            sentence, code = "interrupted.", 128 + signal.SIGINT
        else:
            sentence, code = f"{error_sentence(error)}.", FAILED
        if self._is_first_to_tell():
            _say(self.world, sentence)
        return code

    def _tell_of_loss(self, error: BaseException) -> int:
        """Wait for somebody who knows why a rank is gone; then say which one it is."""
        deadline = monotonic() + LOST_S
        while monotonic() < deadline:
            # SIGTERM: a launcher has seen the dead rank, and tells.
            if self.stop.requested or self._has("told"):
                return FAILED
            sleep(POLL_S / 5)
        self._ask_all()
        if self._is_first_to_tell():
            found = describe_loss(self._standings(), self._hosts())
            _say(self.world, f"{found} ({first_sentence(error)}, {error_line(error)}).")
        return FAILED

    def _look(self) -> None:
        """Look after this rank until its work is over."""
        told = None  # when another rank's failure was seen
        while not self.over.wait(POLL_S):
            if monotonic() - self.last_beat > self.hang_timeout:
                self._tell_of_hang()
            if self._has("asked"):
                self._answer()
            if told is None and self._has("told"):
                told = monotonic()
            if told is not None and monotonic() - told > LOST_S:
                os._exit(FAILED)  # the main thread is stuck in a collective with the failed rank

    def _tell_of_hang(self) -> NoReturn:
        self._ask_all()
        if self._is_first_to_tell():
            _say(self.world, describe_hang(self._standings(), self._hosts(), self.hang_timeout))
        os._exit(FAILED)

    def _ask_all(self) -> None:
        """Ask every rank where it stands, and wait for the answers."""
        with contextlib.suppress(RuntimeError):
            self.store.set("asked", "")
            self._answer()
            deadline = monotonic() + ANSWER_S
            everybody = [f"standing {rank}" for rank in range(self.world.size)]
            while monotonic() < deadline and not self.store.check(everybody):
                sleep(POLL_S / 5)

    def _answer(self) -> None:
        """Say where this rank stands, once."""
        if self._has(f"standing {self.world.rank}"):
            return
        frame = sys._current_frames().get(self.main)
        begun, pending = read_flight_recorder()
        standing = Standing(
            self.world.rank, socket.gethostname(), self.step, running_line(frame), begun, pending
        )
        with contextlib.suppress(RuntimeError):
            self.store.set(f"standing {self.world.rank}", json.dumps(encode(standing)))

    def _standings(self) -> dict[int, Standing]:
        """Return the answers that have come, by rank."""
        found = {}
        for rank in range(self.world.size):
            if self._has(f"standing {rank}"):
                text = self.store.get(f"standing {rank}")
                found[rank] = decode(Standing, json.loads(text), "standing")
        return found

    def _hosts(self) -> list[str]:
        """Return the host of every rank."""
        keys = [f"host {rank}" for rank in range(self.world.size)]
        return [self.store.get(key).decode() if self._has(key) else "unknown" for key in keys]

    def _is_first_to_tell(self) -> bool:
        try:
            return self.store.add("told", 1) == 1
        except RuntimeError:
            return self.world.rank <= 1  # the store has died with its host, as a rule rank 0

    def _has(self, key: str) -> bool:
        try:
            return self.store.check([key])
        except RuntimeError:
            return False


def is_loss(error: BaseException) -> bool:
    """Whether a collective has failed, as a rule because a rank is gone."""
    if isinstance(error, SteplabError):
        return False
    named = isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS_OF_LOSS)
    return isinstance(error, dist.DistError) or named


def describe_loss(standings: Mapping[int, Standing], hosts: list[str]) -> str:
    """Say which ranks are gone, without a full stop."""
    gone = [f"rank {r} on {host}" for r, host in enumerate(hosts) if r not in standings]
    if not gone:
        return "A collective has failed, though all ranks are there"
    return f"{_first(gone)} {'is' if len(gone) == 1 else 'are'} gone"


def describe_hang(standings: Mapping[int, Standing], hosts: list[str], seconds: float) -> str:
    """Say who holds the others up, where, and in which collective they wait."""
    since = f"No step has ended for {seconds:g} s"
    silent = [f"rank {r} on {host}" for r, host in enumerate(hosts) if r not in standings]
    waiting = [s for s in standings.values() if s.pending is not None]
    if not waiting:
        if silent:
            return f"{since}: {_first(silent)} gives no answer."
        stands = standings[min(standings)]
        return f"{since}: no rank waits for another; {stands.name} stands at {stands.line}."
    first = min(waiting, key=lambda s: (s.pending.number if s.pending else 0, s.rank))
    pending = first.pending
    assert pending is not None
    what = f"{pending.name} (number {pending.number}) of step {first.step + 1}, at {first.line}"
    late = [s for s in standings.values() if s.begun.get(pending.group, 0) < pending.number]
    if late:
        who = "; ".join(f"{s.name} has not begun it and stands at {s.line}" for s in late[:3])
        return f"{since}: {first.name} waits in {what}; {who}."
    if silent:
        return f"{since}: {first.name} waits in {what}; {_first(silent)} gives no answer."
    return f"{since}: all ranks wait in {what}, which does not end; look at the network."


def read_flight_recorder() -> tuple[dict[str, int], Pending | None]:
    """Return how many collectives each group has begun, and the oldest that has not ended."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return {}, None
    entries = json.loads(dump(True, False)).get("entries", [])
    begun: dict[str, int] = {}
    pending = None
    for entry in entries:
        group, number = entry["process_group"][0], entry["collective_seq_id"]
        begun[group] = max(begun.get(group, 0), number)
        if pending is None and not entry["retired"] and not entry["is_p2p"]:
            pending = Pending(entry["profiling_name"].partition(":")[2], group, number)
    return begun, pending


def running_line(frame: FrameType | None) -> str:
    """Return the line that a thread executes: of the user's code, else of steplab's."""
    own = str(Path(steplab.__file__).parent)
    frames = list(_outwards(frame))
    user = innermost_line((f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in frames)
    if user:
        return user
    inside = (f for f in frames if f.f_code.co_filename.startswith(own))
    found = next(inside, frames[0] if frames else None)
    return f"{Path(found.f_code.co_filename).name}:{found.f_lineno}" if found else "unknown"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _first(names: list[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _say(world: World, sentence: str) -> None:
    print(f"steplab: {world}: {sentence}", file=sys.stderr, flush=True)
