"""Rules about torch.compile, and about what ran instead of what was asked for."""

from dataclasses import replace

import pytest

from steplab.core import Compilation, Dataflow, Profile, Ran, Recipe, Recompile, Samples
from steplab.core.dataflow import GraphWaste
from steplab.findings import Case
from steplab.findings.rules import (
    compiled_not_faster,
    graph_breaks,
    other_backend,
    recompiles,
    torn_graphs,
    wasted_in_graph,
)
from steplab.trace.analyze import analyze
from steplab.trace.events import Trace
from tests.compare.test_step_tables import make_run
from tests.findings.steps import RecordedOp, cpu_case, gpu_case, mm, rules
from tests.trace.traces import op, python, range_

BREAK = "Data-dependent branching"


def compiled(**changes):
    return replace(make_run(ms=1.0), compilation=Compilation(**{"graphs": 2, **changes}))


def broken(between_us: int, run=None) -> Case:
    """A forward pass of 400 us in two graphs, with `between_us` between them."""
    half = (400 - between_us) * 500
    graphs = [op("CompiledFunction", 0, half), op("CompiledFunction", 400_000 - half, half)]
    graphs += [op("CompiledFunctionBackward", 400_000, 600_000)]
    resumed = python("net.py(30): torch_dynamo_resume_in_forward_at_30", 400_000 - half, half)
    done = [RecordedOp("aten::mm", 400), RecordedOp("aten::mm", 600, phase="backward")]
    return cpu_case(done, run, extra=[*graphs, resumed])


def test_breaks_cost_the_time_between_graphs():
    case = broken(100, compiled(graphs_in_window=0, breaks={BREAK: 3}))
    found = graph_breaks.RULE(case)
    assert found.stake_ms == pytest.approx(0.1) and found.gain_ms == pytest.approx(0.05)
    assert BREAK in found.evidence[0] and "2 of which run in a forward" in found.evidence[-1]
    assert "3 graph breaks" in found.claim and rules(case)[0] == "graph_breaks"


def test_breaks_that_only_the_trace_shows():
    found = graph_breaks.RULE(broken(100, compiled(graphs_in_window=0)))
    assert found.claim.endswith(" 1 graph break") and "net.py:30: resumed 1" in found.evidence[0]
    assert graph_breaks.RULE(broken(100)).stake_ms == pytest.approx(0.1)
    earlier = ("Skip calling it, net.py:30 (forward)", "Skip calling it, other.py:30 (forward)")
    before = compiled(graphs=0, graphs_in_window=0, earlier_breaks=earlier)
    assert graph_breaks.RULE(broken(100, before)).evidence[:2] == (earlier[0], found.evidence[0])
    whole = cpu_case([RecordedOp("aten::mm", 400)], extra=[op("CompiledFunction", 0, 300_000)])
    assert graph_breaks.RULE(whole) is None
    name = "torch/optim/optimizer.py(533): torch_dynamo_resume_in_wrapper_at_533"
    step = cpu_case([RecordedOp("aten::mm", 400)], extra=[python(name, 0, 300_000)])
    assert graph_breaks.RULE(step) is None  # torch's own, around every compiled update


def test_on_a_gpu_breaks_cost_the_kernels_between_graphs():
    inside = RecordedOp("aten::mm", 300, inside="CompiledFunction")
    resumed = python("net.py(30): torch_dynamo_resume_in_forward_at_30", 4_000, 4_000)
    found = graph_breaks.RULE(
        gpu_case([inside, RecordedOp("aten::mean", 40), inside], extra=[resumed])
    )
    assert found.stake_ms == pytest.approx(0.041)  # a microsecond is waited for a launch


def test_breaks_without_a_trace_have_an_unknown_cost():
    found = graph_breaks.RULE(Case(compiled(graphs_in_window=0, breaks={BREAK: 3})))
    assert found.stake_ms is None and BREAK in found.evidence[0]
    assert graph_breaks.RULE(Case(compiled(graphs_in_window=0))) is None
    assert graph_breaks.RULE(Case(make_run())) is None


