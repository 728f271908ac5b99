"""Estimates against the card: PYTHONPATH=src python benchmarks/estimate_truth.py predict|measure

`predict` writes what `steplab estimate` expects of twelve steps, on any machine; it is run before
anybody has measured them. `measure` measures them on the card (about four minutes on an H200) and
prints the errors. No size is one that kernel_efficiency.py has timed.

Sharded steps follow: each on one rank, as rank 0 of 8 in a group that does nothing, and on two gloo
ranks that share the card. The second is also predicted at the pace of the first as it was
measured; the third has no time worth a look, only memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from steplab.core import Column, Run, RunSpec, Table
from steplab.core.codec import decode, encode
from steplab.core.errors import SteplabError
from steplab.core.prediction import Prediction
from steplab.report.export import write_table
from steplab.report.terminal import print_table
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.workload import requested_workload

OWN = str(Path(__file__).parent / "plain_transformer.py") + ":make"
BF16 = "precision=bf16,optimizer=fused"
RECIPES = {
    "plain": "plain",
    "bf16-weights": "precision=bf16-weights,optimizer=one-pass",
    "checkpointing": f"{BF16},checkpointing=blocks",
    "compiled": f"{BF16},compile=blocks",
}
# Workload, preset, settings, and the batch of each recipe.
MODELS: tuple[tuple[str, str, dict[str, Any], tuple[int, ...]], ...] = (
    ("gpt", "small", {"context": 1024}, (16, 64, 64, 64)),
    ("tsmoe", "flagship", {}, (4, 16, 16, 16)),
    (OWN, "", {"width": 1024, "heads": 16, "layers": 12}, (16, 64, 64, 64)),
)
# Workload, preset, settings, sequences on a rank: what sharding itself takes and holds.
SHARDED: tuple[tuple[str, str, dict[str, Any], int], ...] = (
    ("gpt", "medium", {"context": 1024}, 8),
    ("tsmoe", "flagship", {}, 8),
)
PREDICTIONS = Path(__file__).parent / "estimate_predictions.json"


def spec_of(workload: str, size: str, config: dict[str, Any], batch: int, recipe: str) -> RunSpec:
    """Return one of the specs, on one rank."""
    entry = requested_workload(workload)
    return RunSpec(
        entry.name,
        entry.resolve(size, config),
        size,
        batch=batch,
        recipe=parse_recipe(recipe),
        device="cuda",
        warmup=5,
        steps=12,
        source=entry.source,
    )


def specs() -> list[RunSpec]:
    """Return the twelve, and three of each that is sharded: one rank, rank 0 of 8, two ranks."""
    found = [
        spec_of(workload, size, config, batch, recipe)
        for workload, size, config, batches in MODELS
        for batch, recipe in zip(batches, RECIPES.values(), strict=True)
    ]
    for one in SHARDED:
        sharded = spec_of(*one, f"{BF16},parallel=fsdp")
        found += [
            spec_of(*one, BF16),
            replace(sharded, ranks=8),
            replace(sharded, ranks=2, backend="gloo", warmup=1, steps=2),
        ]
    return found


def predict_all(path: Path) -> None:
    """Write the predictions, one after the other."""
    found = []
    for spec in specs():
        prediction = predicted(spec)
        found.append(_shown(prediction))
        print(f"{spec.title} {spec.recipe}: {prediction.step_ms:.1f} ms, "
              f"{prediction.peak_bytes / 2**30:.2f} GiB", flush=True)  # fmt: skip
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def predicted(spec: RunSpec, single: Run | None = None) -> Prediction:
    """Return what is expected of a spec on an H200, in a group that does nothing."""
    from steplab.estimate.cluster import Cluster
    from steplab.estimate.kernels import find_named, shipped_times
    from steplab.estimate.predict import StepCounts, predict
    from steplab.hardware.links import Link

    silent = Link("silent", 1e9, 1.0, 0.0, "a group that does nothing")
    counts = StepCounts(spec, find_named("h200"), shipped_times())
    return predict(counts, Cluster(silent, silent), single=single)


def _shown(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON, its own model named without the folder it lies in."""
    data: dict[str, Any] = encode(prediction)
    data["spec"]["workload"] = Path(prediction.spec.workload).name
    return data


