"""The whole model: sizes, wiring, chunks, masks, precision and training."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from steplab.core.errors import Unsupported, UserError
from steplab.modules.precision import configure_precision
from steplab.techniques.checkpointing import recompute
from steplab.workloads.megalodon.attention import rotate_pairs
from steplab.workloads.megalodon.config import PRESETS, MegalodonConfig
from steplab.workloads.megalodon.flops import parameters, work
from steplab.workloads.megalodon.model import Megalodon, check_padding
from steplab.workloads.workload import find_workload

COUNTS = {
    "tiny": 236_352,
    "playbook": 8_901_504,
    "mega200m": 220_627_968,
    "mega1.3b": 1_342_832_640,
    "mega1.3b-pg19": 1_327_628_288,
    "mega7.1b": 7_117_381_632,
    "mega7.3b": 7_385_817_088,
    "mega7b-paper": 7_385_817_088,
}
SMALL = MegalodonConfig(
    *(16, 2, 2),
    shared_width=8,
    value_width=16,
    ff_width=24,
    modes=3,
    norm_groups=4,
    chunk=16,
    context=40,
    vocab_size=30,
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Megalodon(SMALL).double()


def tokens(*shape):
    return torch.randint(SMALL.vocab_size, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", PRESETS)
def test_the_presets_have_the_published_sizes(size):
    with torch.device("meta"):
        model = Megalodon(PRESETS[size])
    assert sum(p.numel() for p in model.parameters()) == COUNTS[size]
    assert parameters(PRESETS[size]) == COUNTS[size]


def test_the_flops_are_those_of_the_products():
    config = PRESETS["mega200m"]
    found = work(config, 4, "full", {"attention": "reference"})
    matrices = 12 * (1024 * 256 + 2 * 1024 * 2048 + 1024**2 + 2048 * 1024 + 2 * 1024 * 2560)
    pairs = 2 * 2048 * 2049 / 2
    attention = 3 * 2 * pairs * (256 + 2048) * 4 * 12
    assert found.model == 6 * (matrices + 32_000 * 1024) * 16_384 + attention
    assert found.hardware > found.model and found.vector == 2 * 20 * 16_384 * 1024 * 16 * 12


def test_a_block_without_its_feed_forward_is_the_identity(model):
    """Both hops start from the block's input: attention reaches the output only through it."""
    block = model.blocks[0]
    torch.nn.init.zeros_(block.feed_forward.down.weight)
    x = torch.randn(1, 20, SMALL.width, dtype=torch.float64)
    assert torch.equal(block(x)[0], x)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 37])
def test_every_length_gives_a_loss_and_all_gradients(model, length):
    """The definition: a chunk at a time, each from its own first token."""
    loss = model(tokens(2, length), tokens(2, length))
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


def test_attention_stays_within_chunks(model):
    """Fed directly: another value in chunk 0 leaves chunk 1 as it was, to the bit."""
    attention = model.blocks[0].attention
    z = torch.randn(1, 40, SMALL.shared_width, dtype=torch.float64)
    v = torch.randn(1, 2, 40, 8, dtype=torch.float64)
    other = v.clone()
    other[:, :, 3] += 1
    before, after = attention._in_chunks(z, v), attention._in_chunks(z, other)
    assert torch.equal(before[:, :, 16:], after[:, :, 16:])
    assert torch.equal(before[:, :, :3], after[:, :, :3])
    assert not torch.equal(before[:, :, 3:16], after[:, :, 3:16])


def test_chunks_equal_attention_one_by_one(model):
    attention = model.blocks[0].attention
    z = torch.randn(2, 40, SMALL.shared_width, dtype=torch.float64)
    v = torch.randn(2, 2, 40, 8, dtype=torch.float64)
    whole = attention._in_chunks(z, v)
    for start in (0, 16, 32):
        part = slice(start, min(start + 16, 40))
        alone = attention._in_chunks(z[:, part], v[:, :, part])
        torch.testing.assert_close(whole[:, :, part], alone, rtol=1e-12, atol=1e-12)


def test_the_first_chunk_is_remembered_two_chunks_later(model):
    one = tokens(1, 40)
    other = one.clone()
    other[0, 2] = (one[0, 2] + 1) % SMALL.vocab_size
    with torch.no_grad():
        before, after = model(one), model(other)
    torch.testing.assert_close(before[:, :2], after[:, :2], rtol=1e-12, atol=1e-12)
    assert float((before[:, 39] - after[:, 39]).abs().max()) > 1e-9