GUARD = Recompile("forward", "tensor 'x' size mismatch at index 1. expected 32, actual 33")


def test_recompiles_cost_their_time_in_the_trace():
    run = compiled(graphs_in_window=1, recompiles=(GUARD, GUARD))
    compiling = [op("entire_frame_compile", 0, 300_000)]
    compiling += [op("entire_backward_compile", 500_000, 100_000)]
    case = cpu_case([RecordedOp("aten::mm", 1000)], run, extra=compiling)
    found = recompiles.RULE(case)
    assert found.stake_ms == pytest.approx(0.4) and "size mismatch" in found.evidence[0]
    assert "(x 2)" in found.evidence[0] and rules(case)[0] == "recompiles"


def test_recompiles_cost_the_slow_samples_without_a_trace():
    run = compiled(graphs_in_window=3, recompiles=(GUARD,))
    slow = replace(run, clock=replace(run.clock, step=Samples((1.0, 9.0, 1.0, 9.0, 1.0), "ms")))
    assert recompiles.RULE(Case(slow)).stake_ms == pytest.approx(3.2)


def test_recompiles_before_the_window_are_a_note():
    early = compiled(graphs_in_window=0, recompiles=(GUARD,))
    assert recompiles.RULE(Case(early)).stake_ms == 0
    assert recompiles.RULE(Case(compiled(graphs_in_window=0))) is None


def test_what_was_compiled_too_often_costs_what_runs_op_by_op():
    guards = [
        Recompile(
            "forward", f"0/{n}: self.number == {n}", "net.py:5 (forward)", "net.py:9 (forward)"
        )
        for n in range(7)
    ]
    run = compiled(graphs_in_window=6, recompiles=(*guards, replace(guards[0], given_up=True)))
    stack = "net.py(5): forward"
    done = [RecordedOp("aten::mm", 300, line=stack), RecordedOp("aten::tanh", 200, line=stack)]
    case = cpu_case([*done, RecordedOp("aten::mm", 500, line="net.py(30): head")], run)
    found = recompiles.RULE(case)
    assert found.stake_ms == pytest.approx(0.5) and found.gain_ms == pytest.approx(0.5 * 0.2)
    assert found.evidence[0] == "forward: 0/0: self.number == 0 (x 8), net.py:9 (forward)"
    assert "tensor" in found.remedy and rules(case)[0] == "recompiles"
    # Values that come in turn: those of the profiled steps were compiled, and took half as long.
    steady = replace(run, compilation=replace(run.compilation, graphs_in_window=0))
    slow = replace(steady, clock=replace(run.clock, step=Samples((2.0,) * 6, "ms")))
    lucky = cpu_case([RecordedOp("CompiledFxGraph", 1000, line=stack)], slow)
    assert recompiles.RULE(lucky).gain_ms == pytest.approx(1.0)
    # Timed steps that compiled were no steps op by op.
    for samples, of_median in (((1.0, *[400.0] * 5), 399.5), ((*[400.0] * 2, *[0.5] * 9), 0.0)):
        compiling = replace(run, clock=replace(run.clock, step=Samples(samples, "ms")))
        found = recompiles.RULE(cpu_case(done, compiling))
        assert "500.0 us a step run uncompiled, after " in found.claim
        assert found.stake_ms == pytest.approx(of_median + 0.5)
        assert found.gain_ms == pytest.approx(of_median + 0.5 * 0.2)
    fewer = cpu_case(done, compiled(graphs_in_window=0, recompiles=tuple(guards)))
    assert recompiles.RULE(fewer).stake_ms == 0