def measure_all(path: Path, out: Sequence[Path]) -> None:
    """Measure every spec and compare."""
    from steplab.probes.environment import capture_environment
    from steplab.workers.client import WorkerLost

    expected = [decode(Prediction, one, "prediction") for one in json.loads(path.read_text())]
    conditions = capture_environment().conditions
    rows: list[tuple[Any, ...]] = []
    single: Run | None = None  # of the last step on one rank
    for spec, prediction in zip(specs(), expected, strict=True):
        title = f"{Path(spec.workload).name} {spec.size} batch {spec.batch}, {spec.recipe}"
        title += f", {spec.ranks} ranks" if spec.ranks > 1 else ""
        try:
            run = measured(spec)
        except WorkerLost as lost:
            rows.append((title, prediction.step_ms, *[None] * 9, f"{lost.status}: {lost.reason}"))
            continue
        errors = prediction.error(run)
        if run.clock is None or run.memory is None or errors is None:
            rows.append((title, prediction.step_ms, *[None] * 9, f"{run.status}: {run.reason}"))
            continue
        took = run.clock.step.median
        single = run if spec.ranks == 1 else single
        timed = spec.backend != "gloo"
        from_one = predicted(spec, single).step_ms if timed and spec.ranks > 1 else None
        rows.append((
            title, prediction.step_ms, prediction.low_ms, prediction.high_ms,
            took, 100 * errors[0] if timed else None, prediction.holds(run) if timed else None,
            100 * (from_one / took - 1) if from_one else None,
            prediction.peak_bytes / 2**30, run.memory.peak / 2**30, 100 * (errors[1] or 0.0),
            f"host {run.clock.host.median:.1f} ms, busy {run.ran.device_busy_ms if run.ran else 0}",
        ))  # fmt: skip
        print(rows[-1], flush=True)
        for file in out:
            write_table(_table(rows, conditions), file)
    print_table(_table(rows, conditions))


def measured(spec: RunSpec) -> Run:
    """Measure a spec on this card: alone, as rank 0 of many, or on ranks that share it."""
    from steplab.estimate.measured import be_first
    from steplab.workers.ranks import start_worker

    if spec.backend != "gloo":
        return be_first(spec)
    with start_worker(spec) as ranks:
        return ranks.call("steplab.step.trial:trial", Run, timeout=120, spec=spec)


def _table(rows: Sequence[tuple[Any, ...]], conditions: str) -> Table:
    columns = (
        *(Column("what"), Column("predicted", "ms"), Column("low", "ms"), Column("high", "ms")),
        *(Column("measured", "ms"), Column("error", "%"), Column("inside")),
        Column("error from one rank", "%"),
        *(Column("predicted peak", "GiB"), Column("peak", "GiB"), Column("error of memory", "%")),
        Column("note"),
    )
    known = [row for row in rows if row[5] is not None][:12]
    note = conditions
    if known:
        middle = statistics.median(abs(row[5]) for row in known)
        inside = sum(bool(row[6]) for row in known)
        note = f"median error of time {middle:.1f} %, {inside} of {len(known)} inside\n{conditions}"
    return Table("estimates against measurements", columns, tuple(rows), note)


def main() -> None:
    """Predict or measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("predict", "measure"))
    parser.add_argument("--predictions", type=Path, default=PREDICTIONS, help="the file of them")
    parser.add_argument("--out", type=Path, nargs="+", default=[], help=".md, .csv or .json")
    args = parser.parse_args()
    try:
        if args.what == "predict":
            predict_all(args.predictions)
        else:
            measure_all(args.predictions, args.out)
    except SteplabError as error:
        sys.exit(f"estimate_truth.py: {error}")


if __name__ == "__main__":
    main()