def test_right_padding_changes_nothing_before_it(model):
    one = tokens(2, 30)
    valid = torch.ones(2, 30, dtype=torch.bool)
    valid[0, 21:] = False
    padded, other = one.clone(), one.clone()
    padded[0, 21:], other[0, 21:] = 0, 7
    plain, first, second = model(one), model(padded, valid_BL=valid), model(other, valid_BL=valid)
    torch.testing.assert_close(first[0, :21], plain[0, :21], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(first[1], plain[1], rtol=1e-12, atol=1e-12)
    assert torch.equal(first[0, :21], second[0, :21])
    with pytest.raises(UserError, match="Pad on the right"):
        model(one, valid_BL=~valid)


def test_left_padding_is_refused_by_compiled_code_too():
    check = torch.compile(check_padding, backend="aot_eager", fullgraph=True)
    valid = torch.arange(6)[None] < 4
    check(valid)
    with pytest.raises(RuntimeError, match="Pad on the right"):
        check(~valid)


@pytest.mark.parametrize("impl", ["sequential", "fft"])
def test_garbage_under_the_mask_is_gone_before_the_averages(model, impl):
    """A Fourier transform would spread one NaN over its whole row, also to what came before."""
    attention = model.blocks[0].attention
    attention.averages.impl = impl
    valid = torch.arange(30)[None] < 21
    x = torch.randn(1, 30, SMALL.width, dtype=torch.float64)
    plain = attention(torch.where(valid[..., None], x, 0.0), valid)[0]
    spoiled = torch.where(valid[..., None], x, torch.nan).requires_grad_()
    found = attention(spoiled, valid)[0]
    assert torch.equal(found, plain)
    found.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in (spoiled, *attention.parameters()))


@pytest.mark.parametrize("length", [0, 10])
def test_a_row_or_chunk_of_padding_is_finite_forward_and_backward(model, length):
    """Chunks have 16 tokens: nothing but padding in all of them, or in all but the first."""
    valid = torch.arange(40)[None] < length
    logits = model(tokens(1, 40), valid_BL=valid)
    logits.sum().backward()
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_targets_that_do_not_count(model):
    one, targets = tokens(1, 10), tokens(1, 10)
    some = targets.clone()
    some[0, 5:] = -100
    logits = model(one)[:, :5]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[0, :5])
    torch.testing.assert_close(model(one, some), expected)
    nothing = model(one, torch.full_like(targets, -100))
    nothing.backward()
    assert float(nothing.detach()) == 0
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_neighbors_turn_against_each_other():
    x = torch.randn(1, 1, 3, 4)
    angle = torch.randn(3, 2)
    found = torch.view_as_complex(rotate_pairs(x, angle.cos(), angle.sin()).view(1, 1, 3, 2, 2))
    expected = torch.view_as_complex(x.view(1, 1, 3, 2, 2)) * torch.polar(torch.ones(3, 2), angle)
    torch.testing.assert_close(found, expected)


def test_attention_starts_nearly_even(model):
    """Queries and keys have length 1 at the start, and scores no factor: all within -1 and 1."""
    attention = model.blocks[0].attention
    z = torch.randn(1, 16, SMALL.shared_width, dtype=torch.float64)
    q, k = attention.queries_keys(z, attention.rotary.first(16))
    torch.testing.assert_close(k.norm(dim=-1), torch.ones(1, 2, 16).double(), rtol=1e-4, atol=1e-4)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    assert float(scores.detach().abs().max()) <= 1 + 1e-6


def test_values_wider_than_keys_take_no_fused_kernel():
    torch.manual_seed(0)
    model = Megalodon(replace(SMALL, value_width=32))
    core = model.blocks[0].attention.attention
    model(tokens(1, 20))
    assert core.ran == "blocks"
    core.impl = "flash"
    with pytest.raises(Unsupported, match="values as wide as keys"):
        model(tokens(1, 20))


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch built for CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_block_on_a_gpu_is_one_graph(dtype, monkeypatch):
    """Fake CUDA tensors: whatever is asked and launched on a GPU must not break the graph."""
    pytest.importorskip("triton")
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    block = Megalodon(replace(SMALL, value_width=32)).blocks[0]
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in block.modules():
            for name, own in list(module._parameters.items()):
                if own is not None:
                    fake = torch.empty(own.shape, dtype=dtype, device="cuda")
                    module._parameters[name] = torch.nn.Parameter(fake)
            for name, own in list(module._buffers.items()):
                module._buffers[name] = torch.empty(own.shape, device="cuda")
        x = torch.empty(2, 20, SMALL.width, dtype=dtype, device="cuda")
        y, _ = torch.compile(block, backend="eager", fullgraph=True)(x)
    ran = {m.op: m.ran for m in block.modules() if hasattr(m, "ran")}
    assert ran == {"timestep_norm": "triton_running", "ema": "scan", "attention": "blocks"}
    assert y.shape == x.shape and y.dtype == dtype


