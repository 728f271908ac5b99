"""Groups, summaries, tables and pictures of an evaluation."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from steplab.core.codec import decode, encode
from steplab.core.errors import UserError
from steplab.data.series import InMemorySeries
from steplab.forecasting.evaluation.data import EvaluationData
from steplab.forecasting.evaluation.evaluate import Evaluation, evaluate, geometric_mean
from steplab.forecasting.evaluation.picture import ratio_position, ratio_scale, write_picture
from steplab.forecasting.evaluation.tables import metrics_table, ratios_table, verdict
from steplab.forecasting.evaluation.windows import EvaluationPlan, seasonal_naive

PERIOD, PLAN = 4, EvaluationPlan(6, 2, 50)


def source(count=6, seed=0, unseen=frozenset()):
    random = np.random.default_rng(seed)
    season = np.tile([0.0, 3.0, 1.0, -2.0], 20)
    series = [season * (1 + i) + random.normal(size=80) for i in range(count)]
    packed = InMemorySeries("some series", [one.astype(np.float32) for one in series])
    names = ("calm", "wild", "odd <b>")
    return EvaluationData(packed, lambda i: names[i % 3], lambda i: PERIOD, "the period 4", unseen)


def predicted(mean_BH, quantiles_BHQ=None, levels=()):
    return SimpleNamespace(mean_BH=mean_BH, quantiles_BHQ=quantiles_BHQ, levels=levels)


def naive(contexts, horizon, factor=1.0, period=PERIOD):
    return predicted(np.stack([factor * seasonal_naive(one, period, horizon) for one in contexts]))


def found(predict=naive, data=None, plan=PLAN):
    return evaluate(predict, "a model", data or source(), plan).evaluation


def test_seasonal_naive_against_itself_is_a_draw():
    evaluation = found()
    for group in evaluation.groups:
        assert group.model == group.naive and group.ratio("MASE") == 1
    one = evaluation.overall
    assert one.geometric["MASE"] == pytest.approx(1) and one.won["MASE"] == 0
    assert "does not beat" in verdict(evaluation)


def test_a_perfect_model_beats_it():
    data = source()
    whole = [data.series.read(i, 0, 80).astype(float) for i in range(6)]

    def perfect(contexts, horizon):
        starts = [68, 74] * 6
        rows = [whole[i // 2][starts[i] : starts[i] + horizon] for i in range(len(contexts))]
        return predicted(np.stack(rows))

    evaluation = found(perfect, data)
    assert evaluation.overall.model.mase == 0 and evaluation.overall.geometric["MASE"] == 0
    assert evaluation.overall.won["MASE"] == 3
    assert "all: the model beats seasonal naive" in verdict(evaluation)


def test_the_model_sees_its_context_and_no_more():
    seen = []

    def spy(contexts, horizon):
        seen.extend(contexts)
        return naive(contexts, horizon)

    found(spy, plan=EvaluationPlan(6, 2, 10))
    data = source().series
    assert len(seen) == 12 and {len(one) for one in seen} == {10}
    assert (seen[0] == data.read(0, 58, 68)).all() and (seen[1] == data.read(0, 64, 74)).all()


def test_mase_does_not_depend_on_the_context():
    def last(contexts, horizon):
        return predicted(np.stack([np.full(horizon, one[-1]) for one in contexts]))

    short, long = (found(last, plan=EvaluationPlan(6, 2, context)) for context in (1, 50))
    assert short.groups == long.groups


def test_groups_by_hand():
    evaluation = found(lambda c, h: naive(c, h, factor=0.5))
    assert [group.name for group in evaluation.groups] == ["calm", "wild", "odd <b>"]
    assert [group.windows for group in evaluation.groups] == [4, 4, 4]
    assert [group.series for group in evaluation.groups] == [2, 2, 2]
    group, errors = evaluation.groups[1], []
    for index in (1, 4):
        points = source().series.read(index, 0, 80).astype(float)
        for start in (68, 74):
            past, truth = points[:start], points[start : start + 6]
            forecast = np.resize(past[-4:], 6) / 2
            scale = np.abs(past[4:] - past[:-4]).mean()
            errors.append(np.abs(truth - forecast) / scale)
    assert group.model.mase == pytest.approx(np.mean(errors))


def test_the_order_of_series_does_not_matter():
    def backwards(data):
        count = len(data.series)
        turned = InMemorySeries(
            "some series", [data.series.read(i, 0, 80) for i in reversed(range(count))]
        )
        return replace(data, series=turned, group=lambda i: data.group(count - 1 - i))

    def half(contexts, horizon):
        return naive(contexts, horizon, factor=0.5)

    one, other = found(half), found(half, backwards(source()))
    by_name = {group.name: group for group in other.groups}
    assert all(by_name[group.name] == group for group in one.groups)
    assert other.overall.model == one.overall.model
    assert other.overall.geometric == pytest.approx(one.overall.geometric)


def test_summaries_of_two_kinds_and_of_all():
    evaluation = found(lambda c, h: naive(c, h, factor=0.5), source(unseen=frozenset({"odd <b>"})))
    trained, never, everything = evaluation.summaries
    ratios = [group.ratio("MASE") for group in evaluation.groups]
    assert trained.geometric["MASE"] == pytest.approx(math.sqrt(ratios[0] * ratios[1]))
    assert never.geometric["MASE"] == pytest.approx(ratios[2])
    assert everything.geometric["MASE"] == pytest.approx(np.prod(ratios) ** (1 / 3))
    # Groups of equal size: the plain mean over windows is the mean of the groups' means.
    means = [group.model.mase for group in evaluation.groups]
    assert everything.model.mase == pytest.approx(np.mean(means))
    assert (trained.windows, never.windows, everything.windows) == (8, 4, 12)
    assert len(verdict(evaluation).splitlines()) == 3


def test_the_two_ways_of_counting_can_disagree():
    evaluation = found(lambda c, h: naive(c, h, factor=0.5))
    one = evaluation.overall
    shown = replace(one, geometric={**one.geometric, "MASE": 0.9})
    assert one.ratio("MASE") > 1
    assert "depends on how" in verdict(replace(evaluation, summaries=(shown,)))


def test_geometric_means():
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4)
    assert geometric_mean([2.0, math.nan, 8.0]) == pytest.approx(4)
    assert geometric_mean([0.0, 5.0]) == 0
    assert math.isnan(geometric_mean([math.nan]))


def test_repeating_and_constant_series_have_no_mase():
    series = [np.tile([1.0, 2.0, 3.0, 4.0], 20), np.full(80, 5.0), np.zeros(80)]
    packed = InMemorySeries("flat", [one.astype(np.float32) for one in series])
    data = EvaluationData(packed, lambda i: f"group {i}", lambda i: PERIOD, "the period 4")
    evaluation = found(lambda c, h: naive(c, h, period=1), data)
    assert [group.without_scale for group in evaluation.groups] == [2, 2, 2]
    assert all(math.isnan(group.model.mase) for group in evaluation.groups)
    assert [group.model.mae == 0 for group in evaluation.groups] == [False, True, True]
    assert "undefined" in verdict(evaluation)
    assert "6 windows have no MASE" in metrics_table(evaluation).note
    assert metrics_table(evaluation).rows[0][2] is None  # printed as unknown
    encoded = json.dumps(encode(evaluation), allow_nan=False)
    assert decode(Evaluation, json.loads(encoded), "file").overall.windows == 6


def test_quantiles_are_scored_and_named():
    def spread(contexts, horizon):
        middle = naive(contexts, horizon).mean_BH
        offsets = np.array([-1.0, 0.0, 1.0])
        return predicted(middle + 9, middle[..., None] + offsets, (0.1, 0.5, 0.9))

    evaluation = found(spread)
    assert evaluation.levels == (0.1, 0.5, 0.9)
    assert "mean over the levels 0.1, 0.5, 0.9" in metrics_table(evaluation).note
    assert evaluation.overall.ratio("MASE") == 1  # the median, not the mean
    assert evaluation.overall.ratio("MSE") > 1
    assert "ND" in metrics_table(found()).note


def test_series_that_are_too_short_are_counted():
    packed = InMemorySeries("x", [np.arange(80, dtype=np.float32), np.ones(3, np.float32)])
    data = EvaluationData(packed, lambda i: "g", lambda i: 1, "the period 1")
    evaluation = found(data=data)
    assert evaluation.left_out == 1 and "1 series were left out" in metrics_table(evaluation).note
    with pytest.raises(UserError, match="No series of x has 100 points"):
        found(data=data, plan=EvaluationPlan(100, 1, 9))


def test_tables_have_every_metric_beside_naive():
    evaluation = found(lambda c, h: naive(c, h, 0.5), source(unseen=frozenset({"calm"})))
    table = metrics_table(evaluation)
    assert [c.name for c in table.columns][2:6] == ["MASE", "naive", "sMAPE", "naive"]
    assert len(table.rows) == 3 + 3 and table.rows[0][0] == "calm *"
    ratios = ratios_table(evaluation)
    assert len(ratios.rows) == 3 + 2 * 3
    assert ratios.rows[0][1] == pytest.approx(table.rows[0][2] / table.rows[0][3])


def test_the_page_holds_all_and_escapes_names(tmp_path):
    def spread(contexts, horizon):
        middle = naive(contexts, horizon, 0.5).mean_BH
        return predicted(middle, np.stack([middle - 1, middle + 1], -1), (0.1, 0.9))

    outcome = evaluate(spread, "a <model>", source(), PLAN)
    assert [e.window.group for e in outcome.examples] == ["calm", "wild", "odd <b>"]
    write_picture(outcome, tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text()
    assert "a &lt;model&gt;" in page and "odd <b>" not in page and "odd &lt;b&gt;" in page
    assert page.count("<figure") == 3 and "NaN" not in page and "http" not in page.split("<main")[1]


def test_the_axis_holds_all_ratios_and_1():
    scale = ratio_scale([0.3, 5.0, math.nan, 0.0])
    assert (scale.low, scale.high) == (2**-2, 2**3)
    assert ratio_position(0.25, scale) == ratio_position(0.0, scale) == "0.00%"
    assert ratio_position(8.0, scale) == "100.00%"
    assert ratio_position(1.0, ratio_scale([math.nan])) == "50.00%"


def test_the_figure_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    outcome = evaluate(naive, "m", source(), PLAN)
    write_picture(outcome, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
