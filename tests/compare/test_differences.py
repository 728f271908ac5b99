from dataclasses import replace

from steplab.compare.same_work import condition_diff
from steplab.core import Accelerator, Compilation, Ran
from tests.compare.sides import ENVIRONMENT, run_of


def rows(a, b):
    return {(row[0], row[1]): row[2:] for row in condition_diff(a, b).rows}


def test_equal_runs_differ_in_nothing():
    assert condition_diff(run_of(), run_of(noise := (9.0,) * 5)) is None and noise


def test_every_field_is_named():
    card = Accelerator("NVIDIA H200", 2**37, power_limit_w=700.0)
    environment = replace(
        ENVIRONMENT, torch="2.14", accelerators=(card,), variables={"OMP_NUM_THREADS": "1"}
    )
    other = run_of(
        recipe={"precision": {"dtype": "bf16"}},
        config={"fused": True},
        environment=environment,
        device="cuda",
        peak_tflops=989.4,
    )
    other = replace(other, ran=Ran({"attention": ("cudnn", "math")}), compilation=Compilation(3, 0))
    found = rows(run_of(), other)
    assert found[("recipe", "precision.dtype")] == ("not set", "bf16")
    assert found[("config", "fused")] == ("not set", "true")
    assert found[("spec", "device")] == ("cpu", "cuda")
    assert found[("spec", "peak_tflops")] == ("not set", "989.4")
    assert found[("ran", "impls.attention")] == ("flash", "cudnn/math")
    assert found[("compilation", "graphs")] == ("not set", "3")
    assert found[("environment", "torch")] == ("2.13", "2.14")
    assert found[("environment", "accelerators.0.name")] == ("not set", "NVIDIA H200")
    assert found[("environment", "variables.OMP_NUM_THREADS")] == ("not set", "1")
    assert ("environment", "cpu") not in found


def test_an_empty_setting_is_one_that_is_not_set():
    table = condition_diff(run_of(config={"quantiles": ""}), run_of(config={"heads": 4}))
    assert [row[1] for row in table.rows] == ["heads"]
