"""Pairs of trainings: the interval of their gap, the verdict, and what a killed study keeps."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import steplab.train.loop
from steplab.bench.convergence import Study, StudyFolder, open_study, record, run_pairs, train_once
from steplab.bench.loss_gap import (
    FEWEST_PAIRS,
    LOOK_CONFIDENCE,
    MOST_PAIRS,
    GapInterval,
    LossGap,
    Pair,
    Training,
    gap_interval,
    pairs_to_decide,
    share_of_tokens,
)
from steplab.cli.main import main
from steplab.compare.bootstrap import student_quantile
from steplab.core import run_from_json, run_to_json
from steplab.core.errors import MeasurementError
from steplab.probes.environment import capture_environment
from steplab.store import Store
from steplab.techniques.recipes import parse_recipe
from tests.train.tiny_runs import make_spec

LIMIT = 0.0025
OWN_MODEL = Path(__file__).parents[2] / "examples" / "own_model.py"


def training(*losses, seed=0, rate=100.0, reason=""):
    steps = tuple(10 * (i + 1) for i in range(len(losses)))
    return Training(seed, steps, losses, rate, reason)


def pairs_of(*gaps):
    return tuple(Pair(training(2.0, 1.0), training(2.0, 1.0 + gap)) for gap in gaps)


def drawn(kind: str) -> np.ndarray:
    """Gaps of mean 0 and standard deviation 1: 20,000 studies of as many pairs as there may be."""
    generator, shape = np.random.default_rng(0), (20_000, MOST_PAIRS)
    if kind == "normal":
        return generator.standard_normal(shape)
    if kind == "heavy tails":  # Student's own, five degrees of freedom
        return generator.standard_t(5, shape) / math.sqrt(5 / 3)
    return generator.exponential(size=shape) - 1  # skewed: a few trainings are far worse


@pytest.mark.parametrize(
    ("kind", "below", "above"),
    [("normal", 0.027, 0.027), ("heavy tails", 0.025, 0.025), ("skewed", 0.18, 0.005)],
)
def test_whoever_looks_after_every_pair_is_as_sure_as_one_who_looks_once(kind, below, above):
    """At a true gap that is the limit, `below` is the share of studies that are ever green.

    It is 2.5 % (normal) and 2.1 % (heavy tails); 16 % where a few trainings are far worse.
    """
    gaps_NP = drawn(kind) * 1e-4  # small ones: the logarithm changes nothing
    ever_below, ever_above = (np.zeros(len(gaps_NP), bool) for _ in range(2))
    for count in range(FEWEST_PAIRS, MOST_PAIRS + 1):
        seen_NP = gaps_NP[:, :count]
        mean_N, error_N = seen_NP.mean(1), seen_NP.std(1, ddof=1) / math.sqrt(count)
        one = gap_interval(list(seen_NP[0]))
        width = (one.high - one.mean) / error_N[0]  # in standard errors, the same for all studies
        ever_below |= mean_N + width * error_N < 0
        ever_above |= mean_N - width * error_N > 0
    assert ever_below.mean() <= below and ever_above.mean() <= above


@pytest.mark.parametrize("spread", [0.0005, 0.002, 0.01])
def test_a_gap_beyond_the_limit_is_rarely_green_and_an_equal_loss_rarely_failed(spread):
    generator = np.random.default_rng(1)
    verdicts = {
        mean: [
            gap_interval(list(generator.normal(mean, spread, 4))).verdict(LIMIT)
            for _ in range(2000)
        ]
        for mean in (0.0, 2 * LIMIT)
    }
    assert verdicts[2 * LIMIT].count("green") <= 0.025 * 2000
    assert verdicts[0.0].count("failed") <= 0.025 * 2000


def test_verdicts():
    assert GapInterval(0.001, -0.001, 0.0025).verdict(LIMIT) == "green"
    assert GapInterval(0.002, 0.001, 0.003).verdict(LIMIT) == "unverified"
    assert GapInterval(0.01, 0.003, 0.02).verdict(LIMIT) == "failed"
    assert GapInterval(-0.02, -0.03, -0.01).verdict(LIMIT) == "green"  # lower is no harm
    equal = LossGap("plain", "plain", pairs_of(0.0, 0.0, 0.0, 0.0), LIMIT)
    assert equal.verdict == "green" and equal.interval == GapInterval(0.0, 0.0, 0.0)


def test_an_undecided_study_says_how_many_pairs_would_decide():
    """Of gaps that spread as the first ones did, so many do decide, and one fewer does not."""
    gaps = [0.004, -0.003, 0.001, -0.002]
    needed = pairs_to_decide(gaps, LIMIT)
    spread, mean = np.std(gaps, ddof=1), np.mean(gaps)
    before, then = (
        mean + student_quantile(n - 1, LOOK_CONFIDENCE) * spread / math.sqrt(n)
        for n in (needed - 1, needed)
    )
    assert before > LIMIT >= then
    gap = LossGap("plain", "precision=bf16", pairs_of(*gaps), LIMIT)
    assert gap.verdict == "unverified" and f"--pairs {needed}" in gap.sentence
    assert pairs_to_decide([LIMIT + 0.01, LIMIT - 0.01, LIMIT, LIMIT], LIMIT) is None


def test_a_candidate_that_diverged_fails_and_a_reference_that_did_is_no_reference():
    good, lost = training(2.0, 1.0), training(2.0, reason="The loss is nan at step 20")
    gap = LossGap("plain", "bad", (*pairs_of(0.0, 0.0, 0.0), Pair(good, lost)), LIMIT)
    assert gap.verdict == "failed" and "nan at step 20" in gap.sentence
    assert gap.loss_matched_tokens_per_s() is None and len(gap.curve_table().rows) == 2
    with pytest.raises(MeasurementError, match="nan at step 20"):
        LossGap("plain", "bad", (*pairs_of(0.0, 0.0, 0.0), Pair(lost, good)), LIMIT)
    with pytest.raises(MeasurementError, match="its loss is -1"):
        LossGap("plain", "bad", (Pair(training(-1.0), good),), LIMIT)


@pytest.mark.parametrize(
    ("final", "share"),
    [
        (3.0, 1 / 4),  # reached at the first validation
        (2.0, 2 / 4),
        (1.5, 2.5 / 4),  # halfway between two of them
        (1.0, 3 / 4),  # where the curve bends
        (0.75, 3.5 / 4),
        (0.5, 1.0),
        (0.1, 1.0),  # never reached: nothing is won by it
    ],
)
def test_loss_matched_tokens_by_a_known_curve(final, share):
    """The reference's loss falls along straight lines, so its loss is known at every step."""
    reference = training(3.0, 2.0, 1.0, 0.5)
    pairs = [Pair(reference, training(9.0, 9.0, 9.0, final, rate=200.0))] * 4
    assert share_of_tokens(pairs) == pytest.approx(share)
    gap = LossGap("plain", "fast", tuple(pairs), LIMIT)
    assert gap.loss_matched_tokens_per_s() == pytest.approx(200.0 * share)
    assert gap.recipe_table().rows[1][3] == pytest.approx(200.0 * share)


