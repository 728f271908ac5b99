"""Metrics of a step as plain numbers in its Run."""

import pytest
import torch

from steplab.core import Recipe, RunSpec, run_from_json, run_to_json
from steplab.probes.metrics import MAX_NUMBERS, read_metrics
from steplab.step.trial import trial
from steplab.workloads.workload import find_workload


def tsmoe_run(mode="full", **impl):
    config = find_workload("tsmoe").resolve("tiny", {"n_decoder_layers": 2})
    recipe = Recipe({"impl": impl}) if impl else Recipe()
    return trial(
        RunSpec("tsmoe", config, "tiny", batch=2, steps=2, warmup=1, mode=mode, recipe=recipe)
    )


@pytest.mark.parametrize("impl", ["grouped", "capacity"])
def test_routing_is_in_the_run_whatever_dispatched_it(impl):
    run = tsmoe_run(experts=impl)
    assert run.status == "ok", run.reason
    config = run.spec.config
    load_LE = run.metrics["load_LE"]
    layers = config["n_decoder_layers"] * config["num_expert_layers"]
    assert [len(load_E) for load_E in load_LE] == [config["num_experts"]] * layers
    assert [sum(load_E) for load_E in load_LE] == pytest.approx([1.0] * layers, abs=1e-5)
    assert 0 <= run.metrics["dropped"] <= 1 and {"pred", "aux"} <= run.metrics.keys()
    assert run_from_json(run_to_json(run)) == run


def test_inference_has_none():
    assert tsmoe_run(mode="infer").metrics == {}


def test_what_is_large_is_left_out():
    metrics = {
        "count": torch.tensor(3),
        "vector": torch.tensor([1.0, float("nan")]),
        "cube": torch.zeros(2, 2, 2),
        "wide": torch.zeros(MAX_NUMBERS + 1),
        "spectrum": torch.zeros(2, dtype=torch.complex64),
    }
    found = read_metrics(metrics)
    assert found.keys() == {"count", "vector"} and found["count"] == 3.0
    assert found["vector"][0] == 1.0 and found["vector"][1] != found["vector"][1]
