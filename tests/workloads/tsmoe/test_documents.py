"""Documents packed into one row behave as if each stood alone in a row of its own."""

import pytest
import torch
import torch.nn.functional as F

from steplab.kernels import attention as attention_op
from steplab.modules.attention import document_positions, document_starts
from steplab.workloads.tsmoe.config import TsmoeConfig
from steplab.workloads.tsmoe.loss import HorizonLoss
from steplab.workloads.tsmoe.model import Tsmoe

SHAPE = {"hidden_size": 32, "n_decoder_layers": 2, "n_head": 2, "num_experts": 4, "d_ff": 32}
POINTS = 72
LENGTHS = (20, 8, 32, 12)  # together POINTS; multiples of the longest patch here


def build(dtype=torch.float64, **changes):
    torch.manual_seed(0)
    options = {"d_expert": 16, "seq_max_len": POINTS, "horizons": "1,4,9", **changes}
    return Tsmoe(TsmoeConfig(**(SHAPE | options))).to(dtype)


def packed_row(dtype=torch.float64, ids=(3, 1, 7, 0)):
    """Return values and ids with one point more than the tokens: a target of the last document."""
    values = torch.randn(1, POINTS + 1, dtype=dtype, generator=torch.Generator().manual_seed(1))
    documents = torch.cat([torch.full((n,), i) for n, i in zip(LENGTHS, ids, strict=True)])
    return values, F.pad(documents, (0, 1), value=ids[-1])[None].int()


def spans():
    start = 0
    for length in LENGTHS:
        yield slice(start, start + length)
        start += length


def test_places_in_documents():
    ids = torch.tensor([[5, 5, 2, 2, 2, 5, 0], [1, 1, 1, 1, 1, 1, 1]])
    starts = [[0, 0, 2, 2, 2, 5, 6], [0] * 7]
    assert document_starts(ids).tolist() == starts
    assert document_positions(ids).tolist() == [[0, 1, 0, 1, 2, 0, 0], list(range(7))]


