"""Reaction and diffusion in a tissue are simulated with a learned reaction and an implicit step for the
diffusion, and trained through a rollout. The matrix of the implicit step never changes, yet each step of the
rollout calls solve with it, which factors it anew; it can be factored once, before the training.
A good finding names the LU factorization of a constant matrix in every step, and the line that solves.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "the constant matrix of the implicit step is factored again in every step of the rollout",
    "FIX": "factor the matrix once (lu_factor) and call lu_solve with the factors",
    "BATCH": 256,
    "CPU_BATCH": 28,
}
CELLS, ROLLOUT, WIDTH = by_device(2048, 400), by_device(8, 4), by_device(128, 16)


class Tissue(nn.Module):
    def __init__(self, factored):
        super().__init__()
        self.factored = factored
        self.react = nn.Sequential(
            nn.Conv1d(1, WIDTH, 5, padding=2),
            nn.GELU(),
            nn.Conv1d(WIDTH, WIDTH, 5, padding=2),
            nn.GELU(),
            nn.Conv1d(WIDTH, 1, 1),
        )
        off = torch.full((CELLS - 1,), -0.4)
        matrix = torch.diag(torch.full((CELLS,), 1.8)) + torch.diag(off, 1) + torch.diag(off, -1)
        self.register_buffer("matrix", matrix)
        lu, pivots = torch.linalg.lu_factor(matrix)
        self.register_buffer("lu", lu)
        self.register_buffer("pivots", pivots)

    def diffuse(self, field):
        if self.factored:
            return torch.linalg.lu_solve(self.lu, self.pivots, field.T).T
        return torch.linalg.solve(self.matrix, field.T).T  # guilty

    def forward(self, field):
        for _ in range(ROLLOUT):
            field = self.diffuse(field + 0.1 * self.react(field.unsqueeze(1)).squeeze(1))
        return field


def fields(size):
    return in_turn(lambda: torch.randn(2, size, CELLS, device=device()))


def loss(model, batch):
    now, after = batch
    return F.mse_loss(model(now), after)


def faulty():
    return steplab.UserModel(Tissue(factored=False), fields, loss, optimizer=adamw)


def clean():
    return steplab.UserModel(Tissue(factored=True), fields, loss, optimizer=adamw)
