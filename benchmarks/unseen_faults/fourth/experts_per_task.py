"""A recommender mixes shared experts for several tasks with a gate per task, and computes all
experts again for every task.
A good finding names the experts' product that is repeated on the same input, and its line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 8192,
    "CPU_BATCH": 384,
    "CAUSE": "the experts that all tasks share are computed once per task",
    "FIX": "compute them once before the loop over the tasks",
}
FEATURES, HIDDEN, EXPERTS, TASKS = by_device(1024, 256), by_device(512, 128), 8, 4


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.Linear(FEATURES, EXPERTS * HIDDEN)
        self.gates = nn.Linear(FEATURES, TASKS * EXPERTS)
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
            for _ in range(TASKS)
        )

    def expert_states(self, x):
        return F.relu(self.experts(x)).view(-1, EXPERTS, HIDDEN)


class PerTask(Mixture):
    def forward(self, x):
        gates = self.gates(x).view(-1, TASKS, 1, EXPERTS).softmax(-1)
        outputs = []
        for task, tower in enumerate(self.towers):
            states = self.expert_states(x)  # guilty
            outputs.append(tower((gates[:, task].to(states.dtype) @ states)[:, 0]))
        return torch.cat(outputs, 1)


class Shared(Mixture):
    def forward(self, x):
        gates = self.gates(x).view(-1, TASKS, EXPERTS).softmax(-1)
        states = self.expert_states(x)
        mixed_states = (gates.to(states.dtype) @ states).unbind(1)
        return torch.cat([t(s) for t, s in zip(self.towers, mixed_states, strict=True)], 1)


def build(mixture):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, FEATURES, device=device()),
                torch.randint(2, (size, TASKS), device=device()).float(),
            )
        )

    def loss(model, batch):
        with mixed():
            return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    return steplab.UserModel(mixture(), batches, loss, unit="rows")


def faulty():
    return build(PerTask)


def clean():
    return build(Shared)
