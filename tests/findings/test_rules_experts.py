"""Rules about mixtures of experts, by the shapes of their products."""

from dataclasses import replace

import pytest

from steplab.core import Ran
from steplab.findings import Case
from steplab.findings.rules import dropped_tokens, expert_imbalance, small_expert_matmuls
from tests.compare.test_step_tables import make_run
from tests.findings.steps import FP32, RecordedOp, cpu_case, gpu_case, mm, rules, tensors

TOKENS, EXPERTS, K, WIDTH, HIDDEN = 512, 8, 2, 192, 256


def routed() -> RecordedOp:
    args = {"shapes": [[TOKENS, EXPERTS], [], [], [], []]}
    args["dtypes"] = [FP32, "Scalar", "Scalar", "Scalar", "Scalar"]
    args["values"] = ["", str(K), "-1", "True", "True"]
    return RecordedOp("aten::topk", 5, args=args)


def padded(rows: int, us: int = 100) -> list[RecordedOp]:
    """Two batched products over the experts, and the gradient of a weight."""
    return [
        mm(rows, WIDTH, HIDDEN, us, FP32, batch=EXPERTS),
        mm(rows, HIDDEN, WIDTH, us, FP32, batch=EXPERTS),
        mm(WIDTH, rows, HIDDEN, us, FP32, batch=EXPERTS, phase="backward"),
    ]


def looped(
    sizes: list[int], us: int = 10, module: str = "blocks.0.experts.{}.up"
) -> list[RecordedOp]:
    return [
        mm(rows, WIDTH, HIDDEN, us, FP32, module=module.format(number))
        for number, rows in enumerate(sizes)
    ]


DENSE = mm(TOKENS, WIDTH, 4 * WIDTH, 10, FP32, module="blocks.0.mlp")
EVEN = [120, 130, 128, 128, 126, 132, 130, 130]


def test_padding_to_the_busiest_expert():
    case = cpu_case([routed(), *padded(400)])
    found = expert_imbalance.RULE(case)
    assert found.stake_ms == pytest.approx(0.3)
    assert found.gain_ms == pytest.approx(0.3 * (1 - TOKENS * K / (EXPERTS * 400)))
    assert rules(case)[0] == "expert_imbalance" and dropped_tokens.RULE(case) is None


def test_room_for_all_tokens_is_not_for_the_router_to_balance():
    found = expert_imbalance.RULE(cpu_case([routed(), *padded(TOKENS)]))
    assert "balance" not in found.remedy and "room for all tokens" in found.why
    assert "balance" in expert_imbalance.RULE(cpu_case([routed(), *padded(400)])).remedy


def test_a_capacity_factor_of_a_quarter_more_is_no_fault():
    case = cpu_case([routed(), *padded(160)])
    assert expert_imbalance.RULE(case) is None and dropped_tokens.RULE(case) is None


def test_room_for_fewer_rows_than_are_given_out():
    case = cpu_case([routed(), *padded(64)])
    found = dropped_tokens.RULE(case)
    assert "50.0 %" in found.claim and found.stake_ms == 0
    assert rules(case) == ["dropped_tokens"] and expert_imbalance.RULE(case) is None


def test_unequal_experts_without_padding_are_a_note():
    case = cpu_case([routed(), DENSE, *looped([10, 11, 12, 13, 400, 12, 11, 10])])
    assert expert_imbalance.RULE(case).stake_ms == 0
    assert expert_imbalance.RULE(cpu_case([routed(), DENSE, *looped(EVEN)])) is None


@pytest.mark.parametrize("module", ["blocks.0.experts.{}.up", "blocks.0.experts"])
def test_experts_that_multiply_on_their_own(module):
    """A dense product of all tokens takes 10 us, each expert's quarter of it 10 us as well."""
    case = cpu_case([routed(), DENSE, *looped(EVEN, module=module)])
    found = small_expert_matmuls.RULE(case)
    ideal = 0.01 * HIDDEN / (4 * WIDTH) * sum(EVEN) / TOKENS
    assert found.stake_ms == pytest.approx(0.08) and "8 products" in found.claim
    assert found.gain_ms == pytest.approx(0.08 - ideal)
    assert "128 rows on average by (192 x 256)" in found.evidence[0]
    assert rules(case)[0] == "small_expert_matmuls"
    done = [routed(), DENSE, *looped(EVEN, module=module)]
    on_gpu = small_expert_matmuls.RULE(gpu_case(done, card={"deviceProperties": []}))
    assert on_gpu.gain_ms == pytest.approx(0.08 - 1.5 * ideal)  # a grouped one gathers, too


def test_products_that_wait_for_a_core_are_no_slow_products():
    """Every second one takes ten times as long as it does where nobody interrupts it."""
    large = mm(TOKENS, WIDTH, 4 * WIDTH, 400, FP32, module="blocks.0.mlp")
    held_up = [replace(one, us=400) for one in looped(EVEN)]
    loop = [*looped(EVEN, us=40), *held_up]
    assert small_expert_matmuls.RULE(cpu_case([routed(), large, *loop])) is None
    case = cpu_case([routed(), DENSE, *loop])
    assert not small_expert_matmuls.RULE(case).ordinary
    run = make_run(ms=4.0)
    busy = replace(run, clock=replace(run.clock, contended=0.5))
    assert small_expert_matmuls.RULE(Case(busy, case.analysis)).ordinary


def test_what_is_around_the_products_of_a_cpu_stays():
    gather = RecordedOp("aten::index", 600, module="blocks.0", args=tensors([TOKENS, WIDTH]))
    large = mm(TOKENS, WIDTH, 4 * WIDTH, 400, FP32, module="blocks.0.mlp")
    loop = looped(EVEN, us=40, module="blocks.0.experts.{}.up")
    assert small_expert_matmuls.RULE(cpu_case([routed(), large, gather, *loop])) is None