def test_what_a_function_calls_runs_op_by_op_with_it_and_a_low_limit_is_told():
    """The layers of a model that was given up are in functions of their own."""
    guard = Recompile("forward", "0/0: size", "net.py:5 (forward)", "", given_up=True)
    run = compiled(graphs=0, graphs_in_window=0, recompiles=(guard,))
    profile = Profile((0, 1, 1, 1), (), setup_lines={"recompile_limit": ("train.py:3 (main)",)})
    inner = RecordedOp("aten::tanh", 300, line="net.py(20): layer")
    outer = RecordedOp("aten::tanh", 200, line="net.py(5): forward")
    called = python("net.py(5): forward", 0, 510_000)
    done = [outer, inner, RecordedOp("aten::mm", 500, line="net.py(30): head")]
    found = recompiles.RULE(cpu_case(done, replace(run, profile=profile), extra=[called]))
    assert found.gain_ms == pytest.approx(0.5 * 0.5) and "1 time more" in found.claim
    assert "the limit is set at train.py:3 (main)" in found.evidence
    assert "recompile_limit at 8" in found.remedy


def test_a_detailed_step_that_was_compiled_does_not_hide_those_that_were_not():
    """Frozen at random: some steps match a graph of earlier ones, and the others run op by op."""
    guard = "tensor 'self.layers[0].bias' requires_grad mismatch. expected requires_grad=1."
    advice = " Guard failed on a parameter, consider using torch._dynamo.config.some_option = False"
    again = [
        Recompile("forward", f"0/{n}: {guard}{advice}", "net.py:5 (forward)") for n in range(7)
    ]
    run = compiled(graphs_in_window=0, recompiles=(*again, replace(again[0], given_up=True)))

    def step(*done: RecordedOp) -> Trace:
        return cpu_case(list(done)).analysis.trace

    graph = RecordedOp("CompiledFunction", 800, line="net.py(5): forward")
    loss = RecordedOp("aten::mse_loss", 100, line="train.py(9): step")
    update = RecordedOp("aten::_foo", 100, phase="optimizer")
    eager = [RecordedOp("aten::mm", 300), RecordedOp("aten::tanh", 500)]
    case = Case(run, analyze(step(*eager, loss, update), step(graph, loss, update)))
    found = recompiles.RULE(case)
    assert found.stake_ms == pytest.approx(0.8) and found.gain_ms == pytest.approx(0.5 * 0.5)
    assert found.evidence[0] == f"forward: 0/0: {guard} (x 8), net.py:5 (forward)"
    assert "freeze the same weights" in found.remedy and rules(case)[0] == "recompiles"
    same = Case(run, analyze(step(graph, loss, update), step(graph, loss, update)))
    assert recompiles.RULE(same).gain_ms == 0  # those steps are compiled, too


def with_recipe(ms: float, **techniques):
    return replace(make_run(ms=ms), spec=replace(make_run().spec, recipe=Recipe(techniques)))


def test_a_compiled_step_that_is_no_faster():
    eager = with_recipe(10.0, precision={"dtype": "bf16"})
    other = with_recipe(1.0)
    techniques = {"precision": {"dtype": "bf16"}, "compile": {"scope": "whole"}}
    slow = with_recipe(12.0, **techniques)
    found = compiled_not_faster.RULE(Case(slow, others=(eager, other)))
    assert found.stake_ms == pytest.approx(2.0) and eager.id in found.evidence[0]
    assert compiled_not_faster.RULE(Case(slow, others=(other,))) is None
    assert compiled_not_faster.RULE(Case(with_recipe(8.0, **techniques), others=(eager,))) is None
    assert compiled_not_faster.RULE(Case(eager, others=(slow,))) is None
    same = compiled_not_faster.RULE(Case(with_recipe(9.9, **techniques), others=(eager,)))
    assert same.stake_ms == 0


CASES = pytest.mark.parametrize("made", [cpu_case, gpu_case])
SUM = RecordedOp("aten::add", 400, "vectorized_elementwise_kernel", line="net.py(9): forward")
PRODUCT = mm(64, 64, 64, 600)
REGION = "Torch-Compiled Region: 0/0"


