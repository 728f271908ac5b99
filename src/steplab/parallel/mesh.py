"""The mesh of ranks, which says who holds which part of a parameter.

Ranks are numbered replica by replica: (replica, expert), so that P neighbors share one set of
experts, and ranks P apart hold the same ones.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

REPLICA, EXPERT = "replica", "expert"


def rank_mesh(device_type: str, expert: int = 1) -> DeviceMesh:
    """Return all ranks as a mesh of two axes: N / `expert` replicas of the experts' `expert` parts.

    Every other mesh is a part of this one: FSDP2 shards a parameter along two axes only where both
    come from one mesh.
    """
    shape = (dist.get_world_size() // expert, expert)
    return init_device_mesh(device_type, shape, mesh_dim_names=(REPLICA, EXPERT))
