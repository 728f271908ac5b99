"""A Q-function is trained from prioritized replay. After the update the errors of the sampled transitions are
computed once more with the new weights and written into the table of priorities. That pass is not under
no_grad, and the table, a tensor that lives as long as the run, so takes on the graph of every such pass
with all its activations: none is ever freed, and the memory grows from step to step.
A good finding names the growth by graphs kept alive and the line that writes into the priorities.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, main

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "refreshed priorities are written into the replay's table with their autograd graph",
    "FIX": "compute the new errors under torch.no_grad(), or detach them before they are written",
}
STORED, BATCH = by_device(262_144, 8192), by_device(4096, 1024)
STATE, ACTIONS, WIDTH = by_device(256, 48), 18, by_device(1024, 320)
DISCOUNT, SHARPNESS = 0.99, 0.6


def network():
    return nn.Sequential(
        nn.Linear(STATE, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, ACTIONS),
    )


class Replay:
    def __init__(self):
        where = device()
        self.state = torch.randn(STORED, STATE, device=where)
        self.after = torch.randn(STORED, STATE, device=where)
        self.action = torch.randint(ACTIONS, (STORED,), device=where)
        self.reward = torch.randn(STORED, device=where)
        self.priority = torch.ones(STORED, device=where)

    def sample(self):
        index = torch.multinomial(self.priority.detach() ** SHARPNESS, BATCH)
        return index, self.state[index], self.action[index], self.reward[index], self.after[index]


def make(refresh):
    torch.manual_seed(0)
    online, target = network().to(device()), network().to(device())
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-4, fused=True)
    replay = Replay()

    def step():
        index, state, action, reward, after = replay.sample()
        with torch.no_grad():
            best = online(after).argmax(1, keepdim=True)
            aim = reward + DISCOUNT * target(after).gather(1, best).squeeze(1)
        value = online(state).gather(1, action[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(value, aim)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        refresh(replay, index, online, state, action, aim)
        return loss.detach()

    return step


def error(online, state, action, aim):
    return (online(state).gather(1, action[:, None]).squeeze(1) - aim).abs() + 1e-3


def refresh_with_graph(replay, index, online, state, action, aim):
    replay.priority[index] = error(online, state, action, aim)  # guilty


def refresh_without(replay, index, online, state, action, aim):
    with torch.no_grad():
        replay.priority[index] = error(online, state, action, aim)


def faulty():
    return make(refresh_with_graph)


def clean():
    return make(refresh_without)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
