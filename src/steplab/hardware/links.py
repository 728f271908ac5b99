"""Links between cards: latency and bandwidth of one direction per GPU, each with its source.

`gbs` is what one GPU can send while it receives as much, in GB/s (10**9 bytes), by the datasheet;
`efficiency` is the share of it that NCCL's bus bandwidth reaches on large messages, and `reached`
who says so. Latencies are of one step of a ring.
"""

from __future__ import annotations

from dataclasses import dataclass

from steplab.core.errors import UserError, did_you_mean

ASSUMED = ""  # nobody is known to have measured it
SPREAD, ASSUMED_SPREAD = 0.25, 0.5  # standard deviation of the logarithm of a collective's time


@dataclass(frozen=True)
class Link:
    """What connects GPUs."""

    name: str
    gbs: float
    efficiency: float
    latency_us: float
    source: str
    reached: str = ASSUMED
    measured_spread: float | None = None  # where collectives were timed on the cluster itself

    @property
    def bytes_per_us(self) -> float:
        """What collectives reach on large messages."""
        return self.gbs * 1e3 * self.efficiency

    @property
    def spread(self) -> float:
        """How unsure the time of a collective is: standard deviation of its logarithm."""
        if self.measured_spread is not None:
            return self.measured_spread
        return SPREAD if self.reached else ASSUMED_SPREAD

    @property
    def known_by(self) -> str:
        """Where its numbers come from, in words."""
        return f"{self.source}; {self.reached or f'{self.efficiency:.0%} of it are assumed'}"


# Latencies are those by which NCCL chooses its algorithm (src/graph/tuning.cc, ring, LL128); for
# EFA those of its plugin's tuner, between LL and Simple.
LINKS: tuple[Link, ...] = (
    Link("nvlink3", 300, 0.77, 1.9, "NVIDIA A100 datasheet, 600 GB/s in both directions",
         "231 GB/s measured on 8 GPUs, NVIDIA/nccl issue 527"),
    Link("nvlink4", 450, 0.82, 1.9, "NVIDIA H100 and H200 datasheets, 900 GB/s in both directions",
         "370 GB/s by NCCL's authors, NVIDIA/nccl-tests issue 212"),
    Link("nvlink5", 900, 0.80, 1.9, "NVIDIA DGX B200 datasheet, 1.8 TB/s in both directions",
         "18 links of 40.1 GB/s in NCCL's src/graph/topo.h"),
    Link("pcie4", 32, 0.75, 2.5, "PCI Express 4.0, 16 lanes",
         "24 GB/s in NCCL's topology, NVIDIA/nccl-tests issue 307"),
    Link("pcie5", 64, 0.50, 2.5, "PCI Express 5.0, 16 lanes",
         "28 GB/s measured on 8 GPUs and 35 on 4, NVIDIA/nccl issue 1639"),
    Link("hdr", 25, 0.91, 4.0, "InfiniBand HDR, 200 Gbit/s per GPU",
         "91 of 100 GB/s measured over 2 machines, NVIDIA/nccl-tests issue 100"),
    Link("ndr", 50, 0.81, 4.0, "InfiniBand NDR, 400 Gbit/s per GPU, as in DGX H100",
         "320 to 330 of 400 GB/s measured over 2 to 4 machines (RoCE), NVIDIA/nccl issue 1221"),
    Link("efa", 50, 0.70, 15.0, "Amazon EC2 p5: 3,200 Gbit/s of EFA for 8 GPUs"),
    Link("efa-p4d", 6.25, 0.60, 15.0, "Amazon EC2 p4d: 400 Gbit/s of EFA for 8 GPUs",
         "29.6 of 50 GB/s measured over 4 machines, NVIDIA/nccl issue 527"),
    Link("ethernet100", 1.56, 0.80, 30.0, "100 Gbit/s for a machine of 8 GPUs"),
)  # fmt: skip
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
