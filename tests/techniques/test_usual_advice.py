"""Advice about memory that docs/techniques.md takes back, with the reason shown."""

import pytest
import torch
from torch import Tensor, nn


class Reusing(nn.Module):
    """Writes its result into a buffer of its own, as advised."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("out", torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        out = self.out[: x.shape[0]]
        out.zero_()
        out.add_(self.inner(x))
        return out


def kept_bytes(run) -> int:
    """Return the bytes of distinct tensors that are kept for the backward pass of `run`."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(kept.values())


def test_a_reused_buffer_breaks_the_second_training_step():
    model, x = Reusing(), torch.randn(4, 8)
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        model(x).sum().backward()


@torch.no_grad()
def test_a_reused_buffer_overwrites_the_result_before():
    model, x = Reusing().eval(), torch.randn(4, 8)
    first = model(x)
    before = first.clone()
    model(2 * x)
    assert not torch.equal(first, before)


def test_adding_in_place_keeps_no_fewer_bytes():
    inner, x = nn.Linear(64, 64), torch.randn(16, 64, requires_grad=True)
    assert kept_bytes(lambda: inner(x) + x) == kept_bytes(lambda: inner(x).add_(x))


def test_in_place_on_what_the_backward_needs_is_refused_by_torch():
    x = torch.randn(4, requires_grad=True)
    y = torch.sigmoid(x)
    y.mul_(2.0)
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()
