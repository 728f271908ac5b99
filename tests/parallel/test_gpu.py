"""Two gloo ranks that share one GPU compute what one process computes there."""

import pytest
import torch

from steplab.workers.ranks import RankGroup
from tests.parallel.training import figures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("tests_are_importable"),
]
DEVICE = "cuda"
SCHEMES = ("naive", "flat", "overlap", "bucket", "ddp", "zero1", "fsdp")
BF16 = "precision=bf16-weights,optimizer=one-pass"


@pytest.fixture(scope="module")
def group(tests_are_importable):
    with RankGroup(2, DEVICE, "gloo") as two:
        yield two


def two_ranks(group, workload, recipe):
    return group.call(
        "tests.parallel.training:figures",
        tuple[float, ...],
        timeout=120,
        workload=workload,
        recipe=recipe,
        accumulate=2,
        device=DEVICE,
    )


@pytest.mark.parametrize("workload", ["gpt", "tsmoe"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_on_one_gpu(group, workload, scheme):
    found = two_ranks(group, workload, f"parallel={scheme}")
    assert found == pytest.approx(figures(workload, "plain", 4, DEVICE), rel=2e-4)


@pytest.mark.parametrize("scheme", ["ddp", "zero1", "fsdp"])
def test_16_bit_weights_and_our_kernels_on_shards(group, scheme):
    found = two_ranks(group, "tsmoe", f"parallel={scheme},{BF16}")
    assert found == pytest.approx(figures("tsmoe", BF16, 4, DEVICE), rel=2e-2)


def test_exact_has_the_same_bits_on_one_and_two_ranks(group):
    recipe = "parallel=fsdp,parallel.exact=true"
    assert two_ranks(group, "gpt", recipe) == figures("gpt", recipe, 4, DEVICE)


@pytest.mark.parametrize("data", ["bucket", "fsdp"])
def test_experts_are_spread_over_the_ranks(group, data):
    config = "parallel.expert=2"
    found = two_ranks(group, "tsmoe4", f"parallel={data},{config}")
    assert found == pytest.approx(figures("tsmoe4", "plain", 4, DEVICE), rel=2e-4)
