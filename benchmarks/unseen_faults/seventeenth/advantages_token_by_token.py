"""A language model with a value head is trained with PPO on its answers. The generalized advantages are
computed as in many implementations, backwards through the answer: for each of its tokens a few operators
over one number per answer, thousands of tiny operators a step.
A good finding names the loop of small operators that computes the advantages and one of its lines.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the advantages are computed token by token in a Python loop over tiny tensors",
    "FIX": "the recursion is linear: multiply the deltas by a triangular matrix of powers of gamma * lambda",
}
BATCH, TIME, VOCAB = by_device(24, 1), by_device(1024, 1024), by_device(8192, 64)
WIDTH, LAYERS = by_device(768, 64), by_device(5, 1)
GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = Decoder(WIDTH, LAYERS, VOCAB, TIME)
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, ids):
        states = self.decoder.hidden(ids)
        return self.decoder.head(states), self.value(states).squeeze(-1).float()


def advantages_by_loop(rewards, values):
    after = torch.zeros_like(values[:, 0])
    advantages, last = [], torch.zeros_like(after)
    for t in reversed(range(TIME)):
        delta = rewards[:, t] + GAMMA * after - values[:, t]
        last = delta + GAMMA * LAMBDA * last  # guilty
        after = values[:, t]
        advantages.append(last)
    return torch.stack(advantages[::-1], dim=1)


class AdvantagesByProduct:
    def __init__(self):
        times = torch.arange(TIME, device=device())
        ages = times[:, None] - times[None, :]
        self.decay = torch.where(ages >= 0, (GAMMA * LAMBDA) ** ages.clamp(min=0), 0.0)

    def __call__(self, rewards, values):
        deltas = rewards + GAMMA * F.pad(values[:, 1:], (0, 1)) - values
        return deltas @ self.decay


def taken_log_probs(logits, ids):
    return -F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view_as(ids)


def build(advantages_of):
    model = ActorCritic().to(device())
    optimizer = adamw(model)

    def answers():
        ids = torch.randint(VOCAB, (BATCH, TIME + 1), device=device())
        return ids, torch.randn(BATCH, TIME, device=device()) * 0.1

    data = in_turn(answers)

    def step():
        ids, rewards = next(data)
        with torch.no_grad():
            with mixed():
                logits, values = model(ids[:, :-1])
                before = taken_log_probs(logits, ids[:, 1:])
            advantages = advantages_of(rewards, values)
            returns = advantages + values
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        with mixed():
            logits, values = model(ids[:, :-1])
            now = taken_log_probs(logits, ids[:, 1:])
        ratio = torch.exp(now - before)
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        loss = F.mse_loss(values, returns) - gain.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(advantages_by_loop)


def clean():
    return build(AdvantagesByProduct())


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
