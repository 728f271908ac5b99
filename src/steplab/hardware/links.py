"""Links between cards: latency and bandwidth of one direction per GPU, each with its source.

`gbs` is what one GPU can send while it receives as much, in GB/s (10**9 bytes), by the datasheet;
`efficiency` is the share of it that NCCL's bus bandwidth reaches on large messages. Latencies are
of one step of a ring or a tree.
"""

from __future__ import annotations

from dataclasses import dataclass

from steplab.core.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Link:
    """What connects GPUs."""

    name: str
    gbs: float
    efficiency: float
    latency_us: float
    source: str

    @property
    def bytes_per_us(self) -> float:
        """What collectives reach on large messages."""
        return self.gbs * 1e3 * self.efficiency


# Efficiencies and latencies were entered from memory of published NCCL tests, none was measured
# here; `bench collectives` on the cluster itself replaces them.
LINKS: tuple[Link, ...] = (
    Link("nvlink3", 300, 0.77, 3.0, "NVIDIA A100 datasheet, 600 GB/s in both directions"),
    Link("nvlink4", 450, 0.80, 3.0, "NVIDIA H100 and H200 datasheets, 900 GB/s in both directions"),
    Link("nvlink5", 900, 0.75, 3.0, "NVIDIA DGX B200 datasheet, 1.8 TB/s in both directions"),
    Link("pcie4", 32, 0.75, 5.0, "PCI Express 4.0, 16 lanes"),
    Link("pcie5", 64, 0.75, 5.0, "PCI Express 5.0, 16 lanes"),
    Link("hdr", 25, 0.90, 6.0, "InfiniBand HDR, 200 Gbit/s per GPU"),
    Link("ndr", 50, 0.90, 6.0, "InfiniBand NDR, 400 Gbit/s per GPU, as in DGX H100"),
    Link("efa", 50, 0.70, 15.0, "Amazon EC2 p5: 3,200 Gbit/s of EFA for 8 GPUs"),
    Link("efa-p4d", 6.25, 0.70, 20.0, "Amazon EC2 p4d: 400 Gbit/s of EFA for 8 GPUs"),
    Link("ethernet100", 1.56, 0.80, 30.0, "100 Gbit/s for a machine of 8 GPUs"),
)
# NVSwitch connects every GPU with every other at the full rate of its NVLinks, so a machine with
# switches has the bandwidth of its links.
WITHIN = {"nvswitch": "nvlink4"}


def find_link(name: str) -> Link:
    """Return the link of that name."""
    wanted = WITHIN.get(name.lower(), name.lower())
    for link in LINKS:
        if link.name == wanted:
            return link
    known = [*(link.name for link in LINKS), *WITHIN]
    raise UserError(f"There is no link {name!r} in the catalog.", did_you_mean(name, known))


def usual_link(card: str) -> Link:
    """Return the link that connects cards of this name within a machine."""
    if card.startswith(("H100 SXM", "H200 SXM", "GH200")):
        return find_link("nvlink4")
    if card.startswith(("B200", "GB200")):
        return find_link("nvlink5")
    if "A100" in card and "PCIe" not in card:
        return find_link("nvlink3")
    gen5 = card.startswith(("H100", "H200", "RTX 5090", "L40S"))
    return find_link("pcie5" if gen5 else "pcie4")
