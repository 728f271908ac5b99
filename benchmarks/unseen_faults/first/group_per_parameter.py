"""Learning rates that decay from the last layer to the first."""

import steplab
import torch

from common import Decoder, my_turn, next_token_loss, pick, token_batches

FAULT = {
    "NAME": "group_per_parameter",
    "CAUSE": "Layer-wise learning rates are made with one parameter group per parameter, so the fused optimizer updates one tensor per launch, with the Python overhead of a group for each.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Put all parameters that share a learning rate and a weight decay into one group.",
    "STYLE": "factory",
    "BATCH": 4,
}
WIDTH, LAYERS, VOCAB, CONTEXT = pick(768, 32), pick(24, 2), pick(8192, 64), pick(1024, 16)


def rate_and_decay(name, parameter):
    depth = int(name.split(".")[1]) if name.startswith("blocks.") else LAYERS
    return 3e-4 * 0.9 ** ((LAYERS - depth) // 8), 0.1 if parameter.ndim > 1 else 0.0


def one_group_each(model, **how):
    groups = []
    for name, parameter in model.named_parameters():
        lr, decay = rate_and_decay(name, parameter)
        groups.append({"params": [parameter], "lr": lr, "weight_decay": decay})  # FAULT
    return torch.optim.AdamW(groups, **{"fused": True, **how})


def shared_groups(model, **how):
    members = {}
    for name, parameter in model.named_parameters():
        members.setdefault(rate_and_decay(name, parameter), []).append(parameter)
    groups = [{"params": p, "lr": lr, "weight_decay": decay} for (lr, decay), p in members.items()]
    return torch.optim.AdamW(groups, **{"fused": True, **how})


def make(optimizer):
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT)
    my_turn()
    return steplab.UserModel(
        model=model,
        batches=token_batches(VOCAB, CONTEXT),
        loss=next_token_loss,
        optimizer=optimizer,
        tokens_per_sequence=CONTEXT,
    )


def faulty():
    return make(one_group_each)


def clean():
    return make(shared_groups)
