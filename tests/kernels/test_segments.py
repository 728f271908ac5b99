"""Weight gradients in segments, through Triton's interpreter, against group by group in fp64."""

import pytest
import torch

from steplab.kernels.grouped_mm import grouped_mm, weight_gradient
from steplab.kernels.grouped_mm.aten import PIECES, add_segments, find_segments
from steplab.testing.tolerance import assert_as_good_as

pytest.importorskip("triton")
ROUTINGS = {
    "even": [10, 20, 30, 40],
    "crowded": [1, 38, 38, 40],
    "first empty": [0, 17, 40, 40],
    "all in one": [0, 0, 40, 40],
    "last only": [0, 0, 0, 40],
}


def by_group(x, dout, offsets):
    """Return (E, K, N) by the definition."""
    starts = [0, *offsets[:-1]]
    return torch.stack([x[a:b].T @ dout[a:b] for a, b in zip(starts, offsets, strict=True)])


class Interpreted:
    @pytest.mark.parametrize("offsets", ROUTINGS.values(), ids=ROUTINGS)
    def test_segments_cover_every_row_once_and_stay_in_their_group(self, offsets):
        found, group = find_segments(torch.tensor(offsets, dtype=torch.int32), 40)
        ends = found.tolist()
        assert len(ends) == PIECES + len(offsets) and ends == sorted(ends)
        owner = []
        for start, end, number in zip([0, *ends[:-1]], ends, group.tolist(), strict=True):
            assert (number == -1) == (start == end) and end - start <= 3
            owner += [number] * (end - start)
        assert owner == [sum(offset <= row for offset in offsets) for row in range(40)]

    def test_many_experts_are_found_by_several_programs(self):
        offsets = torch.arange(1, 256).int()  # a row each
        ends, group = find_segments(offsets, 255)
        taken = group >= 0
        assert torch.equal(ends[taken], offsets) and torch.equal(group[taken] + 1, offsets)
        assert torch.equal(ends, ends.sort().values)

    def test_offsets_may_have_any_stride(self):
        offsets = torch.tensor([[8, 0], [16, 0]], dtype=torch.int32)[:, 0]
        x, w = torch.randn(16, 8), torch.randn(2, 8, 8).requires_grad_()
        grouped_mm("aten", x, w, offsets).sum().backward()
        expected = by_group(x, torch.ones(16, 8), offsets.tolist())
        torch.testing.assert_close(w.grad, expected)

    @pytest.mark.parametrize("offsets", ROUTINGS.values(), ids=ROUTINGS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_parts_add_up_to_the_gradient(self, offsets, dtype):
        torch.manual_seed(0)
        x, dout = torch.randn(40, 5, dtype=dtype), torch.randn(40, 7, dtype=dtype)
        ends, group = find_segments(torch.tensor(offsets, dtype=torch.int32), 40)
        parts = by_group(x.float(), dout.float(), ends.tolist()).to(dtype)
        parts[group < 0] = float("nan")  # an empty product may leave anything behind
        out = add_segments(parts, group, len(offsets))
        truth = by_group(x.double(), dout.double(), offsets)
        assert_as_good_as(out, by_group(x, dout, offsets), truth, name="sum of segments")


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ROUTINGS)
def test_gpu_weight_gradient_is_as_good_as_group_by_group(routing):
    torch.manual_seed(0)
    offsets = [128 * offset for offset in ROUTINGS[routing]]
    x, dout = (torch.randn(5120, n, device="cuda", dtype=torch.bfloat16) for n in (192, 128))
    ends = torch.tensor(offsets, device="cuda", dtype=torch.int32)
    out = weight_gradient("aten", x, dout, ends)
    truth = by_group(x.double(), dout.double(), offsets)
    assert_as_good_as(out, by_group(x, dout, offsets), truth, name=routing)
