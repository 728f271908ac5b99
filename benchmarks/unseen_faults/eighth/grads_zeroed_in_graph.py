"""A training step is captured as a CUDA graph. Its author believed that gradients must keep their
memory, so the graph fills all of them with zeros and the backward adds to them: two more passes over
all weights in every replay. Gradients set to None before the backward get fixed memory from the
graph's pool anyway. (Without a GPU the same step runs without a graph.)
A good finding names the fills and additions of the gradients and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the captured step fills all gradients with zeros and adds to them, two more passes over all weights",
    "FIX": "zero_grad(set_to_none=True) in the captured step",
}
BATCH, WIDTH, LAYERS, FEATURES = by_device(256, 16), by_device(8192, 1024), by_device(10, 8), 64


def prepare():
    layers = [nn.Linear(FEATURES, WIDTH)]
    with torch.device(device()):
        for _ in range(LAYERS):
            layers += [nn.SiLU(), nn.Linear(WIDTH, WIDTH)]
        model = nn.Sequential(*layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)).to(device())
    optimizer = adamw(model, capturable=device() == "cuda")
    data = in_turn(
        lambda: (
            torch.randn(BATCH, FEATURES, device=device()),
            torch.randn(BATCH, 1, device=device()),
        )
    )
    return model, optimizer, data


def learn(model, optimizer, x, y):
    with mixed():
        loss = F.mse_loss(model(x).float(), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def captured(body, data):
    """Return a step that replays body(x, y), which was warmed up and captured."""
    if device() != "cuda":
        return lambda: body(*next(data))
    x, y = (part.clone() for part in next(data))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            body(x, y)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = body(x, y)

    def step():
        new_x, new_y = next(data)
        x.copy_(new_x)
        y.copy_(new_y)
        graph.replay()
        return loss

    step.body = body  # what the graph reads and writes stays alive
    return step


def faulty():
    model, optimizer, data = prepare()

    def body(x, y):
        optimizer.zero_grad(set_to_none=False)  # guilty
        return learn(model, optimizer, x, y)

    return captured(body, data)


def clean():
    model, optimizer, data = prepare()

    def body(x, y):
        optimizer.zero_grad(set_to_none=True)
        return learn(model, optimizer, x, y)

    return captured(body, data)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
