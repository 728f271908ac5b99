"""The moving average of the weights asks the model for its whole state_dict once per weight, to take
a single entry of it.
A good finding names the time that the host spends in state_dict, and the line of the average.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the moving average builds the whole state_dict once per weight",
    "FIX": "take the state_dict, or the list of weights, once",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(8, 4),
    by_device(256, 48),
    by_device(384, 64),
    by_device(12, 8),
)
VOCAB, RATE = by_device(8192, 500), 0.001


def prepare():
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    return model, adamw(model), tokens, average


def update(model, optimizer, ids):
    with mixed():
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, tokens, average = prepare()

    def step():
        loss = update(model, optimizer, next(tokens))
        with torch.no_grad():
            for name, smooth in average.items():
                smooth.lerp_(model.state_dict()[name], RATE)  # guilty
        return loss

    return step


def clean():
    model, optimizer, tokens, average = prepare()
    smooth, weights = list(average.values()), [p.detach() for p in model.parameters()]

    def step():
        loss = update(model, optimizer, next(tokens))
        torch._foreach_lerp_(smooth, weights, RATE)
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