def test_options_change_what_they_say():
    torch.manual_seed(0)
    tied = Megalodon(replace(SMALL, tied=True, swiglu=True, rescale_ff=True, scale_embedding=True))
    assert tied.head.weight is tied.embedding.weight
    assert tied.blocks[0].feed_forward.up.weight.shape == (48, 16)
    assert torch.allclose(tied.blocks[1].rescale.factor_D, torch.tensor(0.05))
    assert parameters(tied.config) == sum(p.numel() for p in tied.parameters())
    tied(tokens(1, 20), tokens(1, 20)).backward()


def test_fp16_is_refused_and_bf16_is_close():
    torch.manual_seed(0)
    model = Megalodon(SMALL)
    one, targets = tokens(2, 30), tokens(2, 30)
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(Unsupported, match="fp16"):
        model(one)
    plain = float(model(one, targets).detach())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = float(model(one, targets).detach())
    assert abs(plain - half) < 5e-2
    model.to(torch.bfloat16)
    averages = model.blocks[0].attention.averages
    assert averages.gamma_DN2.dtype == averages.alpha_DN.dtype == torch.float32
    assert model.blocks[0].attention.rotary.cos_TD.dtype == torch.float32
    assert model.blocks[0].attention.values.weight.dtype == torch.bfloat16
    assert torch.isfinite(model(one, targets))
    with pytest.raises(Unsupported, match="fp16"):
        model.to(torch.float16)(one)


def test_all_paths_of_the_averages_agree(model):
    one = tokens(1, 40)
    found = {}
    for impl in ("sequential", "fft", "fft_table"):
        for block in model.blocks:
            block.attention.averages.impl = impl
        found[impl] = model(one)
        assert model.blocks[0].attention.averages.ran == impl
    torch.testing.assert_close(found["fft"], found["sequential"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found["fft_table"], found["sequential"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("every", [1, 2])
def test_recomputed_blocks_have_the_same_gradients(model, every):
    """To the bit, also where the states after the last token are kept."""
    again = deepcopy(model)
    for index, block in enumerate(again.blocks):
        recompute(block, index % every == 0, rng=True)
    for one in (model, again):
        one.keeps_states = True
        one(tokens(2, 37), tokens(2, 37)).backward()
    for (name, plain), found in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(plain.grad, found.grad), name


def test_one_graph_with_the_same_values(model):
    one, targets = tokens(1, 20), tokens(1, 20)
    for block in model.blocks:
        block.attention.averages.impl = "sequential"
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(one, targets), model(one, targets))


def test_states_are_kept_in_training_only_where_asked_for(model):
    model(tokens(1, 20), tokens(1, 20))
    assert model.states == []
    model.keeps_states = True
    model(tokens(1, 20), tokens(1, 20)).backward()
    assert len(model.states) == 2 and not model.states[0].averages_B2ND.requires_grad
    assert model.states[0].statistics.count_B.tolist() == [20]


def test_one_batch_is_learned_by_heart():
    torch.manual_seed(0)
    workload = find_workload("megalodon").open(
        find_workload("megalodon").resolve("tiny", {"context": 32, "chunk": 16})
    )
    model = workload.model()
    optimizer = workload.optimizer(model)
    batch = next(iter(workload.batches(2, torch.device("cpu"), 0)))
    losses = []
    for _ in range(25):
        loss = workload.loss(model, batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]


def settings():
    matmul = torch.backends.cuda.matmul
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction_split_k,
    )


def test_settings_are_put_back():
    before = settings()
    with pytest.raises(ValueError), configure_precision(True, False):
        assert settings() == ("high", True, False, True)
        raise ValueError
    with configure_precision():
        assert settings() == before
    assert settings() == before


def test_products_that_must_not_be_split_are_not_afterwards():
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        with configure_precision(allow_bf16_reduced_precision_reduction=True):
            assert settings()[2:] == (True, True)
        assert settings()[2:] == (False, False)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = True


def test_a_setting_by_its_newer_name_is_left_alone():
    """torch raises where the older name is read after the newer one was written."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        with configure_precision(allow_bf16_reduced_precision_reduction=False):
            assert not matmul.allow_bf16_reduced_precision_reduction
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 3}, "do not split"),
        ({"norm_groups": 5}, "norm groups"),
        ({"modes": 0}, "modes must be at least 1"),
        ({"eps": 0.0}, "more than 0"),
    ],
)
def test_impossible_shapes_are_refused(change, words):
    with pytest.raises(UserError, match=words):
        replace(SMALL, **change)
