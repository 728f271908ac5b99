"""Traffic forecasting with graph convolutions over a fixed road network. The scaled Laplacian, its
largest eigenvalue and the Chebyshev polynomials are computed from the same roads in every forward.
A good finding names the polynomials of the fixed graph that every step makes anew, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the Chebyshev polynomials of the fixed road network are computed in every forward",
    "FIX": "compute the polynomials once and keep them as a buffer",
}
BATCH, SENSORS, PAST, FUTURE = by_device(64, 4), by_device(1024, 358), 12, 12
WIDTH, ORDER, LAYERS = by_device(256, 64), 3, 2


def chebyshev(roads):
    degree = roads.sum(1).rsqrt()
    eye = torch.eye(len(roads), device=roads.device)
    laplacian = eye - degree[:, None] * roads * degree
    scaled = 2 * laplacian / torch.linalg.eigvalsh(laplacian)[-1] - eye
    terms = [eye, scaled]
    while len(terms) < ORDER:
        terms.append(2 * scaled @ terms[-1] - terms[-2])
    return torch.stack(terms)


class GraphConv(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(ORDER * width, width)

    def forward(self, x, terms):
        near = torch.einsum("knm,bmc->bnkc", terms, x).flatten(2)
        return x + F.relu(self.mix(near))


class Forecaster(nn.Module):
    def __init__(self, roads):
        super().__init__()
        self.register_buffer("roads", roads)
        self.register_buffer("terms", chebyshev(roads))
        self.embed = nn.Linear(PAST, WIDTH)
        self.layers = nn.ModuleList(GraphConv(WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, FUTURE)

    def propagate(self, past, terms):
        x = self.embed(past)
        for layer in self.layers:
            x = layer(x, terms)
        return self.head(x)

    def forward(self, past):
        return self.propagate(past, self.terms)


class ForecasterFromRoads(Forecaster):
    def forward(self, past):
        terms = chebyshev(self.roads)  # guilty
        return self.propagate(past, terms)


def prepare(kind):
    near = torch.rand(SENSORS, SENSORS, device=device()) < 0.03
    roads = (near | near.T).float().fill_diagonal_(1)
    model = kind(roads).to(device())
    data = in_turn(
        lambda: (
            torch.randn(BATCH, SENSORS, PAST, device=device()),
            torch.randn(BATCH, SENSORS, FUTURE, device=device()),
        )
    )
    return model, adamw(model), data


def training(kind):
    model, optimizer, data = prepare(kind)

    def step():
        past, future = next(data)
        with mixed():
            guess = model(past)
        loss = F.l1_loss(guess.float(), future)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return training(ForecasterFromRoads)


def clean():
    return training(Forecaster)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