class Told:
    """An observer that counts."""

    def __init__(self):
        self.steps, self.ended = 0, []

    def stepped(self, steps):
        self.steps += steps

    def trained(self, spec, training):
        self.ended.append((spec.recipe.label, training.seed))


def study_of(tmp_path, candidate="plain", pairs=4, **settings):
    given = {"steps_per_epoch": 20, "validate_every": 5, "checkpoint_every": 0, **settings}
    return Study(make_spec(tmp_path / "none", **given), parse_recipe(candidate), pairs)


def test_two_equal_recipes_have_no_gap(tmp_path):
    study, told = study_of(tmp_path, pairs=2), Told()
    gap = run_pairs(study, StudyFolder(tmp_path / "study"), train_once, told)
    assert gap.gaps == [0.0] * 2 and gap.verdict == "green"
    assert told.steps == 4 * 20
    assert [seed for _, seed in told.ended] == [42, 42, 43, 43]
    assert gap.pairs[0].reference.loss != gap.pairs[1].reference.loss  # other weights, other data
    assert all(pair.reference.steps == (5, 10, 15, 20) for pair in gap.pairs)
    run = run_from_json(run_to_json(record(study, gap, capture_environment())))
    assert run.verdict == "green" and run.metrics["gap"] == 0
    assert run.metrics["tokens_per_s"] > 0
    assert [row[0] for row in run.tables["curves"].rows] == [5, 10, 15, 20]


def rounds_weights(step):
    """Keep the weights in 8 bits alone: an update of less than half a rounding is lost."""
    update = step.optimizer.step

    def rounded(*args, **options):
        update(*args, **options)
        with torch.no_grad():
            for parameter in step.model.parameters():
                parameter.copy_(parameter.to(torch.float8_e4m3fn))

    step.optimizer.step = rounded
    return step


def scales_gradients(step):
    """Take the scale of every matrix's gradient with the wrong sign."""
    for parameter in step.model.parameters():
        if parameter.ndim > 1:
            parameter.register_hook(lambda gradient: gradient * -1)
    return step


