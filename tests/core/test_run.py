import json
from dataclasses import replace

import pytest

from steplab.core import (
    Accelerator,
    Allocation,
    Budget,
    Category,
    Clock,
    Column,
    Compilation,
    Counters,
    Environment,
    Figures,
    Finding,
    Memory,
    MemoryTimeline,
    Profile,
    Ran,
    Recipe,
    Recompile,
    Run,
    RunSpec,
    Samples,
    StepBudget,
    Table,
    Work,
    new_run_id,
    run_from_json,
    run_to_json,
)
from steplab.core.errors import UserError


def full_run() -> Run:
    """A Run in which every field is set."""
    ms = Samples((1.0, 2.0, 3.0), "ms", {"2": "slow, no cause seen"})
    spec = RunSpec("gpt", {"width": 8}, "tiny", recipe=Recipe({"precision": {"dtype": "bf16"}}))
    card = Accelerator("NVIDIA H200", 2**37, "9.0", 132, 700.0, 700.0, "580", "H200 SXM")
    environment = Environment("0.1", "3.11", "Linux", "cpu", 2, 2**34, accelerators=(card,))
    return Run(
        new_run_id(spec),
        spec,
        environment,
        clock=Clock(ms, ms, ms, {"forward": ms}, {"forward": ms}, 6.0, "cuda events"),
        memory=Memory(1, 2, 3, 4, "cuda allocator", {"forward": 2}),
        work=Work(512, 1e9, 1.1e9, 1.2e9, 5.0, "6 x N", 3, {"my::op": 1}),
        figures=Figures(0.4, 0.45, None, 989.4, "datasheet", "a warning"),
        compilation=Compilation(
            1, 0, {"reason": 2}, (Recompile("f", "guard"),), 20.0, 0, 2, 4.0, 1
        ),
        ran=Ran(
            {"attention": ("flash",)},
            {"aten::x": 4},
            {"float": 87},
            {"k": 1},
            10,
            "high",
            "fused",
            2,
            {"aten::_fused_adamw_": 1},
        ),
        counters=Counters(sm_util_pct=Samples((99.0,), "%"), source="NVML", note="a short window"),
        profile=Profile(
            (1, 2, 3, 1),
            ("trace_1.json.gz",),
            "detail.json.gz",
            Budget(
                (
                    StepBudget(
                        3, 2.0, {"kernels": 1.5}, (Category("matmul bf16", 1.5, 9, 1.0, 1.2),)
                    ),
                ),
                on_device=True,
                unprofiled_ms=1.9,
                peaks={"matmul bf16": "datasheet"},
                notes=("a note",),
            ),
            MemoryTimeline(
                (0.0, 1.0),
                {"weights": (8, 8)},
                {"forward": (0.0, 0.5)},
                8,
                0.0,
                {"weights": 8},
                (Allocation(8, "weights", (2,), "float32", "a.py:1 (f)", "head", "aten::mm"),),
                (Allocation(8, "weights"),),
                {"head": 8},
                16,
                4,
                "cuda allocator",
                ("a note",),
            ),
            123,
        ),
        parameters=123,
        losses=(3.0, float("inf")),
        metrics={"aux": 1.0, "worst": float("inf"), "loads": (1.0, 2.0), "load_LE": ((0.5, 0.5),)},
        notes=("noisy: yes",),
        findings=(Finding("rule", "claim", ("evidence",), "remedy", 1.5, None),),
        tables={"t": Table("t", (Column("a", "ms"),), ((1.0,), (None,), ("x",)))},
    )


def test_every_field_survives_json():
    run = full_run()
    assert run_from_json(run_to_json(run)) == run


def test_a_record_without_metrics_loads():
    document = json.loads(run_to_json(full_run()))
    del document["run"]["metrics"]
    assert run_from_json(json.dumps(document)).metrics == {}


def test_tokens_per_second_uses_the_median():
    assert full_run().tokens_per_second == pytest.approx(512 / 2e-3)


def test_conditions_name_the_device_that_was_used():
    environment = full_run().environment
    assert environment.conditions_on("cuda").startswith("NVIDIA H200 at 700 W")
    assert environment.conditions_on("cpu").startswith("cpu, 2 threads")
    assert environment.conditions == environment.conditions_on("cuda")
    bare = replace(environment, accelerators=())
    assert bare.conditions == bare.conditions_on("cpu")


def test_newer_record_says_upgrade():
    document = json.loads(run_to_json(full_run())) | {"steplab_record": 99}
    with pytest.raises(UserError, match="Upgrade steplab"):
        run_from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"steplab_record": 1}', "null", "\x00"])
def test_foreign_text_is_one_sentence(text):
    with pytest.raises(UserError):
        run_from_json(text)


def test_truncation_anywhere_is_one_sentence():
    text = run_to_json(full_run())
    for cut in range(0, len(text) - 1, 97):
        with pytest.raises(UserError):
            run_from_json(text[:cut])


def test_run_ids_are_distinct_and_sort_by_time():
    spec = RunSpec("some/path/file.py:make")
    ids = {new_run_id(spec) for _ in range(200)}
    assert len(ids) == 200
    assert all("/" not in i and ":" not in i for i in ids)
