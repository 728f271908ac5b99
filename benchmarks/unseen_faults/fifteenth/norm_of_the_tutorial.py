"""A masked language model of source code grew out of a tutorial, and its norm is still the class that the
tutorial writes to explain it: a mean, a variance, a difference, a root, a quotient, a product and a
sum. There are four norms in each layer, and run op by op each passes over the states many times,
forward and backward. nn.LayerNorm does the same in one operator.
A good finding names the layer norm written out by hand (a chain of elementwise operators and means)
and one of its lines.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "layer norm is written out with mean, var and elementwise operators",
    "FIX": "use nn.LayerNorm, which is one operator",
    "BATCH": 32,
    "CPU_BATCH": 20,
}
CONTEXT, VOCAB = by_device(512, 96), by_device(8192, 192)
HIDDEN, HEADS, LAYERS = by_device(768, 64), by_device(12, 2), by_device(8, 2)


class TutorialNorm(nn.Module):
    def __init__(self, features, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = x.var(-1, keepdim=True, unbiased=False)
        return self.weight * (x - mean) / torch.sqrt(variance + self.eps) + self.bias  # guilty


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query_key_value = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.dense = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden_states):
        b, t, _ = hidden_states.shape
        q, k, v = (
            self.query_key_value(hidden_states).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.dense(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.attention = SelfAttention()
        self.before_attention, self.after_attention = norm(HIDDEN), norm(HIDDEN)
        self.before_output, self.after_output = norm(HIDDEN), norm(HIDDEN)
        self.intermediate = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.output = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden_states):
        x = self.attention(self.before_attention(hidden_states))
        hidden_states = hidden_states + self.after_attention(x)
        x = self.output(F.gelu(self.intermediate(self.before_output(hidden_states))))
        return hidden_states + self.after_output(x)


class CodeModel(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.words = nn.Embedding(VOCAB, HIDDEN)
        self.places = nn.Embedding(CONTEXT, HIDDEN)
        self.layers = nn.Sequential(*(Layer(norm) for _ in range(LAYERS)))
        self.norm, self.decoder = norm(HIDDEN), nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids):
        hidden_states = self.layers(self.words(input_ids) + self.places.weight)
        return self.decoder(self.norm(hidden_states))


def loss_of(model, batch):
    with mixed():
        logits = model(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def batches(size):
    def make():
        labels = torch.randint(VOCAB, (size, CONTEXT), device=device())
        noisy = torch.rand(labels.shape, device=device()) < 0.3
        return {"input_ids": labels.masked_fill(noisy, 0), "labels": labels}

    return in_turn(make)


def build(norm):
    import steplab

    return steplab.UserModel(CodeModel(norm), batches, loss_of, optimizer=adamw)


def faulty():
    return build(TutorialNorm)


def clean():
    return build(nn.LayerNorm)