def test_our_grouped_products_are_offered_where_the_model_has_our_experts():
    dense = replace(make_run(ms=1.0), ran=Ran({"experts": ("loop",)}))
    stranger = replace(dense, ran=Ran())
    loop, capacity = [routed(), DENSE, *looped(EVEN)], [routed(), *padded(64)]
    for rule, done in ((small_expert_matmuls, loop), (dropped_tokens, capacity)):
        assert "impl.experts=grouped" in rule.RULE(cpu_case(done, dense)).remedy
        remedy = rule.RULE(cpu_case(done, stranger)).remedy
        assert "impl." not in remedy and "torch._grouped_mm" in remedy


def test_nobody_is_told_to_group_what_is_grouped():
    done = RecordedOp("aten::_grouped_mm", 50, "void cutlass::device_kernel<GroupProblemShape>")
    assert small_expert_matmuls.RULE(gpu_case([routed(), DENSE, *looped(EVEN)])) is not None
    assert small_expert_matmuls.RULE(gpu_case([routed(), DENSE, *looped(EVEN), done])) is None


def test_the_loop_around_the_products_counts():
    """Experts in a list that is never called itself: their owner gathers and scatters."""
    gather = RecordedOp("aten::index", 60, module="blocks.0.moe", args=tensors([TOKENS, WIDTH]))
    elsewhere = RecordedOp("aten::add", 500, module="blocks.0")
    loop = looped(EVEN, module="blocks.0.moe.experts.{}.up")
    found = small_expert_matmuls.RULE(cpu_case([DENSE, gather, elsewhere, *loop]))
    assert found.stake_ms == pytest.approx(0.14)


def test_experts_as_quick_as_other_products_are_no_fault():
    large = mm(TOKENS, WIDTH, 4 * WIDTH, 400, FP32, module="blocks.0.mlp")
    assert small_expert_matmuls.RULE(cpu_case([large, *looped(EVEN, us=40)])) is None


def test_layers_and_steps_in_time_are_no_experts():
    layers = [mm(TOKENS, WIDTH, HIDDEN, 10, module=f"blocks.{i}.up") for i in range(12)]
    steps = [mm(4, WIDTH, HIDDEN, 10, module="cell") for _ in range(96)]
    for done in (layers, steps):
        assert small_expert_matmuls.RULE(gpu_case([mm(TOKENS, 512, 512, 5), *done])) is None
        assert expert_imbalance.RULE(gpu_case(done)) is None


def test_a_recurrent_layer_has_no_experts():
    """One product of all tokens, then one of the batch for every moment in time."""
    whole = mm(TOKENS, WIDTH, HIDDEN, 10, FP32, module="recurrent")
    moments = [mm(4, WIDTH, HIDDEN, 10, FP32, module="recurrent") for _ in range(96)]
    case = cpu_case([DENSE, whole, *moments])
    assert small_expert_matmuls.RULE(case) is None and expert_imbalance.RULE(case) is None


def test_parts_of_a_sequence_that_nothing_has_chosen_are_no_experts():
    """States of a recurrence, twice as many with every product."""
    doubled = [mm(2**turn, 16, 16, 10, FP32, module=f"layers.{turn % 2}") for turn in range(12)]
    case = cpu_case([DENSE, *doubled])
    assert small_expert_matmuls.RULE(case) is None and expert_imbalance.RULE(case) is None
    assert small_expert_matmuls.RULE(cpu_case([routed(), DENSE, *doubled])) is not None


def test_grouped_products_that_a_cpu_must_loop_over_are_left_alone():
    loop = cpu_case([routed(), DENSE, *looped(EVEN)])
    ran = replace(make_run(ms=1.0), ran=Ran(impls={"grouped_mm": ("loop",)}))
    assert small_expert_matmuls.RULE(Case(ran, loop.analysis)) is None
    eager = replace(ran, ran=Ran(impls={"experts": ("loop",)}))
    assert small_expert_matmuls.RULE(Case(eager, loop.analysis)) is not None


def reporting(**metrics):
    return Case(replace(make_run(ms=1.0), metrics=metrics))


def test_unequal_experts_that_the_step_reported():
    """No trace shows them: grouped and fused products have the rows of all experts in one."""
    case = reporting(load_LE=((0.25, 0.25, 0.25, 0.25), (0.9, 0.1, 0.0, 0.0)))
    found = expert_imbalance.RULE(case)
    assert "3.6 times the mean" in found.claim and found.stake_ms == 0
    assert found.evidence == ("layer 1: 90.0 % of the assignments to one of 4 experts, none to 2",)
    assert expert_imbalance.RULE(reporting(load_LE=((0.7, 0.1, 0.1, 0.1),))) is None
    assert expert_imbalance.RULE(reporting(load_LE=0.5, aux=1.0)) is None


def test_padding_counts_before_what_the_step_reported():
    run = reporting(load_LE=((0.25,) * 4,)).run
    assert expert_imbalance.RULE(cpu_case([routed(), *padded(400)], run)).stake_ms > 0
    sizes = [10, 11, 12, 13, 400, 12, 11, 10]
    assert expert_imbalance.RULE(cpu_case([routed(), DENSE, *looped(sizes)], run)) is None


def test_drops_that_the_step_reported():
    found = dropped_tokens.RULE(reporting(dropped=0.25))
    assert found.claim == "25.0 % of the assignments are dropped" and found.stake_ms == 0
    assert dropped_tokens.RULE(reporting(dropped=0.0)) is None
    assert dropped_tokens.RULE(reporting(aux=1.0)) is None
    told = replace(reporting(dropped=0.0).run)
    assert dropped_tokens.RULE(cpu_case([routed(), *padded(64)], told)) is None