@CASES
def test_a_result_of_compile_that_nobody_calls(made):
    lines = {"torch.compile": ("net.py:3 (make)",)}
    profile = Profile((0, 1, 1, 1), (), never_compiled=("Net",), setup_lines=lines)
    case = made([SUM, PRODUCT], replace(make_run(ms=1.0), profile=profile))
    found = compiled_not_faster.RULE(case)
    assert "wraps Net and compiled nothing" in found.claim and "net.py:3" in found.evidence[0]
    assert found.gain_ms == pytest.approx(0.78 * 0.4, rel=0.01)
    assert rules(case)[0] == "compiled_not_faster"
    never = replace(case.run, profile=replace(profile, never_compiled=()))
    assert compiled_not_faster.RULE(Case(never, case.analysis)) is None


@CASES
def test_what_a_break_leaves_uncompiled_is_one_finding_with_the_break(made):
    reason = f"forward left uncompiled: {BREAK}, net.py:8 (forward)"
    profile = Profile((0, 1, 1, 1), (), never_compiled=("Net",))
    run = compiled(graphs=0, graphs_in_window=0, breaks={reason: 1})
    case = made([SUM, PRODUCT], replace(run, profile=profile))
    found = compiled_not_faster.RULE(case)
    assert found.evidence[0] == reason and "method" not in found.why
    assert "graph_breaks" not in rules(case)


@CASES
def test_a_function_that_a_break_leaves_uncompiled_beside_others_that_run_as_graphs(made):
    """A loss with item() in its loop: what it calls is compiled, itself it is not."""
    reason = f"loss left uncompiled: {BREAK}, net.py:8 (loss)"
    own = {"line": "net.py(8): loss"}
    done = [replace(SUM, **own) for _ in range(8)]
    graph = replace(PRODUCT, inside="CompiledFunction", line="net.py(20): helper")
    run = compiled(graphs=0, graphs_in_window=0, breaks={reason: 1})
    case = made([*done, graph], run)
    found = graph_breaks.RULE(case)
    assert "leaves loss uncompiled" in found.claim and reason in found.evidence
    assert found.gain_ms == pytest.approx(0.78 * found.stake_ms) and found.stake_ms > 0.5
    assert rules(case)[0] == "graph_breaks" and "unfused_chain" not in rules(case)


def test_torch_compile_in_the_step():
    """Its share of the recorded step, which stacks make slower."""
    done = [RecordedOp("aten::mm", 1_000, line="net.py(7): forward")]
    inside = python("torch/nn/modules/module.py(3040): compile", 110_000, 180_000)
    again = python("torch/__init__.py(2577): compile", 100_000, 200_000)
    found = compiled_not_faster.RULE(cpu_case(done, extra=[again, inside]))
    assert "called 1 times a step" in found.claim and found.gain_ms == pytest.approx(0.2, rel=0.1)
    assert "net.py:7 (forward)" in found.evidence[0]
    short = python("torch/__init__.py(2577): compile", 100_000, 20_000)
    assert compiled_not_faster.RULE(cpu_case(done, extra=[short])) is None


@CASES
@pytest.mark.parametrize("around", ["CompiledFunction", REGION])
def test_a_backend_that_fuses_nothing(made, around):
    inside = [replace(SUM, inside=around), replace(PRODUCT, inside=around)]
    found = compiled_not_faster.RULE(made(inside))
    assert found.claim.startswith("compiled graphs run op by op")
    assert "net.py:9 (forward)" in found.evidence[0]
    fused = range_("## Call CompiledFxGraph abc ##", 0, 1_000)
    assert compiled_not_faster.RULE(made(inside, extra=[fused])) is None
    assert compiled_not_faster.RULE(made([SUM, PRODUCT])) is None


@CASES
@pytest.mark.parametrize("name", ["mine::gate", "aten::softmax"])
def test_an_operator_that_the_compiler_cannot_look_into(made, name):
    graph = [op("CompiledFunction", 0, 2_000_000), range_("## Call CompiledFxGraph a ##", 0, 1_000)]
    found = compiled_not_faster.RULE(made([replace(SUM, inside=name), PRODUCT], extra=graph))
    assert found is None or "operators of one's own" in found.claim
    assert (found is not None) == name.startswith("mine::")


