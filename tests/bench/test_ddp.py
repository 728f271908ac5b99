"""The ladder of data parallelism: its rungs, its table, and the gate in front of every rung."""

import json
from dataclasses import replace
from typing import ClassVar

import pytest

from steplab.bench import gated_trials
from steplab.bench.ddp import ladder_table, plan
from steplab.bench.gated_trials import GatedTrials
from steplab.cli.main import main
from steplab.compare.rank_table import rank_table
from steplab.core import Environment, RunSpec, Samples
from steplab.core.errors import MeasurementError, UserError
from steplab.core.run import Clock, Collective, Communication, RankResult, Work, new_run
from steplab.step.batch_size import BatchSearch
from steplab.store import Store
from steplab.techniques.recipes import parse_recipe
from steplab.verify.shapes import GateShape, one_process
from steplab.workers.client import no_progress

ENVIRONMENT = Environment("0", "3.11", "Linux", "cpu", 2, None)
SPEC = RunSpec("gpt", {}, "tiny", ranks=2)
SCHEMES = ["naive", "flat", "overlap", "bucket", "bucket", "ddp", "zero1", "fsdp"]
EXACT = ["bucket", "fsdp"]


def test_the_rungs_keep_the_rest_of_the_recipe():
    specs = plan(replace(SPEC, recipe=parse_recipe("precision=bf16")), [1, 25])
    schemes = [spec.recipe.techniques["parallel"] for spec in specs]
    assert [scheme["data"] for scheme in schemes] == [*SCHEMES, *EXACT]
    assert [scheme.get("exact", False) for scheme in schemes] == [False] * 8 + [True] * 2
    assert [scheme.get("bucket_mb") for scheme in schemes[3:5]] == [1, 25]
    assert all(spec.recipe.techniques["precision"] == {"dtype": "bf16"} for spec in specs)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (replace(SPEC, ranks=1), "Use --ranks 2"),
        (replace(SPEC, recipe=parse_recipe("parallel=flat")), "must not have one"),
    ],
)
def test_a_ladder_needs_ranks_and_chooses_the_schemes_itself(spec, reason):
    with pytest.raises(UserError, match=reason):
        plan(spec)


def ms(*values):
    return Samples(values, "ms")


def measured(spec, **changes):
    clock = Clock(ms(10.0), ms(10.0), ms(0.0), {}, {}, 10.0, "perf_counter")
    run = replace(
        new_run(spec, ENVIRONMENT),
        clock=clock,
        work=Work(100, None, None, None),
        communication=Communication(
            (Collective("all-reduce", 2, 7, 3 * 2**20),),
            {"weights": 2**20, "optimizer state": 2**21},
        ),
        ranks=(RankResult(10.0, 1.0, 3.0, None, 5), RankResult(9.0, 2.0, 2.5, None, 5)),
        verdict="bit-equal",
    )
    return replace(run, **changes)


def test_the_table_shows_what_a_scheme_costs_and_its_verdict():
    naive, *_, bucket = plan(SPEC, [5])[:4]
    red = replace(new_run(bucket, ENVIRONMENT), status="failed", reason="gradients: wrong")
    table = ladder_table([measured(naive), replace(red, verdict="failed")])
    assert table.title == "one step of gpt tiny, batch 4, full, 2 ranks"
    assert table.rows[0] == ("naive", 10.0, 2.0, 3.0, 7, 3.0, 1.0, 2.0, "bit-equal", "ok")
    assert table.rows[1] == ("bucket, 5 MB", *[None] * 7, "failed", "failed: gradients: wrong")


def test_the_price_of_exact_is_printed_where_both_were_measured():
    *_, bucket, _, _, fsdp, exact_bucket, exact_fsdp = plan(SPEC, [5])
    failed = replace(new_run(fsdp, ENVIRONMENT), status="failed", reason="lost")
    slow = Clock(ms(13.4), ms(13.4), ms(0.0), {}, {}, 13.4, "perf_counter")
    runs = [measured(bucket), failed, measured(exact_bucket, clock=slow), measured(exact_fsdp)]
    table = ladder_table(runs)
    assert [row[0] for row in table.rows][2:] == ["bucket, 5 MB, exact", "fsdp, exact"]
    assert table.note.endswith("; bucket, 5 MB, exact took 1.34x as long as bucket, 5 MB")


def test_the_scaling_table_has_the_verdict_and_the_bytes():
    spec = replace(SPEC, recipe=parse_recipe("parallel=flat"))
    alone = measured(replace(spec, ranks=1), ranks=(), verdict="")
    table = rank_table([alone, measured(spec)])
    names = [column.name for column in table.columns]
    rows = [dict(zip(names, row, strict=True)) for row in table.rows]
    assert [row["verdict"] for row in rows] == ["", "bit-equal"]
    assert rows[1]["sent"] == 3.0


