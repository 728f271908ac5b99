"""Inputs drawn by hypothesis, opened in a sandbox; what goes wrong is kept as a small file."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Self

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky

from tests.fuzz.damage import Damage, damages
from tests.fuzz.readers import READERS, Files, Reader

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).with_name("corpus")
ROUND = 150  # inputs of one reader before the next reader has its turn
ROUNDS = 10_000  # more than anybody runs: every round of every seed has a number of its own
PATIENCE = 90.0  # seconds of the clock; the sandbox itself counts CPU time


class Sandbox:
    """The process that opens inputs; a new one follows one that hangs or dies."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="fuzz-"))
        self.process: subprocess.Popen[bytes] | None = None

    def open(self, command: str, files: Files) -> list[str]:
        """Open an input; return what was wrong with it, each as "kind: what"."""
        process = self.process or self._start()
        assert process.stdin is not None and process.stdout is not None
        packed = {name: base64.b64encode(data).decode() for name, data in files.items()}
        request = json.dumps({"command": command, "files": packed})
        try:
            process.stdin.write(request.encode() + b"\n")
            process.stdin.flush()
            line = self._read_line(process)
        except BrokenPipeError:
            line = b""
        if line is None:
            self.close_process()
            return [f"hang: no answer within {PATIENCE:.0f} s"]
        if not line:
            code = process.wait()
            self.close_process()
            return [f"crash: the process ended with {code}"]
        findings: list[str] = json.loads(line)
        return findings

    def _read_line(self, process: subprocess.Popen[bytes]) -> bytes | None:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
            if not selector.select(PATIENCE):
                return None
        return process.stdout.readline()  # type: ignore[union-attr]

    def _start(self) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        environment = {
            **os.environ,
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.root),
            "COLUMNS": "200",
            "CUDA_VISIBLE_DEVICES": "",  # readers need no GPU
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.sandbox", str(self.root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
            env=environment,
            cwd=ROOT,
        )
        return self.process

    def close_process(self) -> None:
        """End the process; the next input gets a new one."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    stream.close()  # type: ignore[union-attr]
        self.process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close_process()
        shutil.rmtree(self.root, ignore_errors=True)


class Inputs:
    """The honest files of every reader, made once, and inputs damaged from them."""

    def __init__(self) -> None:
        self.made: dict[str, Files] = {}

    def honest(self, reader: Reader) -> Files:
        """Return the honest files of a reader."""
        if reader.name not in self.made:
            with tempfile.TemporaryDirectory(prefix="fuzz-honest-") as folder:
                self.made[reader.name] = reader.honest(Path(folder))
        return self.made[reader.name]

    def damaged(self, reader: Reader, damage: Damage) -> Files:
        """Return the files of an input after the damage."""
        files = self.honest(reader)
        data = damage.apply(files[damage.file], reader.layers[damage.file])
        return reader.finish({**files, damage.file: data})


class Found(AssertionError):
    """An input that did what none may do."""


@dataclass
class Tally:
    """What the inputs of one reader did."""

    reader: str
    tried: int = 0
    findings: dict[str, Damage] = field(default_factory=dict)  # the first of each kind and place

    def count(self, *kinds: str) -> int:
        """Return how many different findings are of these kinds."""
        return sum(finding.split(":")[0] in kinds for finding in self.findings)

    def knows(self, finding: str) -> bool:
        """Return whether there is a finding of this kind and place already."""
        return place_of(finding) in map(place_of, self.findings)


def add_up(campaigns: Iterable[list[Tally]]) -> list[Tally]:
    """Return one tally for each reader: all inputs, and what several found once."""
    sums: dict[str, Tally] = {}
    for tally in itertools.chain.from_iterable(campaigns):
        total = sums.setdefault(tally.reader, Tally(tally.reader))
        total.tried += tally.tried
        total.findings |= {f: d for f, d in tally.findings.items() if not total.knows(f)}
    return list(sums.values())


def check_honest(reader: Reader, sandbox: Sandbox, inputs: Inputs) -> None:
    """Open an honest input by every command: the sandbox must have nothing against it."""
    for command in reader.commands:
        wrong = sandbox.open(command, inputs.honest(reader))
        assert not wrong, f"{reader.name}: an honest input of {command!r}: {wrong}"


def fuzz(
    reader: Reader,
    sandbox: Sandbox,
    inputs: Inputs,
    tally: Tally,
    examples: int,
    number: int | None = None,
    go_on: Callable[[], bool] = lambda: True,
) -> Found | None:
    """Open `examples` inputs of a reader; return the first finding that is not in the tally.

    Without a `number` the inputs are always the same.
    """
    found: list[Found] = []  # the last is the smallest

    def opens(damage: Damage) -> None:
        if not go_on():
            return
        tally.tried += 1
        command = reader.commands[damage.command]
        for finding in sandbox.open(command, inputs.damaged(reader, damage)):
            if not tally.knows(finding):
                found.append(Found(finding, damage))
                raise found[-1]

    drawn = given(damages(dict(reader.layers), len(reader.commands)))(opens)
    if number is not None:
        drawn = seed(number)(drawn)
    run = settings(
        max_examples=examples,
        derandomize=number is None,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )(drawn)
    with contextlib.suppress(Found, Flaky):  # flaky: the time was over while it shrank
        run()
    if not found:
        return None
    finding, damage = found[-1].args
    tally.findings[finding] = damage
    return found[-1]


def fuzz_in_turn(names: list[str], minutes: float, keep: bool, first: int) -> list[Tally]:
    """Fuzz the readers in turn until the time is over; print what is found, return the tallies."""
    chosen, inputs, begun = readers(names), Inputs(), monotonic()
    tallies = {reader.name: Tally(reader.name) for reader in chosen}

    def in_time() -> bool:
        return monotonic() - begun < 60 * minutes

    with Sandbox() as sandbox:
        for reader in chosen:
            check_honest(reader, sandbox, inputs)
        print(f"seed {first}: honest inputs are read, {monotonic() - begun:.0f} s", flush=True)
        begun = monotonic()  # the minutes are those of damaged inputs
        for number in itertools.count(first * ROUNDS):
            for reader in chosen:
                if in_time():
                    tally = tallies[reader.name]
                    found = fuzz(reader, sandbox, inputs, tally, ROUND, number, in_time)
                    if found is not None:
                        finding, damage = found.args
                        print(f"seed {first}, {reader.name}: {finding}\n  {damage}", flush=True)
                        if keep:
                            print(f"  {save(reader, damage, inputs)}", flush=True)
            total = sum(tally.tried for tally in tallies.values())
            spent = (monotonic() - begun) / 60
            print(f"seed {first}, {spent:.1f} min: {total:,} inputs", flush=True)
            if not in_time():
                break
    return list(tallies.values())


def place_of(finding: str) -> str:
    """Return what two inputs with the same fault have in common: its kind and its place."""
    kind, _, rest = finding.partition(":")
    return f"{kind}{rest[rest.rfind('(') :] if rest.endswith(')') else rest[:40]}"


def save(reader: Reader, damage: Damage, inputs: Inputs, corpus: Path = CORPUS) -> Path:
    """Keep the damaged file of an input; the others are made anew where it is opened again."""
    data = inputs.damaged(reader, damage)[damage.file]
    digest = hashlib.sha256(data).hexdigest()[:8]
    folder = corpus / folder_name(reader) / f"{digest}-{damage.command}"
    target = folder / damage.file
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    return target


def folder_name(reader: Reader) -> str:
    """Return the folder of a reader in the corpus."""
    return "".join(c if c.isalnum() else "_" for c in reader.name)


def saved(reader: Reader, inputs: Inputs, corpus: Path = CORPUS) -> list[tuple[str, str, Files]]:
    """Return the kept inputs of a reader: (name, command, files)."""
    found = []
    for folder in sorted((corpus / folder_name(reader)).glob("*-*")):
        files = dict(inputs.honest(reader))
        for path in (p for p in folder.rglob("*") if p.is_file()):
            files[str(path.relative_to(folder))] = path.read_bytes()
        command = reader.commands[int(folder.name.rsplit("-", 1)[1])]
        found.append((folder.name, command, reader.finish(files)))
    return found


def readers(names: Sequence[str]) -> list[Reader]:
    """Return the readers of these names; all where none is given."""
    return [reader for reader in READERS if not names or reader.name in names]
