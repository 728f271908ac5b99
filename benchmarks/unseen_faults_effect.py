"""Measure what each fault of a set costs on this machine, without steplab looking at it.

OMP_NUM_THREADS=1 python benchmarks/unseen_faults_effect.py [--set third] [NAME ...]

Both twins of a fault are built from the same seed in one process and their first losses compared;
then they run in turns. The times, by the clock and of the processor (where others use the machine,
the steadier of the two), are the minima of the second half of the rounds, so that what grows from
step to step has grown. Of faults whose effect is memory, the peak of the resident memory
is measured too, in a process per twin, beyond what the imports took. Prints one line of JSON per
fault.
"""

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from unseen_faults import FAULTS, SETS, batch_size, declaration

WARMUP, ROUNDS, STEPS = 4, 8, 3


def step_of(name: str, kind: str) -> Callable[[], object]:
    """Build a twin from seed 0; return its step, which returns the loss."""
    import torch

    torch.manual_seed(0)
    module = importlib.import_module(name)
    made = getattr(module, kind)()
    if module.FAULT["STYLE"] == "loop":
        return made
    from common import device

    model, how = made.model.to(device()), {"fused": True}
    optimizer = (made.optimizer or torch.optim.AdamW)(
        model if made.optimizer else model.parameters(), **how
    )
    batches = iter(made.batches(batch_size(module.FAULT, device(), tiny=False)))

    def step() -> object:
        loss = made.loss(model, next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def pair(name: str) -> dict:
    """Return the first losses and the least step time of both twins."""
    kinds = ("faulty", "clean")
    steps, losses = {}, {}
    for kind in kinds:
        steps[kind] = step_of(name, kind)
        losses[kind] = [float(steps[kind]()) for _ in range(WARMUP)]
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(ROUNDS):
        for kind in kinds:
            times[kind] += [clocked(steps[kind]) for _ in range(STEPS)]
    least = {k: [min(t) for t in zip(*times[k][len(times[k]) // 2 :], strict=True)] for k in kinds}
    apart = max(
        abs(a - b) / max(abs(b), 1e-9)
        for a, b in zip(losses["faulty"], losses["clean"], strict=True)
    )
    wall, cpu = ({k: least[k][clock] for k in kinds} for clock in (0, 1))
    return {"ms": wall, "cpu_ms": cpu, "losses": losses, "losses_apart": apart}


def clocked(step: Callable[[], object]) -> tuple[float, float]:
    """Return the milliseconds of one step, and those for which it had a core."""
    began, worked = time.perf_counter(), time.process_time()
    float(step())  # waits for the device
    return (time.perf_counter() - began) * 1e3, (time.process_time() - worked) * 1e3


def peak(name: str, kind: str) -> float:
    """Return by how many MiB three steps raise the peak of this process's resident memory."""
    import torch

    importlib.import_module(name)
    small = torch.nn.Linear(8, 8)  # what a first step loads is none of the twins' doing
    small(torch.randn(8, 8)).sum().backward()
    torch.optim.AdamW(small.parameters(), fused=True).step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = step_of(name, kind)
    for _ in range(3):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def apart(arguments: list[str]) -> dict:
    """Run this file in a process and a folder of its own; return the JSON that it prints."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    if done.returncode:
        return {"error": done.stderr.strip()[-1500:]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--set", default="third", choices=SETS[2:])
    parser.add_argument("--pair", help=argparse.SUPPRESS)
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = FAULTS / arguments.set
    sys.path[:0] = [str(FAULTS), str(folder), str(FAULTS.parent.parent / "src")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])
    if arguments.pair:
        print(json.dumps(pair(arguments.pair)))
    elif arguments.peak:
        print(json.dumps({"mib": peak(*arguments.peak)}))
    else:
        paths = sorted(folder.glob("*.py"))
        for path in [p for p in paths if not arguments.names or p.stem in arguments.names]:
            declared, line = declaration(path)
            row = {"name": path.stem, "line": line, "cause": declared["CAUSE"]}
            row |= apart(["--set", arguments.set, "--pair", path.stem])
            for kind in ("faulty", "clean") if declared["KIND"] == "memory" else ():
                found = apart(["--set", arguments.set, "--peak", path.stem, kind])
                row |= {f"{kind}_{key}": value for key, value in found.items()}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
