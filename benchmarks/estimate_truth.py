"""Estimates against the card: PYTHONPATH=src python benchmarks/estimate_truth.py predict|measure

`predict` writes what `steplab estimate` expects of twelve steps, on any machine; it is run before
anybody has measured them. `measure` measures them on the card (about four minutes on an H200) and
prints the errors. No size is one that kernel_efficiency.py has timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steplab.core import Column, RunSpec, Table
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
# Rank 0 of 8 whose group does nothing: what sharding itself takes and holds.
SHARDED = (
    ("gpt", "medium", {"context": 1024}, 8, f"{BF16},parallel=fsdp"),
    ("tsmoe", "flagship", {}, 8, f"{BF16},parallel=fsdp"),
)
PREDICTIONS = Path(__file__).parent / "estimate_predictions.json"


def spec_of(workload: str, size: str, config: dict[str, Any], batch: int, recipe: str) -> RunSpec:
    """Return one of the specs."""
    entry = requested_workload(workload)
    chosen = parse_recipe(recipe)
    return RunSpec(
        entry.name,
        entry.resolve(size, config),
        size,
        batch=batch,
        recipe=chosen,
        device="cuda",
        warmup=5,
        steps=12,
        source=entry.source,
        ranks=8 if "parallel" in chosen.techniques else 1,
    )


def specs() -> list[RunSpec]:
    """Return the twelve, and two of rank 0 of 8."""
    found = [
        spec_of(workload, size, config, batch, recipe)
        for workload, size, config, batches in MODELS
        for batch, recipe in zip(batches, RECIPES.values(), strict=True)
    ]
    return found + [spec_of(*one) for one in SHARDED]


def predict_all(path: Path) -> None:
    """Write the predictions, one after the other."""
    from steplab.estimate.cluster import Cluster
    from steplab.estimate.kernels import find_named, shipped_times
    from steplab.estimate.predict import StepCounts, predict
    from steplab.hardware.links import Link

    silent = Link("silent", 1e9, 1.0, 0.0, "a group that does nothing")
    card, cluster = find_named("h200"), Cluster(silent, silent)
    found = []
    for spec in specs():
        prediction = predict(StepCounts(spec, card, shipped_times()), cluster)
        found.append(_shown(prediction))
        print(f"{spec.title} {spec.recipe}: {prediction.step_ms:.1f} ms, "
              f"{prediction.peak_bytes / 2**30:.2f} GiB", flush=True)  # fmt: skip
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _shown(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON, its own model named without the folder it lies in."""
    data: dict[str, Any] = encode(prediction)
    data["spec"]["workload"] = Path(prediction.spec.workload).name
    return data


def measure_all(path: Path, out: Sequence[Path]) -> None:
    """Measure every spec and compare."""
    from steplab.parallel.silent import join_silent
    from steplab.parallel.world import leave
    from steplab.step.trial import trial

    expected = [decode(Prediction, one, "prediction") for one in json.loads(path.read_text())]
    rows: list[tuple[Any, ...]] = []
    for spec, prediction in zip(specs(), expected, strict=True):
        if spec.ranks > 1:
            join_silent(spec.ranks)
        try:
            run = trial(spec)
        finally:
            leave()
        title = f"{Path(spec.workload).name} {spec.size} batch {spec.batch}, {spec.recipe}"
        errors = prediction.error(run)
        if run.clock is None or run.memory is None or errors is None:
            rows.append((title, prediction.step_ms, *[None] * 8, f"{run.status}: {run.reason}"))
            continue
        rows.append((
            title, prediction.step_ms, prediction.low_ms, prediction.high_ms,
            run.clock.step.median, 100 * errors[0], prediction.holds(run),
            prediction.peak_bytes / 2**30, run.memory.peak / 2**30, 100 * (errors[1] or 0.0),
            f"host {run.clock.host.median:.1f} ms, busy {run.ran.device_busy_ms if run.ran else 0}",
        ))  # fmt: skip
        print(rows[-1], flush=True)
        for file in out:
            write_table(_table(rows, run.environment.conditions), file)
    print_table(_table(rows, run.environment.conditions))


def _table(rows: Sequence[tuple[Any, ...]], conditions: str) -> Table:
    columns = (
        *(Column("what"), Column("predicted", "ms"), Column("low", "ms"), Column("high", "ms")),
        *(Column("measured", "ms"), Column("error", "%"), Column("inside")),
        *(Column("predicted peak", "GiB"), Column("peak", "GiB"), Column("error of memory", "%")),
        Column("note"),
    )
    known = [row for row in rows if row[5] is not None]
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