@pytest.mark.parametrize("layout", ["gelu", "time-moe"])
@pytest.mark.parametrize("patch", [1, 4])
def test_outputs_equal_those_of_the_document_alone(layout, patch):
    model = build(layout=layout, patch_length=patch)
    values, documents = packed_row()
    with torch.no_grad():
        together = model(values[:, :-1], documents_BT=documents[:, :-1]).outputs_BNH
        for span in spans():
            alone = model(values[:, span]).outputs_BNH
            tokens = slice(span.start // patch, span.stop // patch)
            torch.testing.assert_close(together[:, tokens], alone, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("patch", [1, 4])
def test_gradients_equal_those_of_the_document_alone(patch):
    """The loss of one document, the others masked: every weight's gradient is the same."""
    values, documents = packed_row()
    for span in spans():
        model = build(patch_length=patch, aux_factor=0.0)
        mask = torch.zeros(1, POINTS + 1, dtype=torch.bool)
        mask[:, span] = True
        together = model(values, mask, documents).prediction
        found = torch.autograd.grad(together, list(model.parameters()))
        # Alone: the same points; one more, unknown, because the last point is only a target.
        alone = model(F.pad(values[:, span], (0, 1)), F.pad(mask[:, span], (0, 1))).prediction
        wanted = torch.autograd.grad(alone, list(model.parameters()))
        torch.testing.assert_close(together, alone, rtol=1e-12, atol=0)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-14)


def test_a_document_does_not_see_its_neighbors():
    model = build()
    values, documents = packed_row()
    values.requires_grad_()
    outputs = model(values[:, :-1], documents_BT=documents[:, :-1]).outputs_BNH
    for span in spans():
        (seen,) = torch.autograd.grad(outputs[:, span].sum(), values, retain_graph=True)
        outside = torch.ones(POINTS + 1, dtype=torch.bool)
        outside[span] = False
        assert seen[0, span].abs().min() > 0
        assert not seen[0, outside].any()


@pytest.mark.parametrize("patch", [1, 4])
def test_no_target_crosses_a_document(patch):
    """Against a loop over tokens and points."""
    torch.manual_seed(0)
    horizons, T = (1, 3, 9), POINTS + 1
    values, documents = packed_row()
    mask = torch.rand(1, T) > 0.2
    outputs = torch.randn(1, POINTS // patch, sum(horizons), dtype=torch.float64)
    of_head = []
    for head, prediction in zip(horizons, outputs[0].split(horizons, -1), strict=True):
        errors = [
            F.huber_loss(prediction[n, i], values[0, p], delta=2.0)
            for n in range(POINTS // patch)
            for i in range(head)
            if (p := (n + 1) * patch + i) < T
            and mask[0, p]
            and documents[0, p] == documents[0, n * patch]
        ]
        of_head.append(torch.stack(errors).mean())
    loss = HorizonLoss(horizons, patch, 2.0)(outputs, values, mask, documents)
    torch.testing.assert_close(loss, torch.stack(of_head).mean())


def test_equal_ids_that_do_not_touch_are_two_documents():
    model = build()
    values, documents = packed_row()
    _, repeated = packed_row(ids=(4, 9, 4, 9))
    mask = torch.ones(1, POINTS + 1, dtype=torch.bool)
    with torch.no_grad():
        assert torch.equal(
            model(values, mask, documents).total, model(values, mask, repeated).total
        )


@pytest.mark.parametrize("layout", ["gelu", "time-moe"])
def test_the_balancing_loss_does_not_count_padding(layout):
    """The routing of a row with padding at its end is that of the row without it."""
    model = build(layout=layout)
    values, documents = packed_row()
    mask = torch.ones(1, POINTS + 1, dtype=torch.bool)
    documents[:, LENGTHS[0] :] = -1
    short = slice(0, LENGTHS[0] + 1)
    with torch.no_grad():
        whole, alone = model(values, mask, documents), model(values[:, short], mask[:, short])
    torch.testing.assert_close(whole.load_LE, alone.load_LE, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(whole.balance, alone.balance, rtol=1e-12, atol=0)


def test_without_documents_the_mathematics_is_the_plain_one():
    """Bit for bit: the layers written out with positions from 0 and no documents anywhere."""
    model = build(torch.float32)
    values = torch.randn(3, POINTS)
    with torch.no_grad():
        x = model.embedding(values[..., None])
        for block in model.blocks:
            part = block.attention
            q, k, v = (
                p.unflatten(-1, (2, -1)).transpose(1, 2)
                for p in part.qkv(block.attention_norm(x)[0]).chunk(3, -1)
            )
            q, k = model.rotary(q), model.rotary(k)
            impl = attention_op.choose("auto", q, k, v, True)
            mixed = attention_op.attention(impl, q, k, v, True)
            x = x + part.out(mixed.transpose(1, 2).flatten(-2))
            for norm, mixture in zip(block.norms, block.mixtures, strict=True):
                x = x + mixture(norm(x)[0])[0]
        assert torch.equal(model(values).outputs_BNH, model.heads(x))


def test_one_document_per_row_is_the_same_as_none():
    model = build()
    values, _ = packed_row()
    mask = torch.ones(1, POINTS + 1, dtype=torch.bool)
    whole = torch.zeros(1, POINTS + 1, dtype=torch.int32)
    with torch.no_grad():
        without, with_one = model(values, mask), model(values, mask, whole)
    torch.testing.assert_close(without.total, with_one.total, rtol=1e-12, atol=0)


@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_documents_compile_without_a_break(scope):
    """One graph, whatever the documents are; with quantiles too."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, compiled = (build(torch.float32, quantiles="0.1,0.9") for _ in range(2))
    for module in [compiled] if scope == "model" else compiled.blocks:
        module.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    values, documents = packed_row(torch.float32)
    mask = torch.ones(1, POINTS + 1, dtype=torch.bool)
    for turn in range(3):
        moved = documents.roll(turn * 3, 1)
        eager, traced = model(values, mask, moved).total, compiled(values, mask, moved).total
        torch.testing.assert_close(eager, traced)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_gpu_packed_step_runs_without_host_syncs(compiled):
    model = build(torch.float32, hidden_size=64).cuda()
    if compiled:
        torch._dynamo.reset()
        model.compile(fullgraph=True, dynamic=False)
    values, documents = (x.cuda() for x in packed_row(torch.float32))
    mask = torch.ones_like(documents, dtype=torch.bool)

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(values, mask, documents).total
        loss.backward()
        return loss

    for _ in range(3):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(loss)
    assert model.blocks[0].attention.attention.ran == "triton_flash"
