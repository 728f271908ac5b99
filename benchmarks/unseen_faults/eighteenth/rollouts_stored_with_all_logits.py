"""A policy learns off-policy from a buffer of its last sixty-four rollouts. For the ratio of new to old
probability, the buffer needs one number for each token that was written; what it stores is the whole
log-softmax over the vocabulary, from which the number is gathered when the rollout is drawn. So every step
adds megabytes until the buffer is full. Gathered before it is stored, the same number takes four bytes.
A good finding names what grows from step to step (the stored log-probabilities), and the line that stores.
"""

import collections
import itertools
import random

import torch

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the replay buffer keeps log-probabilities over the whole vocabulary, not the taken tokens'",
    "FIX": "gather the log-probabilities of the taken tokens before they are stored",
}
SIZE, CONTEXT, VOCAB = by_device(8, 4), by_device(256, 64), by_device(8192, 4096)
WIDTH, LAYERS, KEPT, CLIP = by_device(512, 64), by_device(6, 1), 64, 0.2


def log_chances(model, ids):
    with mixed():
        return model(ids[:, :-1]).float().log_softmax(-1)


def of_taken(chances, ids):
    return chances.gather(-1, ids[:, 1:, None]).squeeze(-1)


class Learner:
    def __init__(self):
        torch.manual_seed(0)
        random.seed(0)
        self.policy = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
        self.optimizer = adamw(self.policy)
        self.buffer = collections.deque(maxlen=KEPT)
        self.games = in_turn(self.game)

    def game(self):
        ids = torch.randint(VOCAB, (SIZE, CONTEXT + 1), device=device())
        return ids, torch.randn(SIZE, 1, device=device())

    def learn(self, ids, before, advantage):
        ratio = (of_taken(log_chances(self.policy, ids), ids) - before).exp()
        bound = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.minimum(ratio * advantage, bound * advantage).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def faulty():
    run = Learner()

    def step():
        ids, advantage = next(run.games)
        with torch.no_grad():
            run.buffer.append((ids, log_chances(run.policy, ids), advantage))  # guilty
        ids, before, advantage = random.choice(run.buffer)
        return run.learn(ids, of_taken(before, ids), advantage)

    return step


def clean():
    run = Learner()
    old = torch.zeros(KEPT, SIZE, CONTEXT, device=device())
    places = itertools.cycle(range(KEPT))

    def step():
        ids, advantage = next(run.games)
        place = next(places)
        with torch.no_grad():
            old[place] = of_taken(log_chances(run.policy, ids), ids)
        run.buffer.append((ids, old[place], advantage))
        ids, before, advantage = random.choice(run.buffer)
        return run.learn(ids, before, advantage)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
