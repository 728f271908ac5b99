"""A BERT-like encoder finds diagnoses in the codes of patients. Its config says output_attentions,
since somebody once drew heat maps, so every layer takes the eager path: scores, softmax and
probabilities of (batch, heads, time, time) are written out and returned. The training reads the
logits alone, for which the fused attention will do.
A good finding names the attention that is written out by hand (or attentions that nobody reads) and the line.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "output_attentions makes every layer write its attention matrix out, and nobody reads it",
    "FIX": "leave output_attentions off, so that scaled_dot_product_attention is called",
    "BATCH": 16,
    "CPU_BATCH": 2,
}
CONTEXT, WIDTH, HEADS = by_device(1024, 256), by_device(512, 64), by_device(8, 4)
LAYERS, CODES, DIAGNOSES = by_device(8, 2), 8192, 300


@dataclass
class Config:
    output_attentions: bool = False


class SelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.dense = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def heads(self, x):
        return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)

    def forward(self, hidden_states):
        query = self.heads(self.query(hidden_states))
        key, value = self.heads(self.key(hidden_states)), self.heads(self.value(hidden_states))
        probabilities = None
        if self.config.output_attentions:
            scores = query @ key.mT * query.shape[-1] ** -0.5
            probabilities = scores.softmax(-1)  # guilty
            context = probabilities.to(value.dtype) @ value
        else:
            context = F.scaled_dot_product_attention(query, key, value)
        return self.dense(context.transpose(1, 2).flatten(2)), probabilities


class PatientLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = SelfAttention(config)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.intermediate, self.output = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden_states):
        attended, probabilities = self.attention(hidden_states)
        x = self.norm1(hidden_states + attended)
        return self.norm2(x + self.output(F.gelu(self.intermediate(x)))), probabilities


class PatientForDiagnosis(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(CODES, WIDTH)
        self.position_embeddings = nn.Embedding(CONTEXT, WIDTH)
        self.layer = nn.ModuleList(PatientLayer(config) for _ in range(LAYERS))
        self.classifier = nn.Linear(WIDTH, DIAGNOSES)
        self.config = config

    def forward(self, input_ids, labels):
        hidden_states = self.word_embeddings(input_ids) + self.position_embeddings.weight
        attentions = ()
        for layer in self.layer:
            hidden_states, probabilities = layer(hidden_states)
            attentions += (probabilities,)
        logits = self.classifier(hidden_states[:, 0])
        output = {"loss": F.binary_cross_entropy_with_logits(logits, labels), "logits": logits}
        if self.config.output_attentions:
            output["attentions"] = attentions
        return output


def loss_of(model, batch):
    with mixed():
        return model(**batch)["loss"]


def batches(size):
    def make():
        codes = torch.randint(CODES, (size, CONTEXT), device=device())
        labels = (torch.rand(size, DIAGNOSES, device=device()) < 0.05).float()
        return {"input_ids": codes, "labels": labels}

    return in_turn(make)


def build(config):
    import steplab

    return steplab.UserModel(PatientForDiagnosis(config), batches, loss_of, optimizer=adamw)


def faulty():
    return build(Config(output_attentions=True))


def clean():
    return build(Config())
