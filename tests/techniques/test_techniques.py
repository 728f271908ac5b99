"""Each technique changes what it says; what ran is compared with what was asked."""

import dataclasses
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

from steplab.core import Compilation, Environment, Ran, Run, RunSpec, registry
from steplab.core.codec import type_hints
from steplab.core.errors import Unsupported, UserError
from steplab.step.assemble import assemble, micro_batches
from steplab.step.trial import trial
from steplab.techniques.compile import repeated_blocks
from steplab.techniques.recipes import parse_recipe, technique
from tests.own_models import named


def loss_of(spec):
    step = assemble(spec)
    return step(next(micro_batches(step, spec))).loss.item()


def test_the_guide_names_every_technique_value_and_setting():
    guide = Path(__file__).parents[2] / "docs" / "techniques.md"
    lines = [line.split("|") for line in guide.read_text(encoding="utf-8").splitlines()]
    values = {row[1].strip(): row[2] for row in lines if len(row) == 7}
    for name in registry.names("steplab.techniques", "TECHNIQUE"):
        if name == "impl":  # its settings are the folders of kernels
            assert "`impl.<op>`" in values
            continue
        assert f"`{name}`" in values, f"docs/techniques.md has no row for {name}"
        settings = technique(name).settings
        first, *others = (field.name for field in dataclasses.fields(settings))
        wanted = [f"`{word}`" for word in get_args(type_hints(settings)[first])]
        wanted += [f"`.{other}" for other in others]
        missing = [word for word in wanted if word not in values[f"`{name}`"]]
        assert not missing, f"{name}: {missing}"


def test_bf16_reaches_the_matmuls_and_leaves_weights_alone(tiny_spec):
    step = assemble(tiny_spec("precision=bf16"))
    assert all(p.dtype == torch.float32 for p in step.model.parameters())
    run = trial(tiny_spec("precision=bf16"))
    assert set(run.ran.matmul_dtypes) == {"c10::BFloat16"}


def test_fp16_scales_its_gradients(tiny_spec):
    spec = tiny_spec("precision=fp16")
    step = assemble(spec)
    assert step.parts.scaler.is_enabled()
    before = [p.clone() for p in step.model.parameters()]
    assert torch.isfinite(step(next(micro_batches(step, spec))).loss)
    assert any(not torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))


def test_tf32_is_refused_without_a_gpu(tiny_spec):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(Unsupported, match="compute capability 8"):
        assemble(tiny_spec("precision=tf32"))


@pytest.mark.gpu
def test_tf32_is_on_during_the_step_and_off_for_the_next(tiny_spec):
    assert trial(tiny_spec("precision=tf32", device="cuda")).ran.matmul_precision == "high"
    assert trial(tiny_spec(device="cuda")).ran.matmul_precision == "highest"


@pytest.mark.parametrize("impl", ["reference", "math", "flash"])
def test_attention_by_name(tiny_spec, impl):
    run = trial(tiny_spec(f"impl.attention={impl}"))
    assert run.status == "ok" and run.ran.impls["attention"] == (impl,)
    assert loss_of(tiny_spec(f"impl.attention={impl}")) == pytest.approx(loss_of(tiny_spec()))


def test_a_model_without_the_op_is_refused(tiny_spec):
    parts = assemble(tiny_spec()).parts
    parts.model = nn.Linear(2, 2)
    with pytest.raises(Unsupported, match="no module that declares"):
        technique("impl").apply(parts, {"attention": "flash"})


