"""A language model is tuned by PPO: a batch of sampled answers is gone through four times, with a penalty
for leaving the reference model. The reference's log-probabilities and the reward are asked for inside
the loop over these epochs, though neither the answers nor the two frozen models change between them:
both models read the same tokens four times. Asked for once before the loop, they are just numbers.
A good finding names the repeated forward passes of the frozen models on the same tokens, and the line.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the frozen reference and reward models score the same rollouts in every PPO epoch",
    "FIX": "score the rollouts once before the loop over the epochs",
}
BATCH, CONTEXT, VOCAB = by_device(32, 2), by_device(512, 48), by_device(16_384, 256)
WIDTH, LAYERS, EPOCHS = by_device(768, 128), by_device(8, 2), 4
CLIP, PENALTY = 0.2, 0.05


def token_logprobs(model, ids):
    with mixed():
        logits = model(ids[:, :-1])
    return -F.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")


class Judge:
    def __init__(self):
        self.reference = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device()).requires_grad_(False)
        self.reward = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device()).requires_grad_(False)
        self.value = torch.randn(WIDTH, device=device()) * WIDTH**-0.5

    @torch.no_grad()
    def __call__(self, ids):
        with mixed():
            states = self.reward.hidden(ids[:, :-1])
        rewards = states.float().mean(1) @ self.value
        return token_logprobs(self.reference, ids), rewards - rewards.mean()


def ppo_loss(policy, ids, old, reference, advantage):
    new = token_logprobs(policy, ids)
    ratio, gain = (new - old).exp(), advantage[:, None]
    surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
    away = reference - new
    return (PENALTY * (away.exp() - away - 1) - surrogate).mean()


def set_up():
    torch.manual_seed(0)
    policy, judge = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device()), Judge()
    stream = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))
    return policy, judge, adamw(policy), stream


def update(updates, loss):
    loss.backward()
    updates.step()
    updates.zero_grad()
    return loss.detach()


def faulty():
    policy, judge, updates, stream = set_up()

    def step():
        ids = next(stream)
        with torch.no_grad():
            old = token_logprobs(policy, ids)
        for _ in range(EPOCHS):
            reference, advantage = judge(ids)  # guilty
            loss = update(updates, ppo_loss(policy, ids, old, reference, advantage))
        return loss

    return step


def clean():
    policy, judge, updates, stream = set_up()

    def step():
        ids = next(stream)
        with torch.no_grad():
            old = token_logprobs(policy, ids)
        reference, advantage = judge(ids)
        for _ in range(EPOCHS):
            loss = update(updates, ppo_loss(policy, ids, old, reference, advantage))
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