def test_another_attention_than_asked_for():
    flash = RecordedOp("aten::_flash_attention_forward", 300, "pytorch_flash::flash_fwd_kernel<>")
    asked = with_recipe(1.0, impl={"attention": "cudnn"}, compile={"scope": "whole"})
    asked = replace(asked, ran=Ran())
    case = gpu_case([flash, mm(64, 64, 64, 700)], asked)
    found = other_backend.RULE(case)
    assert "cudnn was asked for, flash ran" in found.claim and "compiled" in found.evidence[1]
    assert found.stake_ms == pytest.approx(0.3) and rules(case)[0] == "other_backend"
    right = replace(
        asked, spec=replace(asked.spec, recipe=Recipe({"impl": {"attention": "flash"}}))
    )
    assert other_backend.RULE(Case(right, case.analysis)) is None
    assert other_backend.RULE(Case(None, case.analysis)) is None


def test_another_attention_in_a_run_without_a_trace():
    ops = {"aten::_scaled_dot_product_flash_attention_for_cpu": 4}
    asked = replace(with_recipe(1.0, impl={"attention": "math"}), ran=Ran(attention_ops=ops))
    assert "math was asked for, flash ran" in other_backend.RULE(Case(asked)).claim
    for free in ("auto", "dense_mask"):  # a mask says nothing of the kernel
        asked = replace(with_recipe(1.0, impl={"attention": free}), ran=Ran(attention_ops=ops))
        assert other_backend.RULE(Case(asked)) is None


@pytest.mark.parametrize(
    ("waste", "gain", "said"),
    [
        (GraphWaste("n", "net.py:9 (forward)", 0.5, 0.25), 0.5 * 0.6 + 0.25 * 0.4, "multiplied by"),
        (GraphWaste("o", "net.py:9 (step)", 0.0, 0.5), 0.5 * 0.4, "outputs that nobody reads"),
        (GraphWaste("u", "", 0.01, 0.01), None, ""),
    ],
)
def test_what_compiled_graphs_compute_for_nothing(waste, gain, said):
    profile = Profile((0, 1, 1, 1), (), dataflow=Dataflow((), (), "", graphs=(waste,)))
    run = replace(make_run(ms=1.0), clock=None, profile=profile)
    done = [mm(64, 64, 64, 600), RecordedOp("triton_poi_fused_add", 400)]
    case = cpu_case([replace(one, inside="CompiledFunction") for one in done], run)
    found = wasted_in_graph.RULE(case)
    assert bool(found) == (gain is not None)
    if gain:
        assert found[0].gain_ms == pytest.approx(gain) and said in found[0].claim
        assert "net.py:9" in found[0].evidence[0]


def called(name: str, us: int, **changes) -> RecordedOp:
    """A compiled region with one operator in it."""
    region = "Torch-Compiled Region: 0/0"
    return RecordedOp(name, us, inside=region, line="net.py(4): forward", **changes)


def test_elementwise_work_in_several_graphs():
    piece = called("triton_poi_fused_add", 200)
    rest = mm(64, 64, 64, 400)
    found = torn_graphs.RULE(cpu_case([piece, piece, piece, rest]))
    assert found.stake_ms == pytest.approx(0.6) and found.gain_ms == pytest.approx(0.5 * 0.4)
    assert "3 compiled graphs" in found.claim and "net.py:4 (forward)" in found.evidence[1]
    # Products between them, or in them as in blocks of a model, leave nothing to fuse.
    assert torn_graphs.RULE(cpu_case([piece, rest, piece, rest, piece])) is None
    block = called("aten::mm", 200)
    assert torn_graphs.RULE(cpu_case([block, block, block, rest])) is None
    assert torn_graphs.RULE(cpu_case([piece, rest])) is None
