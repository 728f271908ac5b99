"""Models in the layout of Time-MoE on the Hugging Face hub: config.json and safetensors.

Nothing is downloaded, no code from the folder is run, no pickle is opened. Importing this package
leaves torch out; loading brings it in.
"""

from steplab.workloads.tsmoe.time_moe.loading import load_time_moe, load_weights
from steplab.workloads.tsmoe.time_moe.names import Part, parts
from steplab.workloads.tsmoe.time_moe.settings import is_time_moe, read_config, render_config

__all__ = [
    "Part",
    "is_time_moe",
    "load_time_moe",
    "load_weights",
    "parts",
    "read_config",
    "render_config",
]
