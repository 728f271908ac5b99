import re

import pytest

from steplab.hardware.catalog import CARDS, find_card, sparse_peak_owner

REAL_NAMES = {
    "NVIDIA H100 80GB HBM3": ("H100 SXM5", 989.4, 3350),
    "NVIDIA H100 PCIe": ("H100 PCIe", 756.0, 2000),
    "NVIDIA H100 NVL": ("H100 NVL", 835.5, 3900),
    "NVIDIA H200": ("H200 SXM", 989.4, 4800),
    "NVIDIA H200 NVL": ("H200 NVL", 835.5, 4800),
    "NVIDIA GH200 480GB": ("GH200 96GB", 989.4, 4000),
    "NVIDIA A100-SXM4-40GB": ("A100 40GB", 312.0, 1555),
    "A100-SXM4-40GB": ("A100 40GB", 312.0, 1555),
    "NVIDIA A100-SXM4-80GB": ("A100 80GB SXM", 312.0, 2039),
    "NVIDIA A100 80GB PCIe": ("A100 80GB PCIe", 312.0, 1935),
    "NVIDIA A100-PCIE-40GB": ("A100 40GB", 312.0, 1555),
    "NVIDIA L4": ("L4", 121.0, 300),
    "NVIDIA L40": ("L40", 181.0, 864),
    "NVIDIA L40S": ("L40S", 362.0, 864),
    "NVIDIA A10": ("A10", 125.0, 600),
    "NVIDIA A10G": ("A10G", 70.0, 600),
    "NVIDIA RTX A6000": ("RTX A6000", 154.8, 768),
    "NVIDIA RTX 6000 Ada Generation": ("RTX 6000 Ada", 364.2, 960),
    "NVIDIA GeForce RTX 3090": ("RTX 3090", 71.2, 936),
    "NVIDIA GeForce RTX 4090": ("RTX 4090", 165.2, 1008),
    "NVIDIA GeForce RTX 5090": ("RTX 5090", 209.5, 1792),
    "NVIDIA B200": ("B200", 2250.0, 8000),
    "NVIDIA GB200": ("GB200", 2500.0, 8000),
    "AMD Instinct MI300X": ("MI300X", 1307.4, 5300),
    "Tesla T4": ("T4", None, 320),
    "Tesla V100-SXM2-16GB": ("V100 SXM2", None, 900),
}
UNLISTED = [
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
    "GRID A100X-40C",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA H800",
    "NVIDIA H20",
    "Apple M3 Max",
    "AMD EPYC 9654",
    "",
]


@pytest.mark.parametrize("name", REAL_NAMES)
def test_real_device_names(name):
    card = find_card(name)
    assert card is not None
    assert (card.name, card.peak("bf16"), card.bandwidth_gbs) == REAL_NAMES[name]


@pytest.mark.parametrize("name", REAL_NAMES)
def test_each_name_fits_one_card_only(name):
    bare = re.sub(r"^(NVIDIA|AMD)\s+", "", name)
    assert sum(bool(re.fullmatch(card.pattern, bare)) for card in CARDS) == 1


@pytest.mark.parametrize("name", UNLISTED)
def test_a_card_that_is_not_listed_is_unknown(name):
    assert find_card(name) is None


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_peaks_are_in_proportion(card):
    """Dense peaks never fall from fp32 to fp8, and every card names its source."""
    order = [card.tflops[d] for d in ("fp32", "tf32", "bf16", "fp8") if d in card.tflops]
    assert order == sorted(order) and card.source
    if card.peak("bf16"):
        assert card.peak("bf16") == card.peak("fp16")


@pytest.mark.parametrize(
    ("tflops", "owner"),
    [(1979, "H100 SXM5"), (1671, "H100 NVL"), (1513, "H100 PCIe"), (624, "A100 40GB"), (242, "L4")],
)
def test_sparse_peaks_are_recognised(tflops, owner):
    assert sparse_peak_owner(tflops, "bf16").name == owner


@pytest.mark.parametrize("tflops", [989.5, 312, 835, 121, 100, 362])
def test_dense_and_free_peaks_are_not_called_sparse(tflops):
    assert sparse_peak_owner(tflops, "bf16") is None


def test_tf32_has_no_such_rule():
    """312 is the sparse TF32 peak of an A100 and its dense bf16 peak."""
    assert sparse_peak_owner(312, "tf32") is None
