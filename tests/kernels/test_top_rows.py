"""The highest rows of each sequence: by a stable sort, and by counting who scores higher."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.kernels.top_rows import IMPLS, top_rows
from tests.kernels.triton_on_cpu import compile_for_hopper, needs_no_gpu

NAN, INF = float("nan"), float("inf")
FEW = [0.0, -0.0, 1.0, 1.5, -INF, INF, NAN]  # so that equal scores straddle the border


def place(score):
    """Return what to sort by: a NaN comes first."""
    return (0, 0.0) if score != score else (1, -score)


def assert_is_the_selection(impl, score, taken):
    """Compare with Python's own sort, which is stable too."""
    rows_BK, slots_BS, least_B = IMPLS[impl].top_rows(score, taken)
    for scores, rows, slots, least in zip(score.tolist(), rows_BK, slots_BS, least_B, strict=True):
        order = sorted(range(len(scores)), key=lambda i: place(scores[i]))
        assert rows.tolist() == order[:taken]
        assert slots[rows].tolist() == list(range(taken))
        assert (slots == taken).sum() == len(scores) - taken
        lowest = scores[order[taken - 1]]
        assert least.item() == lowest or (lowest != lowest and least.isnan())


def draw(batch, length, device="cpu"):
    generator = torch.Generator().manual_seed(length)
    score = torch.randn(batch, length, generator=generator)
    score[0] = torch.tensor(FEW)[torch.randint(len(FEW), (length,), generator=generator)]
    return score.to(device)


@pytest.mark.parametrize("taken", [1, 5, 12])
def test_the_definition(taken):
    assert_is_the_selection("reference", draw(3, 12), taken)


@pytest.mark.parametrize("taken", [1, 7])
def test_a_view_and_a_compiled_call_select_the_same(taken):
    score = draw(3, 24)[:, ::2]
    choice, least = top_rows(score, taken)
    found, lowest = torch.compile(top_rows, backend="eager", fullgraph=True)(score, taken)
    assert torch.equal(choice.rows_BK, found.rows_BK)
    assert torch.equal(choice.slots_BS, found.slots_BS)
    torch.testing.assert_close(least, lowest, rtol=0, atol=0, equal_nan=True)


class Interpreted:
    @settings(max_examples=30, deadline=None)
    @given(
        scores=st.lists(st.sampled_from(FEW) | st.floats(width=32), min_size=1, max_size=40),
        share=st.floats(0, 1),
    )
    def test_ranks_are_a_stable_sort(self, scores, share):
        score = torch.tensor([scores, scores[::-1]])
        assert_is_the_selection("triton_rank", score, max(1, int(share * len(scores))))

    def test_a_batch_of_several_blocks(self):
        for length in (1, 8, 33, 70):
            assert_is_the_selection("triton_rank", draw(3, length), (length + 1) // 2)


@needs_no_gpu
@pytest.mark.slow
def test_the_kernel_compiles_for_hopper():
    launches = """
from steplab.kernels.top_rows import triton_rank
triton_rank.top_rows._init_fn(torch.empty(16, 1024), 512)
assert ".local" not in kernels[0].asm["ptx"]
print(len(kernels), "kernel")
"""
    assert compile_for_hopper(launches) == "1 kernel"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "length", "taken"), [(16, 1024, 512), (3, 1000, 1), (2, 5000, 4999)]
)
def test_gpu_ranks_are_a_stable_sort(batch, length, taken):
    score = draw(batch, length, "cuda")
    assert_is_the_selection("triton_rank", score, taken)
    by_rank, by_sort = (IMPLS[impl].top_rows(score, taken) for impl in IMPLS)
    torch.testing.assert_close(by_rank, by_sort, rtol=0, atol=0, equal_nan=True)