@pytest.mark.parametrize("impl", ["forloop", "foreach", "fused"])
def test_optimizers_update_alike(tiny_spec, impl):
    spec, plain = tiny_spec(f"optimizer={impl}"), tiny_spec()
    weights = []
    for one in (spec, plain):
        step = assemble(one)
        feed = micro_batches(step, one)
        for _ in range(3):
            step(next(feed))
        weights.append(torch.cat([p.detach().flatten() for p in step.model.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)
    assert trial(spec).ran.optimizer == impl


@pytest.mark.parametrize("scope", ["blocks", "whole"])
def test_compiled_steps_compute_the_same(tiny_spec, scope):
    recipe = f"compile={scope},compile.backend=aot_eager"
    assert loss_of(tiny_spec(recipe)) == pytest.approx(loss_of(tiny_spec()), rel=1e-5)
    run = trial(tiny_spec(recipe))
    assert run.status == "ok", run.reason
    assert run.compilation.graphs == 1 and run.compilation.graphs_in_window == 0
    assert not run.compilation.breaks and run.compilation.warm_seconds > 0


@pytest.mark.slow
@pytest.mark.long
def test_blocks_share_one_graph_through_inductor(tiny_spec):
    """The real backend, once: two blocks, one forward graph, flash attention pinned inside."""
    run = trial(tiny_spec("compile=blocks,impl.attention=flash", mode="forward", steps=2))
    assert run.status == "ok", run.reason
    assert run.compilation.graphs == 1
    assert run.compilation.cold_seconds == run.compilation.first_seconds
    assert run.ran.impls["attention"] == ("flash",)


def test_refusals_keep_their_words_under_compile(tiny_spec):
    run = trial(tiny_spec("compile=blocks,compile.backend=eager,impl.attention=cudnn"))
    assert run.status == "unsupported" and "cudnn" in run.reason


def test_blocks_are_found_in_any_model():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            inner = [nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(3)]
            self.mixed = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])
            self.layers = nn.ModuleList(nn.Sequential(*pair) for pair in inner)

    assert [type(b) for b in repeated_blocks(Net())] == [nn.Sequential] * 3
    # x-transformers has a list of norms, None for those that a layer lacks, and calls no list.
    norms = [nn.ModuleList([nn.LayerNorm(2), None, None]) for _ in range(2)]
    with pytest.raises(Unsupported, match="compile=whole"):
        repeated_blocks(nn.ModuleList([*norms, nn.ModuleList([None, None])]))
    held = nn.ModuleList([nn.Linear(2, 2), None, nn.Linear(2, 2)])
    assert repeated_blocks(held) == [held[0], held[2]]
    with pytest.raises(Unsupported, match="compile=whole"):
        repeated_blocks(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("name", "settings", "ran"),
    [
        ("precision", {"dtype": "bf16"}, Ran(matmul_dtypes={"float": 87})),
        ("precision", {"dtype": "tf32"}, Ran({}, {}, {"float": 1}, matmul_precision="highest")),
        ("precision", {"dtype": "fp32"}, Ran({}, {}, {"float": 1}, matmul_precision="high")),
        ("impl", {"attention": "flash"}, Ran(impls={"attention": ("math",)})),
        ("impl", {"attention": "flash"},
         Ran({"attention": ("flash",)}, {"aten::_scaled_dot_product_cudnn_attention": 1})),
        ("optimizer", {"impl": "fused"}, Ran(optimizer="foreach")),
    ],
)  # fmt: skip
def test_what_ran_is_compared_with_what_was_asked(name, settings, ran):
    assert "was asked for" in technique(name).mismatch(settings, seen(ran))


def seen(ran=None, compilation=None, **spec) -> Run:
    environment = Environment("0", "3.11", "Linux", "cpu", 2, None)
    return Run("id", RunSpec("gpt", **spec), environment, ran=ran, compilation=compilation)


def test_an_fp32_router_in_a_bf16_model_is_no_mismatch():
    ran = Ran(matmul_dtypes={"c10::BFloat16": 90, "float": 12})
    assert technique("precision").mismatch({"dtype": "bf16"}, seen(ran)) == ""
    assert technique("precision").unverified({"dtype": "bf16"}, seen(ran)) == ""


def test_replayed_graphs_are_judged_by_their_kernels():
    kernels = {"void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>(Params)": 12}
    flash, cudnn = {"attention": "flash"}, {"attention": "cudnn"}
    impl = technique("impl")
    assert impl.mismatch(flash, seen(Ran({"attention": ("flash",)}, kernels=kernels))) == ""
    wrong = seen(Ran({"attention": ("cudnn",)}, kernels=kernels))
    assert "trace shows flash" in impl.mismatch(cudnn, wrong)


