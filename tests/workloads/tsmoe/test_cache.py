"""Going on from a cache equals computing everything again."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.core.errors import UserError
from steplab.modules.kv_cache import KVCache
from steplab.testing.tolerance import assert_as_good_as
from steplab.workloads.tsmoe.config import TsmoeConfig
from steplab.workloads.tsmoe.model import Tsmoe

SHAPE = {"hidden_size": 32, "n_decoder_layers": 2, "n_head": 2, "num_experts": 4, "d_ff": 32}
POINTS = 48


def build(dtype=torch.float64, **changes):
    torch.manual_seed(0)
    options = {"d_expert": 16, "seq_max_len": POINTS, "horizons": "1,4,9", **changes}
    return Tsmoe(TsmoeConfig(**SHAPE, **options)).to(dtype)


def in_pieces(model, values, sizes, documents=None, capacity=None):
    """Return the outputs of all tokens, computed piece by piece; `sizes` count points."""
    patch = model.config.patch_length
    cache = KVCache.empty(model, len(values), capacity or values.shape[1] // patch)
    parts = []
    for piece, own in zip(
        values.split(sizes, 1),
        documents.split(sizes, 1) if documents is not None else [None] * len(sizes),
        strict=True,
    ):
        parts.append(model.extend(piece, cache, own).outputs_BNH)
    return torch.cat(parts, 1)


MODELS = {patch: build(patch_length=patch) for patch in (1, 4)}


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_split_equals_the_whole(data):
    patch = data.draw(st.sampled_from([1, 4]))
    tokens = POINTS // patch
    cuts = data.draw(st.lists(st.integers(1, tokens - 1), unique=True, max_size=6).map(sorted))
    edges = [0, *cuts, tokens]
    sizes = [(b - a) * patch for a, b in pairwise(edges)]
    values = torch.randn(2, POINTS, dtype=torch.float64)
    with_documents = data.draw(st.booleans())
    documents = None
    if with_documents:
        ids = data.draw(st.lists(st.integers(0, 2), min_size=2 * tokens, max_size=2 * tokens))
        documents = torch.tensor(ids).view(2, tokens).repeat_interleave(patch, 1).int()
    model = MODELS[patch]
    with torch.no_grad():
        whole = model(values, documents_BT=documents).outputs_BNH
    pieces = in_pieces(model, values, sizes, documents)
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("patch", [1, 4])
def test_left_padded_rows_equal_rows_alone(patch):
    """Rows of three lengths in one batch, extended together, against each row uncached."""
    model = MODELS[patch]
    lengths, later = (12, 24, 4), 16
    rows = [torch.randn(1, n + later, dtype=torch.float64) for n in lengths]
    width = max(lengths)
    values = torch.cat(
        [
            torch.nn.functional.pad(row[:, :n], (width - n, 0))
            for row, n in zip(rows, lengths, strict=True)
        ]
    )
    documents = torch.stack([(torch.arange(width) >= width - n).int() for n in lengths])
    cache = KVCache.empty(model, 3, (width + later) // patch)
    parts = [model.extend(values, cache, documents).outputs_BNH]
    rest = torch.cat([row[:, n:] for row, n in zip(rows, lengths, strict=True)])
    for piece in rest.split(8, 1):
        parts.append(model.extend(piece, cache).outputs_BNH)
    together = torch.cat(parts, 1)
    for index, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        with torch.no_grad():
            alone = model(row).outputs_BNH[0]
        found = together[index, (width - n) // patch :]
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-13)


def test_what_the_padding_holds_does_not_matter():
    model = MODELS[1]
    values, documents = torch.randn(2, 20, dtype=torch.float64), torch.ones(2, 20).int()
    documents[1, :7] = 0
    other = values.clone()
    other[1, :7] = 99.0
    first, second = (in_pieces(model, v, [20], documents) for v in (values, other))
    torch.testing.assert_close(first[1, 7:], second[1, 7:], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("padded", [False, True])
def test_fp32_is_as_good_as_the_uncached_one(padded):
    model, exact = build(torch.float32), build()
    exact.load_state_dict(model.state_dict())
    values = torch.randn(2, POINTS)
    documents = None
    if padded:
        documents = (torch.arange(POINTS) >= torch.tensor([[0], [11]])).int()
    with torch.no_grad():
        truth = exact(values.double(), documents_BT=documents).outputs_BNH
        peer = model(values, documents_BT=documents).outputs_BNH
    cached = in_pieces(model, values, [30, 1, 9, 8], documents)
    assert_as_good_as(cached, peer, truth, "cached outputs")


def test_room_beyond_what_is_used_changes_nothing():
    values = torch.randn(2, 20, dtype=torch.float64)
    tight, roomy = (in_pieces(MODELS[1], values, [12, 8], capacity=c) for c in (20, 33))
    torch.testing.assert_close(tight, roomy, rtol=1e-12, atol=1e-14)


def test_a_cache_may_be_longer_than_the_trained_window():
    """Positions go on: the same as a model that was built for the longer window."""
    model, longer = build(), build(seq_max_len=2 * POINTS)
    longer.load_state_dict(model.state_dict())
    values = torch.randn(1, POINTS + 20, dtype=torch.float64)
    with torch.no_grad():
        wanted = longer(values).outputs_BNH
    found = in_pieces(model, values, [POINTS, 20])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


def test_a_model_can_be_trained_after_forecasts_in_inference_mode():
    model = build()
    values = torch.randn(1, POINTS + 20, dtype=torch.float64)
    with torch.inference_mode():
        in_pieces(model, values, [POINTS, 20])
    known = torch.ones(1, POINTS + 1, dtype=torch.bool)
    model(values[:, : POINTS + 1], known).total.backward()


def test_under_autocast_the_cache_is_16_bit():
    model = build(torch.float32)
    values = torch.randn(2, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        found = in_pieces(model, values, [16, 8])
        assert KVCache.empty(model, 2, 4).keys_LBGSD.dtype == torch.bfloat16
        wanted = model(values).outputs_BNH
    exact = build()
    exact.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert_as_good_as(found, wanted, exact(values.double()).outputs_BNH, "bf16 outputs")


def test_a_failed_piece_leaves_the_cache_as_it_was():
    model = MODELS[1]
    values = torch.randn(2, 20, dtype=torch.float64)
    cache = KVCache.empty(model, 2, 20)
    model.extend(values[:, :12], cache)
    with pytest.raises(UserError, match="cannot take 2 rows of 9 more"):
        model.extend(values[:, :9], cache)
    with pytest.raises(UserError, match="cannot take 1 rows"):
        model.extend(values[:1, 12:], cache)
    with pytest.raises(UserError, match="whole tokens of 4"):
        MODELS[4].extend(values[:, :7], KVCache.empty(MODELS[4], 2, 20))
    assert cache.length == 12
    with torch.no_grad():
        whole = model(values).outputs_BNH
    found = model.extend(values[:, 12:], cache).outputs_BNH
    torch.testing.assert_close(found, whole[:, 12:], rtol=1e-12, atol=1e-13)


def test_auto_finds_an_implementation_for_fewer_queries_than_keys():
    model = MODELS[1]
    cache = KVCache.empty(model, 1, 8)
    values = torch.randn(1, 8, dtype=torch.float64)
    model.extend(values[:, :5], cache)
    model.extend(values[:, 5:], cache)
    assert all(block.attention.attention.ran for block in model.blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True])
def test_gpu_cached_is_as_good_as_uncached(padded):
    model, exact = build(torch.float32).cuda(), build()
    exact.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    values = torch.randn(2, POINTS)
    documents = None
    if padded:
        documents = (torch.arange(POINTS) >= torch.tensor([[0], [11]])).int()
    on_gpu = None if documents is None else documents.cuda()
    with torch.no_grad():
        truth = exact(values.double(), documents_BT=documents).outputs_BNH
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad():
        peer = model(values.cuda(), documents_BT=on_gpu).outputs_BNH
        cached = in_pieces(model, values.cuda(), [30, 1, 9, 8], on_gpu)
    assert_as_good_as(cached.cpu(), peer.cpu(), truth, "cached outputs in bf16")
