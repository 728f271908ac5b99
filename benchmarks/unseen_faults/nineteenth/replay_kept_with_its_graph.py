"""A small language model is tuned off-policy: fresh answers enter a replay buffer with the
log-probabilities that the policy gave them then, and the update is computed on answers drawn from the
buffer. The old log-probabilities are computed with gradients on, and detached only where they are
used, so every entry of the buffer holds the graph of a forward pass that nobody goes back through:
the activations of the policy pile up until the buffer is full.
A good finding names the activations kept from step to step, and the line that computes or stores them.
"""

import random
from collections import deque

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the replay buffer holds log-probabilities with their graphs, and so all activations",
    "FIX": "compute the old log-probabilities under torch.no_grad()",
}
BATCH, CONTEXT, VOCAB = by_device(8, 4), by_device(256, 48), by_device(8192, 256)
WIDTH, LAYERS, ENTRIES, CLIP = by_device(384, 128), by_device(4, 3), 256, 0.2


def token_logprobs(policy, ids):
    with mixed():
        logits = policy(ids[:, :-1])
    return -F.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")


def train(look):
    torch.manual_seed(0)
    random.seed(0)
    policy = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    updates, replay = adamw(policy), deque(maxlen=ENTRIES)

    def answers():
        ids = torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device())
        return ids, torch.randn(BATCH, 1, device=device())

    stream = in_turn(answers)

    def step():
        ids, advantage = next(stream)
        replay.append((ids, advantage, look(policy, ids)))
        ids, advantage, old = random.choice(replay)
        ratio = (token_logprobs(policy, ids) - old.detach()).exp()
        bounded = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.minimum(ratio * advantage, bounded * advantage).mean()
        loss.backward()
        updates.step()
        updates.zero_grad()
        return loss.detach()

    return step


def faulty():
    def look(policy, ids):
        return token_logprobs(policy, ids)  # guilty

    return train(look)


def clean():
    @torch.no_grad()
    def look(policy, ids):
        return token_logprobs(policy, ids)

    return train(look)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
