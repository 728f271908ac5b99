"""A policy is tuned with PPO: four epochs over the answers that it just wrote. The frozen reward model gives
each token its value, and the frozen reference an anchor that the policy must not leave too far. Both read
the answers anew in every epoch, though neither they nor the answers have changed; what they say belongs
in the rollout, computed once before the first epoch.
A good finding names the frozen models' repeated forward passes over the same tokens, and their line.
"""

import copy

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the frozen reference and reward model score the same rollout again in each of the PPO epochs",
    "FIX": "score the rollout once, before the loop over the epochs",
}
SIZE, CONTEXT, VOCAB = by_device(16, 2), by_device(512, 48), by_device(8192, 512)
WIDTH, LAYERS, EPOCHS, CLIP, PENALTY = by_device(512, 64), by_device(6, 2), 4, 0.2, 0.05


def log_chances(model, ids):
    with mixed():
        return model(ids[:, :-1]).float().log_softmax(-1)


def taken(chances, ids):
    return chances.gather(-1, ids[:, 1:, None]).squeeze(-1)


class Tuning:
    def __init__(self):
        torch.manual_seed(0)
        self.policy = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
        self.reference = copy.deepcopy(self.policy).eval().requires_grad_(False)
        self.judge = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device()).eval().requires_grad_(False)
        self.value = torch.randn(WIDTH, device=device())
        self.optimizer = adamw(self.policy)
        self.rollouts = in_turn(self.rollout)

    def rollout(self):
        ids = torch.randint(VOCAB, (SIZE, CONTEXT + 1), device=device())
        with torch.no_grad():
            before = taken(log_chances(self.policy, ids), ids)
        return ids, before

    @torch.no_grad()
    def scored(self, ids):
        with mixed():
            reward = (self.judge.hidden(ids[:, 1:]) * self.value).sum(-1).float()
        return (reward - reward.mean()) / reward.std(), log_chances(self.reference, ids)

    def update(self, ids, before, advantage, anchor):
        now = log_chances(self.policy, ids)
        ratio = (taken(now, ids) - before).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
        apart = F.kl_div(anchor, now, log_target=True, reduction="none").sum(-1).mean()
        loss = PENALTY * apart - gain
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def faulty():
    run = Tuning()

    def step():
        ids, before = next(run.rollouts)
        for _ in range(EPOCHS):
            advantage, anchor = run.scored(ids)  # guilty
            loss = run.update(ids, before, advantage, anchor)
        return loss

    return step


def clean():
    run = Tuning()

    def step():
        ids, before = next(run.rollouts)
        advantage, anchor = run.scored(ids)
        for _ in range(EPOCHS):
            loss = run.update(ids, before, advantage, anchor)
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
