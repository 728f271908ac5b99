import re

import pytest

from steplab.hardware.catalog import CARDS, find_card, sparse_peak_owner, tensor_peak_name

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
def test_sparse_peaks_are_recognized(tflops, owner):
    assert sparse_peak_owner(tflops, "bf16").name == owner


@pytest.mark.parametrize("tflops", [989.5, 312, 835, 121, 100, 362])
def test_dense_and_free_peaks_are_not_called_sparse(tflops):
    assert sparse_peak_owner(tflops, "bf16") is None


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16", "fp16", "fp8"])
def test_the_present_cards_own_peaks_decide(card, dtype):
    dense = card.peak(dtype)
    if dense is None:
        return
    assert sparse_peak_owner(dense, dtype, card) is None
    owner = card if card.sparse and dtype != "fp32" else None
    found = sparse_peak_owner(2 * dense, dtype, card)
    assert found is owner if owner else found is not card


def test_every_dtype_has_its_sparse_peak():
    assert sparse_peak_owner(989.4, "tf32").name == "H100 SXM5"
    assert sparse_peak_owner(312, "tf32").name == "A100 40GB"
    assert sparse_peak_owner(3958, "fp8").name == "H100 SXM5"
    assert sparse_peak_owner(1979, "fp32") is None


def test_the_present_card_comes_before_the_others():
    """362 is dense on an L40S and sparse on an L40."""
    assert sparse_peak_owner(362, "bf16", find_card("NVIDIA L40")).name == "L40"
    assert sparse_peak_owner(362, "bf16", find_card("NVIDIA L40S")) is None
    # 1671 is the sparse peak of an H100 NVL, whatever that means for the card that is present.
    assert sparse_peak_owner(1671, "bf16", find_card("NVIDIA H100 PCIe")) is None
    assert sparse_peak_owner(1671, "bf16", find_card("NVIDIA H100 NVL")).name == "H100 NVL"


@pytest.mark.parametrize(
    ("tflops", "device", "name"),
    [
        (1979, "NVIDIA H200", "sparse bf16 peak of the H200 SXM"),
        (989.4, "NVIDIA H200", "bf16 peak of the H200 SXM"),
        (494.7, "Mystery", "tf32 peak of the H100 SXM5"),
        (125, "Tesla V100-SXM2-16GB", "fp16 peak of the V100 SXM2"),
        (66.9, "NVIDIA H200", ""),
        (82.6, "NVIDIA GeForce RTX 4090", ""),
        (3.2, "AMD EPYC 9654", ""),
    ],
)
def test_tensor_core_peaks_are_named(tflops, device, name):
    assert tensor_peak_name(tflops, find_card(device)) == name


def test_cards_entered_from_memory_say_so_beside_their_figures():
    from steplab.hardware.catalog import FROM_MEMORY
    from steplab.hardware.mfu import choose_peak

    assert set(FROM_MEMORY) <= {card.name for card in CARDS}
    assert "entered from memory" in choose_peak("NVIDIA L40", "bf16", None)[1]
    assert "memory" not in choose_peak("NVIDIA H200", "bf16", None)[1]
    assert "entered from memory" in choose_peak("NVIDIA H200", "tf32", None)[1]