class FakeTrials:
    """Notes what it is asked to measure."""

    timeout = 60.0

    def __init__(self):
        self.asked = []

    def trial(self, spec, environment, key="", progress=no_progress, function="", **arguments):
        self.asked.append((function, arguments))
        return new_run(spec, environment)


class FakeReferences:
    """Computes nothing; `problem` is why it could not."""

    problem = None
    folders: ClassVar[list] = []

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def prepare(self, spec, shapes, timeout, progress):
        self.folders.append(self.folder)
        return shapes, self.problem


@pytest.fixture
def gate(monkeypatch):
    """Return (trials, the specs whose truth was computed, the references)."""
    chosen = []

    def choose(references, spec, also_batch, timeout, stage, say):
        chosen.append(spec)
        return [GateShape("own", "", one_process(spec))]

    monkeypatch.setattr(gated_trials, "choose_shapes", choose)
    monkeypatch.setattr(gated_trials, "ReferenceWorker", FakeReferences)
    monkeypatch.setattr(FakeReferences, "folders", [])
    return FakeTrials(), chosen, FakeReferences


def test_one_truth_serves_all_recipes_and_numbers_of_ranks(gate):
    trials, chosen, references = gate
    specs = [replace(spec, accumulate=2) for spec in plan(SPEC, [5])[:3]]
    specs.append(replace(specs[0], ranks=4, accumulate=1))
    with GatedTrials(trials) as gated:
        for spec in specs:
            gated.trial(spec, ENVIRONMENT, "", no_progress)
        gated.trial(replace(specs[0], batch=1), ENVIRONMENT, "", no_progress)
    assert len(chosen) == 2
    assert len(set(references.folders[:4])) == 1 and len(set(references.folders)) == 2
    assert all(function == gated_trials.VERIFIED_TRIAL for function, _ in trials.asked)
    assert trials.asked[0][1]["references"] == references.folders[0]


def test_a_step_of_one_rank_is_not_gated(gate):
    trials, chosen, _ = gate
    with GatedTrials(trials) as gated:
        assert gated.trial(replace(SPEC, ranks=1), ENVIRONMENT, "", no_progress).verdict == ""
    assert trials.asked == [("", {})] and not chosen


def test_what_cannot_be_verified_is_measured_and_says_so(gate, monkeypatch):
    trials, _, references = gate
    monkeypatch.setattr(references, "problem", MeasurementError("fp64 does not fit"))
    with GatedTrials(trials) as gated:
        run = gated.trial(SPEC, ENVIRONMENT, "", no_progress)
    assert (run.verdict, run.notes) == ("unverified", ("gate: fp64 does not fit",))

    def none_fits(*_):
        raise MeasurementError("no truth")

    monkeypatch.setattr(gated_trials, "choose_shapes", none_fits)
    with GatedTrials(trials) as gated:
        assert gated.trial(SPEC, ENVIRONMENT, "", no_progress).verdict == "unverified"


TINY = "--layers 1 --width 32 --ff-width 64 --heads 2 --context 16 --vocab-size 64 --batch 1"


@pytest.mark.slow
def test_the_command_climbs_the_ladder(tmp_path, capsys):
    out = tmp_path / "ladder.json"
    words = ["bench", "ddp", *TINY.split(), "--steps", "2", "--warmup", "1", "--bucket-mb", "1"]
    assert main([*words, "--store", str(tmp_path / "store"), "--out", str(out)]) == 0
    assert json.loads(out.read_text())
    assert "bit-equal" in capsys.readouterr().out


@pytest.mark.slow
def test_every_batch_that_auto_tries_on_ranks_passes_the_gate(tmp_path, capsys, monkeypatch):
    def two_batches(measure):
        runs = [measure(1), measure(2)]
        return BatchSearch(runs[1], tuple(runs), "tried")

    monkeypatch.setattr("steplab.bench.sweep.fastest_batch", two_batches)
    words = ["bench", "step", "gpt", *TINY.removesuffix("1").split(), "auto", "--mode", "full"]
    store = tmp_path / "store"
    assert main([*words, *"--ranks 2 --steps 2 --warmup 1 --store".split(), str(store)]) == 0
    assert "fastest of full, parallel=bucket: batch 2 (tried)" in capsys.readouterr().out
    runs = [run for _, run in Store(store).all()]
    assert [(run.spec.batch, len(run.ranks), run.verdict) for run in runs] == [
        (1, 2, "bit-equal"), (2, 2, "bit-equal"),
    ]  # fmt: skip