def test_without_evidence_it_is_unverified():
    bare = seen(Ran({"attention": ("flash",)}))
    assert technique("impl").mismatch({"attention": "flash"}, bare) == ""
    assert "unverified" in technique("impl").unverified({"attention": "flash"}, bare)
    assert "unverified" in technique("precision").unverified({"dtype": "bf16"}, bare)


def test_an_optimizer_without_an_update_is_noted():
    doubt = technique("optimizer").unverified({"impl": "fused"}, seen(Ran(), mode="forward"))
    assert "no effect" in doubt


def test_compile_must_compile():
    compile_ = technique("compile")
    assert "nothing was compiled" in compile_.mismatch({"scope": "blocks"}, seen(Ran()))
    done = Compilation(1, 0)
    assert compile_.mismatch({"scope": "blocks"}, seen(Ran(), done)) == ""


def test_cuda_graph_modes_must_replay_graphs():
    settings = {"scope": "whole", "mode": "reduce-overhead"}
    check = technique("compile").mismatch
    replayed, skipped = Compilation(1, 0), Compilation(1, 0, cudagraph_skips=3)
    assert check(settings, seen(Ran(graph_launches=4), replayed, device="cuda")) == ""
    assert "skipped 3" in check(settings, seen(Ran(graph_launches=4), skipped, device="cuda"))
    assert "skipped" in check(settings, seen(Ran(graph_launches=0), replayed, device="cuda"))


def test_cuda_graphs_are_refused_without_cuda(tiny_spec):
    with pytest.raises(Unsupported, match="CUDA graphs"):
        assemble(tiny_spec("compile=blocks,compile.mode=reduce-overhead"))


def test_skipped_fp16_updates_are_not_timed(tmp_path):
    """Gradients overflow at the first scales; the window must begin after they stopped."""
    path = tmp_path / "hot.py"
    path.write_text(
        "import torch, steplab\n"
        "def make():\n"
        "    def batches(size):\n"
        "        while True: yield torch.randn(size, 64)\n"
        "    loss = lambda model, x: (30 * model(x).float()).square().mean()\n"
        "    return steplab.UserModel(torch.nn.Linear(64, 64), batches, loss)\n"
    )
    fp16 = parse_recipe("precision=fp16")
    run = trial(RunSpec(named(f"{path}:make"), batch=4, warmup=0, steps=5, recipe=fp16))
    assert run.status == "ok" and not any("skipped" in note for note in run.notes)


def test_a_mismatch_fails_the_run(tiny_spec, monkeypatch):
    """A module that silently takes another implementation must not give a number."""
    from steplab.kernels import attention as op

    monkeypatch.setattr(op, "choose", lambda *args: "math")
    run = trial(tiny_spec("impl.attention=flash"))
    assert run.status == "failed" and "was asked for" in run.reason
    assert run.ran.impls["attention"] == ("math",), "the evidence is kept"


def test_partial_sums_of_bf16_products_are_a_word_of_the_recipe(tiny_spec):
    recipe = parse_recipe("precision=bf16,precision.sums=fp32")
    assert recipe.label == "precision=bf16,precision.sums=fp32"
    with pytest.raises(UserError, match="sums are those of bf16 products"):
        parse_recipe("precision=fp32,precision.sums=fp32")
    if not torch.cuda.is_available():
        with pytest.raises(Unsupported, match="a setting of cuBLAS"):
            assemble(tiny_spec(recipe))
    run = Run("x", tiny_spec(recipe), Environment("0", "3", "L", "C", 1, None))
    settings = recipe.techniques["precision"]
    for seen, said in (("bf16", "but they were in bf16"), ("fp32", "")):
        ran = Ran(matmul_dtypes={"c10::BFloat16": 3}, bf16_sums=seen)
        told = technique("precision").mismatch(settings, dataclasses.replace(run, ran=ran))
        assert bool(told) == bool(said) and said in told


@pytest.mark.gpu
def test_partial_sums_are_set_on_a_gpu_and_set_back(tiny_spec):
    run = trial(tiny_spec("precision=bf16,precision.sums=fp32", device="cuda"))
    assert run.status == "ok" and run.ran.bf16_sums == "fp32"
    assert trial(tiny_spec("precision=bf16", device="cuda")).ran.bf16_sums == "bf16"
