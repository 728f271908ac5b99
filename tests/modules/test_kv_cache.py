"""The static view of a cache against the one that grows, and both against plain attention."""

# B batch, H query heads, G key heads, T new tokens, D head width
from types import SimpleNamespace

import pytest
import torch

from steplab.modules.attention import Attention, document_positions
from steplab.modules.kv_cache import KVCache
from steplab.modules.rotary import Rotary

B, G, D, KNOWN, ROOM = 2, 2, 6, 5, 21


def make(dtype=torch.float64):
    weight = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
    rotary = Rotary(D, 4, 100.0)
    model = SimpleNamespace(cache_shape=(1, G, D), rotary=rotary, parameters=lambda: iter([weight]))
    return KVCache.empty(model, B, ROOM)


def draw(heads, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, heads, tokens, D, generator=generator, dtype=torch.float64)


def feed(cache, heads, sizes, documents=None):
    """Return attention of all pieces and their positions; the first goes to `cache` itself."""
    out, positions = [], []
    for index, size in enumerate(sizes):
        view = cache if index == 0 else cache.static
        where, documents_BS = view.add_tokens(B, size, documents if index == 0 else None)
        q, k, v = (draw(n, size, 10 * index + i) for i, n in enumerate((heads, G, G)))
        out.append(view.layer(0).attend(Attention(), q, k, v, documents_BS))
        positions.append(where.expand(B, -1))
        view.advance(size)
    return torch.cat(out, 2), torch.cat(positions, 1)


def whole(heads, sizes, documents=None):
    q, k, v = (
        torch.cat([draw(n, size, 10 * index + i) for index, size in enumerate(sizes)], 2)
        for i, n in enumerate((heads, G, G))
    )
    return Attention()(q, k, v, documents)


@pytest.mark.parametrize("heads", [G, 3 * G])
@pytest.mark.parametrize("sizes", [(KNOWN, 1, 1, 1), (KNOWN, 4, 4, 4), (1, 1, 1)])
def test_static_steps_equal_the_whole(heads, sizes):
    found, positions = feed(make(), heads, sizes)
    torch.testing.assert_close(found, whole(heads, sizes), rtol=1e-12, atol=1e-13)
    assert positions.tolist() == [list(range(sum(sizes)))] * B


def test_rows_that_are_padded_on_the_left_go_on_in_their_own_document():
    sizes = (KNOWN, 2, 2)
    first = torch.tensor([[1] * KNOWN, [0, 0, 1, 1, 1]], dtype=torch.int32)
    documents = torch.cat([first, first[:, -1:].expand(-1, 4)], 1)
    found, positions = feed(make(), G, sizes, first)
    torch.testing.assert_close(found, whole(G, sizes, documents), rtol=1e-12, atol=1e-13)
    assert torch.equal(positions, document_positions(documents))


def test_a_cleared_cache_has_forgotten_even_what_was_not_finite():
    cache, sizes = make(), (KNOWN, 1, 1)
    feed(cache, G, (KNOWN, 8, 8))
    for x in (cache.keys_LBGSD, cache.values_LBGSD):
        x.fill_(torch.nan)
    addresses = cache.keys_LBGSD.data_ptr(), cache.static.next_1.data_ptr()
    cache.clear()
    found, _ = feed(cache, G, sizes)
    torch.testing.assert_close(found, whole(G, sizes), rtol=1e-12, atol=1e-13)
    assert addresses == (cache.keys_LBGSD.data_ptr(), cache.static.next_1.data_ptr())