@pytest.mark.slow
@pytest.mark.parametrize("plant", [rounds_weights, scales_gradients])
def test_a_recipe_that_harms_is_failed(plant, tmp_path, monkeypatch):
    real = steplab.train.loop.assemble

    def assemble(spec):
        step = real(spec)
        return plant(step) if spec.recipe.label != "plain" else step

    monkeypatch.setattr(steplab.train.loop, "assemble", assemble)
    settings = {"steps_per_epoch": 60, "lr": 2e-3, "validate_every": 0}
    study = study_of(tmp_path, "optimizer=foreach", pairs=6, **settings)
    gap = run_pairs(study, StudyFolder(tmp_path / "study"), train_once, Told())
    assert gap.verdict == "failed" and "more than 0.25 %" in gap.sentence


def test_a_killed_study_keeps_its_trainings_and_goes_on_with_more_pairs(tmp_path):
    store, environment = Store(tmp_path / "store"), capture_environment()
    study, done = study_of(tmp_path), []

    def train(spec, progress):
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append((spec.recipe.label, spec.settings.seed))
        return training(2.0, 1.0 + spec.settings.seed / 1000, seed=spec.settings.seed)

    def ask(study):
        return run_pairs(*open_study(store, study, environment), train, Told())

    with pytest.raises(KeyboardInterrupt):
        ask(study)
    first, done = done, []
    ask(study)
    assert first + done == [("plain", seed) for seed in (42, 42, 43, 43, 44, 44, 45, 45)]
    done = []
    more = replace(study, pairs=5, limit=0.1)
    ask(more)
    assert done == [("plain", 46)] * 2
    done, other = [], study_of(tmp_path, lr=5e-4)
    with pytest.raises(KeyboardInterrupt):
        ask(other)
    assert len(done) == 5  # another learning rate is another study


@pytest.mark.parametrize("pairs", [4, 5])
def test_as_many_pairs_as_are_finished_or_fewer_show_all_of_them(pairs, tmp_path):
    """Nothing is trained again, and nothing is removed."""
    store, environment = Store(tmp_path / "store"), capture_environment()
    study = study_of(tmp_path, pairs=5)
    folder = open_study(store, study, environment)[1]
    for number, side in study.trainings():
        folder.save(number, side, training(2.0, 1.0, seed=42 + number))
    files = sorted(folder.path.iterdir())
    asked, folder = open_study(store, replace(study, pairs=pairs), environment)

    def train(spec, progress):
        raise AssertionError("all of it is there")

    assert len(run_pairs(asked, folder, train, Told()).pairs) == 5
    assert sorted(folder.path.iterdir()) == files and len(files) == 10


SMALL = """--hidden-size 16 --n-decoder-layers 1 --n-head 2 --num-experts 2 --k 1 --d-ff 16
--d-expert 8 --seq-max-len 40 --horizons 1,8 --batch-size 2 --steps 20 --validation-batches 1
--device cpu""".split()


@pytest.mark.slow
@pytest.mark.usefixtures("in_tmp_path")
def test_the_command_as_a_user_runs_it(capsys):
    assert main(["bench", "convergence", *SMALL, "--out", "gap.csv"]) == 0
    said = capsys.readouterr()
    assert "[8/8] seed 45 plain: loss" in said.err
    assert (
        "green: after 20 steps the loss of plain differs from plain's by +0 %" in said.out
        and "loss-matched" in said.out
    )
    run = Store().load("last")
    assert run.verdict == "green" and run.spec.steps == 20 and run.metrics["gap_high"] == 0
    with open("gap.pairs.csv") as file:
        assert len(file.readlines()) >= 5
    assert main(["bench", "convergence", *SMALL]) == 0
    assert "All 4 pairs here are finished, in " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--pairs", "3"], "--pairs must be 4 to 32, not 3"),
        (["--pairs", "33"], "--pairs must be 4 to 32, not 33"),
        (["--steps", "10"], "--steps must be at least 20"),
        (["--limit", "0"], "more than 0"),
        (["--dataset-path", "x"], "--val-path"),
        (["--recipe", "precision=bf17"], "bf16"),
        (["--lr", "-1"], "lr -1"),
    ],
)
@pytest.mark.usefixtures("in_tmp_path")
def test_bad_requests_are_one_sentence(words, sentence, capsys):
    assert main(["bench", "convergence", *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.usefixtures("in_tmp_path")
def test_a_model_without_data_of_its_own_is_refused(capsys):
    assert main(["bench", "convergence", f"{OWN_MODEL}:recurrent"]) == 2
    assert "There is no data to train" in capsys.readouterr().err
