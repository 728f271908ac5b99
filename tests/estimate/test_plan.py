"""Plans: which recipes are considered, and which of their predictions no other beats."""

from dataclasses import replace

import pytest

from steplab.core.errors import Unsupported, UserError
from steplab.core.prediction import Prediction
from steplab.estimate.plan import Budget, candidates, frontier, search
from steplab.estimate.predict import TooLarge
from tests.estimate.specs import H200, spec_of


def prediction(ms, ranks):
    """A step of a thousand tokens on each rank."""
    spec = replace(spec_of("parallel=fsdp"), ranks=ranks)
    times = {"step_ms": ms, "low_ms": ms, "high_ms": ms, "device_ms": ms, "host_ms": 0.0}
    sizes = {"peak_bytes": 1, "reserved_bytes": 1, "card_bytes": 2, "flops": None, "mfu": None}
    return Prediction(spec, "H200 SXM", **times, communication_ms=0.0, exposed_ms=0.0,
                      tokens=1000 * ranks, **sizes)  # fmt: skip


def test_time_and_cost_follow_from_tokens_and_price():
    budget = Budget(tokens=3.6e9, price=2.0)
    assert budget.hours(prediction(10.0, 1)) == pytest.approx(10)
    assert budget.cost(prediction(10.0, 4)) == pytest.approx(20)  # 2.5 hours on four
    assert Budget().hours(prediction(10.0, 1)) is None is Budget(1e9).cost(prediction(10.0, 1))


def test_the_frontier_has_what_no_other_beats_in_time_and_cost():
    cheap, quick = prediction(10.0, 1), prediction(11.0, 8)
    slow, dear = prediction(12.0, 1), prediction(30.0, 8)
    assert frontier([quick, cheap, slow, dear], Budget()) == [quick, cheap]


def test_why_there_is_no_plan_is_told(monkeypatch):
    reasons = iter([Unsupported("one"), UserError("two")] * 3)

    def refuse(counts):
        raise next(reasons)

    monkeypatch.setattr("steplab.estimate.plan.largest_batch", refuse)
    told: list[str] = []
    words = (spec_of(), [2], 0, H200, None, None, told.append)
    with pytest.raises(Unsupported, match="one"):
        search(*words)
    assert told[:2] == ["counting 2 ranks: parallel=bucket", "left out parallel=bucket: one"]
    reasons = iter([Unsupported("one"), TooLarge("two")] * 3)
    with pytest.raises(TooLarge, match="No plan fits"):
        search(*words)


def test_every_way_of_sharing_is_considered_once():
    found = [str(one.recipe) for one in candidates(spec_of("optimizer=fused"), 4, experts=6)]
    assert len(found) == len(set(found)) == 10  # (bucket, fsdp) x (1, 2 experts' ranks), zero1
    assert sum("parallel.expert=2" in recipe for recipe in found) == 4
    assert not any("expert=4" in recipe for recipe in found)  # six experts do not divide so
    alone = [str(one.recipe) for one in candidates(spec_of("parallel=fsdp"), 1, experts=0)]
    assert alone == ["plain", "checkpointing=blocks"]
