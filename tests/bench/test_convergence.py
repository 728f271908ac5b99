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


def drawn(kind: str, generator, count: int) -> np.ndarray:
    """Gaps of mean 0 and standard deviation 1."""
    if kind == "normal":
        return generator.standard_normal((20_000, count))
    if kind == "heavy tails":  # Student's own, five degrees of freedom
        return generator.standard_t(5, (20_000, count)) / math.sqrt(5 / 3)
    return generator.exponential(size=(20_000, count)) - 1  # skewed


@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize(
    ("kind", "least"), [("normal", 0.945), ("heavy tails", 0.945), ("skewed", 0.87)]
)
def test_the_interval_covers_the_true_gap_as_often_as_it_says(kind, least, count):
    """20,000 studies each. Normal and heavy-tailed gaps: 95 %; an exponential tail: 88 to 89 %."""
    gaps_NP = drawn(kind, np.random.default_rng(0), count)
    error_N = gaps_NP.std(1, ddof=1) / math.sqrt(count)
    inside = np.abs(gaps_NP.mean(1)) <= student_quantile(count - 1) * error_N
    assert least <= inside.mean() <= 0.97
    one = gap_interval(list(gaps_NP[0] * 1e-4))  # small ones: the logarithm changes nothing
    half = 1e-4 * student_quantile(count - 1) * error_N[0]
    assert one.high - one.mean == pytest.approx(half, rel=1e-2)


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
    high = [mean + student_quantile(n - 1) * spread / math.sqrt(n) for n in (needed - 1, needed)]
    assert high[0] > LIMIT >= high[1]
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
    study = study_of(tmp_path, "optimizer=foreach", steps_per_epoch=25, lr=2e-3, validate_every=0)
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

    with pytest.raises(KeyboardInterrupt):
        run_pairs(study, open_study(store, study, environment), train, Told())
    first, done = done, []
    run_pairs(study, open_study(store, study, environment), train, Told())
    assert first + done == [("plain", seed) for seed in (42, 42, 43, 43, 44, 44, 45, 45)]
    done = []
    more = replace(study, pairs=5, limit=0.1)
    run_pairs(more, open_study(store, more, environment), train, Told())
    assert done == [("plain", 46)] * 2
    done = []  # all of it is there: asking again trains again
    with pytest.raises(KeyboardInterrupt):
        run_pairs(more, open_study(store, more, environment), train, Told())
    done, other = [], study_of(tmp_path, lr=5e-4)
    with pytest.raises(KeyboardInterrupt):
        run_pairs(other, open_study(store, other, environment), train, Told())
    assert len(done) == 5  # another learning rate is another study


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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--pairs", "3"], "--pairs must be at least 4"),
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
