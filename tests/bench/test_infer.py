import numpy as np
import pytest

from steplab.bench import infer
from steplab.bench.infer import ForecastTrials, Grid, infer_table, plan, uncached_calls
from steplab.bench.sweep import sweep
from steplab.cli.main import main
from steplab.core import PLAIN, Environment
from steplab.core.errors import MeasurementError, UserError
from steplab.store import Store
from steplab.techniques.recipes import parse_recipe

LAPTOP = Environment("0", "3.11", "Linux", "a CPU", cores=2, memory_bytes=None)


def grid(**changes):
    options = {"sizes": ["tiny"], "batches": [2], "horizons": [9], "context": 20, "calls": 2}
    options |= {"recipes": [PLAIN], "device": "cpu", "warmup": 0, **changes}
    return Grid(**options)


def measured(specs, store):
    silent = {"progress": lambda spec, text: None, "say": lambda text: None}
    return sweep(specs, store, ForecastTrials(), LAPTOP, ["steplab"], **silent)


def test_a_cell_for_every_combination_with_room_for_all_points():
    recipes = [PLAIN, parse_recipe("precision=bf16")]
    specs = plan(grid(batches=[1, 3], horizons=[1, 100], recipes=recipes))
    assert len(specs) == 8
    cells = [(s.recipe.label, s.batch, s.config["horizon"]) for s in specs]
    assert cells[:4] == [("plain", 1, 1), ("plain", 1, 100), ("plain", 3, 1), ("plain", 3, 100)]
    assert {s.config["model"]["seq_max_len"] for s in specs} == {
        120
    }  # and at least the longest head
    assert all(s.mode == "infer" and s.workload == "forecast" for s in specs)


@pytest.mark.parametrize(
    "changes",
    [{"batches": [1, 0]}, {"horizons": [0]}, {"context": 0}, {"calls": 0}, {"warmup": -1}],
)
def test_an_empty_grid_is_refused(changes):
    with pytest.raises(UserError):
        grid(**changes)


def test_runs_keep_every_call_and_make_rows(store):
    specs = plan(grid(batches=[1, 3], horizons=[9], calls=3))
    runs = list(measured(specs, store))
    assert [run.status for run in runs] == ["ok", "ok"]
    for run in runs:
        assert len(run.clock.step) == len(uncached_calls(run)) == 3
        assert min(run.clock.step.values) > 0
    stored = {run.id: run for _, run in store.all()}
    assert {run.id for run in runs} == set(stored) and stored[runs[0].id] == runs[0]
    table = infer_table(runs)
    row = dict(zip([c.name for c in table.columns], table.rows[1], strict=True))
    step = runs[1].clock.step
    assert row["p50"] == step.median and row["p99"] == step.percentile(99)
    assert row["p50"] <= row["p90"] <= row["p99"]
    assert row["series/s"] == pytest.approx(3 / step.median * 1e3)
    assert row["gain"] == pytest.approx(uncached_calls(runs[1]).median / step.median)


def test_an_interrupted_sweep_goes_on(store):
    specs = plan(grid(batches=[1, 2], calls=1))
    first = next(measured(specs, store))
    again = list(measured(specs, store))
    assert again[0] == first and len(again) == 2


def test_a_model_is_built_once_for_all_cells_that_share_it(store, monkeypatch):
    built = []
    original = infer.build_forecaster

    def build(spec):
        built.append(spec)
        return original(spec)

    monkeypatch.setattr(infer, "build_forecaster", build)
    recipes = [PLAIN, parse_recipe("impl.experts=loop")]
    specs = plan(grid(batches=[1, 2], horizons=[1, 3], calls=1, recipes=recipes))
    assert {run.status for run in measured(specs, store)} == {"ok"}
    assert [spec.recipe.label for spec in built] == ["plain", "impl.experts=loop"]


def test_a_failed_cell_is_a_row(store, monkeypatch):
    original = infer.random_contexts

    def too_many(batch, points, seed):
        if batch == 7:
            raise MemoryError("no room")
        return original(batch, points, seed)

    monkeypatch.setattr(infer, "random_contexts", too_many)
    recipes = [PLAIN, parse_recipe("compile=whole")]
    specs = plan(grid(batches=[7, 1], calls=1, recipes=recipes))
    runs = list(measured(specs, store))
    assert [run.status for run in runs] == ["oom", "ok", "unsupported", "unsupported"]
    table = infer_table(runs)
    assert table.rows[0][-1] == "oom" and "no room" in table.note
    assert "forecasts do not run under compile" in table.note


def test_wrong_cached_forecasts_are_not_timed(store, monkeypatch):
    from steplab.forecasting.forecaster import Forecaster

    original = Forecaster.predict

    def wrong(self, contexts, horizon, **options):
        found = original(self, contexts, horizon, **options)
        if options.get("cached"):
            found.mean_BH[:] *= 1.01
        return found

    monkeypatch.setattr(Forecaster, "predict", wrong)
    (run,) = measured(plan(grid()), store)
    assert run.status == "failed" and "cached forecasts differ" in run.reason
    forecaster = infer.build_forecaster(infer.model_spec(run.spec))
    with pytest.raises(MeasurementError, match="budget"):
        infer.check_cached(forecaster, run.spec)


def test_contexts_are_seeded():
    one, same, other = (infer.random_contexts(3, 8, seed) for seed in (1, 1, 2))
    assert (one == same).all() and (one != other).any() and one.shape == (3, 8)
    assert np.isfinite(one).all()


def test_the_command(tmp_path, capsys):
    store, out = str(tmp_path / "store"), str(tmp_path / "x.csv")
    words = "--batch 1 2 --horizon 1 9 --context 16 --calls 2 --warmup 0".split()
    assert main(["bench", "infer", *words, "--store", store, "--out", out]) == 0
    said = capsys.readouterr()
    assert "p99 [ms]" in said.out and "4 Runs in" in said.out and "[4/4]" in said.err
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 5
    assert len(list(Store(tmp_path / "store").all())) == 4


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--batch", "0"], 2, "--batch must be at least 1"),
        (["--size", "huge"], 2, "no size 'huge'"),
        (["--out", "x.txt"], 2, "Use a suffix"),
        (["--device", "tpu"], 2, "no device 'tpu'"),
        (["--recipe", "compile=whole", "--batch", "1", "--horizon", "1", "--context", "9"], 3,
         "No cell could be measured"),
    ],
)  # fmt: skip
def test_bad_values_are_refused(words, code, message, tmp_path, capsys):
    assert main(["bench", "infer", *words, "--store", str(tmp_path)]) == code
    assert message in capsys.readouterr().err
