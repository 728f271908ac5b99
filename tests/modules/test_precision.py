"""The dtype of a product is the one that torch multiplies in."""

import pytest
import torch

from steplab.modules.norms import RMSNorm
from steplab.modules.precision import matmul_dtype, without_autocast


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on", [False, True])
def test_it_is_that_of_torchs_own_product(dtype, on):
    x = torch.ones(2, 2, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=on):
        assert matmul_dtype(x) == (x @ x).dtype
        with without_autocast(x):
            assert matmul_dtype(x) == (x @ x).dtype == dtype


def test_shapes_alone_have_no_autocast():
    with torch.device("meta"):
        normed, _ = RMSNorm(8, 1e-6)(torch.empty(2, 8))
    assert normed.device.type == "meta" and normed.shape == (2, 8)
