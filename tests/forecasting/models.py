"""Small models with random weights."""

import torch

from steplab.workloads.tsmoe.config import TsmoeConfig
from steplab.workloads.tsmoe.model import Tsmoe

SHAPE = {"hidden_size": 32, "n_decoder_layers": 2, "n_head": 2, "num_experts": 4, "d_ff": 32}


def config(**changes):
    options = {"d_expert": 16, "seq_max_len": 80, "horizons": "1,4,16", **changes}
    return TsmoeConfig(**SHAPE, **options)


def model(dtype=torch.float64, **changes):
    """Weights ten times as large as at the start of training: the forecasts differ from zero."""
    torch.manual_seed(0)
    built = Tsmoe(config(**changes)).to(dtype)
    with torch.no_grad():
        built.heads.weight.mul_(10)
    return built
