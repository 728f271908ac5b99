"""A model that refuses fp64 gets the truth that the same model would have without its refusals."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from steplab.core.errors import Unsupported
from steplab.verify.widened import Widened, grouped_mm


class Refusing(nn.Module):
    """Asserts its dtype, rounds to bf16 on the way, uses views, writes in place, chooses."""

    def __init__(self, refuses: bool):
        super().__init__()
        self.refuses = refuses
        self.embedding = nn.Embedding(11, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, ids_BT):
        x = self.embedding(ids_BT)
        if self.refuses:
            assert x.dtype == torch.float32
            x = x.bfloat16().float()
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        turned = torch.view_as_complex(mixed.reshape(*mixed.shape[:-1], -1, 2).contiguous())
        angle = torch.polar(torch.ones(4), torch.arange(4.0)).to(turned.dtype)
        mixed = torch.view_as_real(turned * angle).flatten(-2)
        x = x + mixed.transpose(1, 2).flatten(2)
        with torch.no_grad():
            self.seen += x.mean((0, 1))
        top, chosen = x.topk(4, -1)
        x = torch.zeros_like(x).scatter(-1, chosen, top.softmax(-1))
        return self.head(x)


def train(model: nn.Module) -> dict[str, torch.Tensor]:
    """Three steps of AdamW; return loss, weights and the buffer, each in fp64."""
    ids = torch.randint(0, 11, (3, 7), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    for _ in range(3):
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    found = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
    return found | {"loss": loss.detach().double()}


def made(refuses: bool) -> nn.Module:
    torch.manual_seed(0)
    return Refusing(refuses)


def test_the_truth_of_a_model_that_refuses_is_that_of_its_twin_in_fp64():
    twin = made(refuses=False).double()
    torch.set_default_dtype(torch.float64)
    try:
        truth = train(twin)
    finally:
        torch.set_default_dtype(torch.float32)
    with pytest.raises(AssertionError):
        train(made(refuses=True).double())
    model = made(refuses=True)
    with Widened():
        found = train(model)
    for name, expected in truth.items():
        # The keys' bias has no gradient but rounding, which AdamW makes large.
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-9, msg=name)
    # What the model itself holds is that, rounded.
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, found[name].float()), name


def test_without_it_the_roundings_show():
    found, rounded = train(made(refuses=False)), train(made(refuses=True))
    assert (found["loss"] - rounded["loss"]).abs() > 1e-5


@pytest.mark.parametrize("target", [torch.float64, torch.int64])
def test_what_is_written_in_place_is_written_once(target):
    x = torch.full((3,), 0.25)
    total = torch.zeros(3, dtype=target)
    with Widened():
        total.copy_(x * 4 + 1)
        total += total
    assert torch.equal(total, torch.full((3,), 4, dtype=target))


def test_numbers_for_python_and_choices_are_the_wide_ones():
    a = torch.tensor([1.0, 1.0 + 2**-20])
    with Widened():
        b = (a * (1 + 2.0**-30)).sub(1)  # in fp32 the factor is 1
        assert b[0].item() == pytest.approx(2.0**-30, rel=1e-9) and a.dtype == torch.float32
        assert bool(b[0] > 0) and int(b.argmin()) == 0


def test_grouped_products_have_fp64_by_hand():
    torch.manual_seed(0)
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)  # the second group is empty
    a, b = torch.randn(5, 4).double(), torch.randn(3, 4, 6).double()
    rows = grouped_mm(a, b, ends)
    expected = torch.cat([a[:2] @ b[0], a[2:5] @ b[2]])
    torch.testing.assert_close(rows, expected)
    weights = grouped_mm(a.T, rows, ends)
    assert weights.shape == (3, 4, 6) and not weights[1].any()
    torch.testing.assert_close(weights[2], a[2:5].T @ rows[2:5])
    columns = grouped_mm(b.transpose(1, 2), a.T, ends)
    torch.testing.assert_close(columns, rows.T)
    batches = torch.randn(3, 2, 4).double()
    torch.testing.assert_close(grouped_mm(batches, b), torch.bmm(batches, b))


def test_what_cannot_be_widened_is_named():
    sparse = torch.eye(3).to_sparse()
    with Widened(), pytest.raises(Unsupported, match=r"layout torch\.sparse_coo"):
        torch.sparse.mm(sparse, torch.eye(3))
