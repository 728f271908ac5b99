"""A language model is trained with a group-relative policy gradient on answers that it samples in each step.
The sampling runs the whole sequence so far through the model for each new token and keeps the last logits,
although the keys and values of earlier tokens do not change.
A good finding names the generation that recomputes the prefix for each token and one of its lines.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the rollout is sampled without a cache of keys and values: each token recomputes the prefix",
    "FIX": "keep the keys and values of the prefix and run only the new token through the layers",
}
PROMPTS, GROUP, VOCAB = by_device(8, 2), by_device(8, 6), by_device(8192, 64)
PROMPT, ANSWER = by_device(256, 64), by_device(24, 12)
WIDTH, HEADS, LAYERS = by_device(1024, 64), by_device(16, 2), by_device(4, 2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, past=None):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)))), (k, v)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(PROMPT + ANSWER, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def states(self, ids, past=None):
        begin = 0 if past is None else past[0][0].shape[2]
        x = self.tokens(ids) + self.places.weight[begin : begin + ids.shape[1]]
        present = []
        for number, layer in enumerate(self.layers):
            x, kept = layer(x, None if past is None else past[number])
            present.append(kept)
        return self.norm(x), present


def draw(logits):
    return torch.multinomial(logits.float().softmax(-1), 1)


def sample_from_start(policy, ids):
    for _ in range(ANSWER):
        states, _ = policy.states(ids)  # guilty
        ids = torch.cat([ids, draw(policy.head(states[:, -1]))], dim=1)
    return ids


def sample_with_cache(policy, ids):
    new, past = ids, None
    for _ in range(ANSWER):
        states, past = policy.states(new, past)
        new = draw(policy.head(states[:, -1]))
        ids = torch.cat([ids, new], dim=1)
    return ids


def build(sample):
    policy = Policy().to(device())
    optimizer = adamw(policy)
    liked = torch.randn(VOCAB, device=device())
    data = in_turn(lambda: torch.randint(VOCAB, (PROMPTS, PROMPT), device=device()))

    def step():
        prompts = next(data).repeat_interleave(GROUP, dim=0)
        with torch.no_grad(), mixed():
            ids = sample(policy, prompts)
        answers = ids[:, PROMPT:]
        rewards = liked[answers].mean(1).view(PROMPTS, GROUP)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (
            rewards.std(1, keepdim=True) + 1e-4
        )
        with mixed():
            states, _ = policy.states(ids[:, :-1])
            logits = policy.head(states[:, PROMPT - 1 :])
            losses = F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none")
        loss = (losses.view_as(answers).mean(1) * advantages.flatten()).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(sample_from_start)


def clean():
    return build(sample_with_cache)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
