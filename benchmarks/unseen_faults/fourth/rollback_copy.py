"""Weights and optimizer state are deep-copied before every update, to go back if the loss becomes
NaN some day.
A good finding names the copies of all weights and states in the step, and the line of deepcopy.
"""

import copy

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "weights and optimizer state are deep-copied before every update",
    "FIX": "keep a copy every few hundred steps, or leave out the update of a bad step",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(16, 4),
    by_device(512, 32),
    by_device(1024, 256),
    by_device(12, 3),
)
VOCAB, EVERY = by_device(16_384, 2000), 500


def build(every):
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    optimizer = adamw(model)
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))
    done, backup = 0, None

    def step():
        nonlocal done, backup
        ids = next(tokens)
        with mixed():
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        done += 1
        if done % every == 0:
            if backup is not None and not torch.isfinite(loss):
                model.load_state_dict(backup[0])
                optimizer.load_state_dict(backup[1])
            backup = copy.deepcopy((model.state_dict(), optimizer.state_dict()))  # guilty
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(1)


def clean():
    return build(EVERY)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
