"""A deep Q-network follows its online network softly. The update of the target is the one of the
tutorial: a loop over the two state dicts that computes tau * a + (1 - tau) * b for each weight, and
a `load_state_dict` of the result. It makes three temporary copies of every weight and copies the
result back, in each step; an interpolation in place reads and writes once.
A good finding names the update of the target network tensor by tensor (with its temporaries and the
copy back) and one of its lines.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the target network is updated out of place through state dicts, weight by weight",
    "FIX": "interpolate the weights in place with torch._foreach_lerp_",
}
BATCH, STATE, ACTIONS = by_device(256, 16), by_device(512, 128), 18
WIDTH, LAYERS, TAU, GAMMA = by_device(4096, 1280), by_device(4, 3), 0.005, 0.99


class QNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(STATE, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.value, self.advantage = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, ACTIONS)

    def forward(self, state):
        x = F.relu(self.start(state))
        for layer in self.layers:
            x = F.relu(layer(x))
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(1, keepdim=True)


def by_state_dict(online, target):
    ours, theirs = online.state_dict(), target.state_dict()
    for key in ours:
        theirs[key] = ours[key] * TAU + theirs[key] * (1 - TAU)  # guilty
    target.load_state_dict(theirs)


def in_place(online, target):
    with torch.no_grad():
        torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), TAU)


def build(follow):
    online, target = QNetwork().to(device()), QNetwork().to(device())
    target.load_state_dict(online.state_dict())
    target.requires_grad_(False)
    optimizer = adamw(online)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, STATE, device=device()),
            torch.randint(ACTIONS, (BATCH, 1), device=device()),
            torch.randn(BATCH, device=device()),
            torch.randn(BATCH, STATE, device=device()),
            (torch.rand(BATCH, device=device()) < 0.02).float(),
        )
    )

    def step():
        state, action, reward, after, done = next(data)
        with torch.no_grad():
            wanted = reward + GAMMA * (1 - done) * target(after).amax(1)
        loss = F.smooth_l1_loss(online(state).gather(1, action)[:, 0], wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        follow(online, target)
        return loss.detach()

    return step


def faulty():
    return build(by_state_dict)


def clean():
    return build(in_place)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
