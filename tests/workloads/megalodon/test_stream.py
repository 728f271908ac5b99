"""Streaming equals one call, in a cache that does not grow."""

import pytest
import torch

from steplab.core.errors import UserError
from steplab.step.decode_step import DecodeStep, graphs_on
from steplab.workloads.megalodon.model import Megalodon
from steplab.workloads.megalodon.streaming import Stream
from steplab.workloads.workload import find_workload
from tests.workloads.megalodon.test_model import SMALL, tokens


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Megalodon(SMALL).double().eval()


@pytest.mark.parametrize("pieces", [(64,), (5, 11, 21, 1, 26), (1,) * 64, (16, 16, 31, 1), (63, 1)])
def test_pieces_equal_one_call(model, pieces):
    """Chunks have 16 tokens: pieces end at, before and behind their edges."""
    one = tokens(2, 64)
    whole = model(one)
    stream, at = Stream(model, 2), 0
    for size in pieces:
        logits = stream(one[:, at : at + size])
        at += size
        torch.testing.assert_close(logits, whole[:, at - 1], rtol=1e-11, atol=1e-11)
    assert stream.tokens == at == int(stream.cache.position.tokens_1)


def test_fp32_is_within_rounding():
    torch.manual_seed(0)
    model = Megalodon(SMALL)
    one = tokens(1, 64)
    whole, stream = model(one), Stream(model, 1)
    found = torch.stack([stream(one[:, t : t + 1]) for t in range(64)], 1)
    assert float((found - whole).detach().abs().max()) <= 1e-5


def test_the_cache_has_one_size_and_no_gradients(model):
    stream = Stream(model, 1)
    addresses, size = [x.data_ptr() for x in stream.cache.tensors], stream.cache.nbytes
    for length in (1, 40, 1, 200):
        stream(tokens(1, length))
    assert stream.cache.nbytes == size
    assert [x.data_ptr() for x in stream.cache.tensors] == addresses
    assert not any(x.requires_grad for x in stream.cache.tensors)
    keys = 2 * 2 * 16 * (4 + 8) * 8  # layers, heads, slots, widths, bytes
    states = 2 * 2 * 3 * 16 * 8
    statistics = 3 * (8 + 2 * 4 * 8) + 8  # two blocks, the last norm, the position
    assert size == keys + states + statistics


@pytest.mark.parametrize("seen", [1, 16, 23])
def test_a_saved_stream_goes_on(model, seen, tmp_path):
    """In another stream, from a file, with the same bits; the first one is left as it was."""
    one = tokens(2, 40)
    first = Stream(model, 2)
    first(one[:, :seen])
    torch.save(first.cache.state_dict(), tmp_path / "cache.pt")
    again = Stream(model, 2)
    again(tokens(2, 5))
    again.cache.load_state_dict(torch.load(tmp_path / "cache.pt"))
    assert again.tokens == seen
    for at in (slice(seen, seen + 1), slice(seen + 1, 40)):
        assert torch.equal(first(one[:, at]), again(one[:, at]))


def test_a_copy_does_not_move_with_its_stream(model):
    stream = Stream(model, 1)
    stream(tokens(1, 9))
    kept = stream.cache.state_dict()
    expected = stream(tokens(1, 3))
    stream.cache.load_state_dict(kept)
    assert torch.equal(stream(tokens(1, 3)), expected)


def test_rows_go_on_from_other_rows(model):
    """As beams do: row 1 twice, then row 0; nothing moves in memory."""
    one, more, rows = tokens(3, 21), tokens(3, 13).flip(1), torch.tensor([1, 1, 0])
    stream = Stream(model, 3)
    stream(one)
    addresses = [x.data_ptr() for x in stream.cache.tensors]
    stream.cache.reindex(rows)
    whole = model(torch.cat([one[rows], more], 1))
    for t in range(13):
        found = stream(more[:, t : t + 1])
        torch.testing.assert_close(found, whole[:, 21 + t], rtol=1e-11, atol=1e-11)
    assert [x.data_ptr() for x in stream.cache.tensors] == addresses
    with pytest.raises(UserError, match="Name one row for each"):
        stream.cache.reindex(torch.tensor([0, 1]))


def test_another_models_cache_is_refused(model):
    cache = Stream(model, 2).cache
    with pytest.raises(UserError, match="averages' differs"):
        cache.load_state_dict(Stream(model, 1).cache.state_dict())
    narrow = {name: x.float() for name, x in cache.state_dict().items() if name == "1.keys"}
    with pytest.raises(UserError, match="keys' differs"):
        cache.load_state_dict(cache.state_dict() | narrow)


def test_wrong_pieces_are_refused(model):
    stream = Stream(model, 2)
    with pytest.raises(UserError, match="2 rows"):
        stream(tokens(3, 4))
    with pytest.raises(UserError, match="at least one token"):
        stream(tokens(2, 0))
    with pytest.raises(UserError, match="at least 1 row"):
        Stream(model, 0)


def test_the_workload_offers_a_generator():
    entry = find_workload("megalodon")
    workload = entry.open(entry.resolve("tiny", {"chunk": 8}))
    model = workload.model().eval()
    one = torch.randint(256, (1, 12))
    with torch.inference_mode():
        read = workload.generator(model, 1, 12)
        read(one[:, :9])
        found = torch.stack([read(one[:, t : t + 1]) for t in range(9, 12)], 1)
        torch.testing.assert_close(found, model(one)[:, 9:], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_gpu_a_captured_step_goes_on_from_a_saved_cache():
    torch.manual_seed(0)
    model = Megalodon(SMALL).cuda().eval()
    one, stream = tokens(2, 12).cuda(), Stream(model, 2)
    step = DecodeStep(stream.step, graphs_on(one.device))
    with torch.inference_mode():
        for t in range(4):
            step(one[:, t : t + 1])
        kept = stream.cache.state_dict()
        expected = [step(one[:, t : t + 1]) for t in range(4, 12)]
        stream.cache.load_state_dict(kept)
        found = [step(one[:, t : t + 1]) for t in range(4, 12)]
        stream.cache.load_state_dict(kept)
        stream.cache.reindex(torch.tensor([1, 0], device="cuda"))
        turned = [step(one.flip(0)[:, t : t + 1]).flip(0) for t in range(4, 12)]
    assert not step.why_not and stream.tokens == 12
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    torch.testing.assert_close(turned, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gpu_streaming_equals_one_call(precision):
    torch.manual_seed(0)
    model = Megalodon(SMALL).cuda().eval()
    one = tokens(1, 60).cuda()
    with (
        torch.inference_mode(),
        torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"),
    ):
        whole, stream = model(one), Stream(model, 1)
        assert model.blocks[0].attention.averages.ran == "scan"
        stream(one[:, :20])
        for t in range(20, 60):
            limit = 1e-4 if precision == "fp32" else 5e-2
            assert float((stream(one[:, t : t + 1]) - whole[:, t]).abs().max()) <= limit
