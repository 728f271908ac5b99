"""A language model for legal texts is trained on packed rows of full length. The collator still
returns an attention_mask of ones for each batch, and the model does what such models do with it:
it makes a causal mask (batch, 1, time, time) of floats and hands it to every attention, which can
then neither skip the upper half nor take the fastest kernel. Nothing is padded: is_causal will do.
A good finding names the attention that is given a mask that says no more than is_causal and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "attention gets a dense causal mask made of an attention_mask that is all ones",
    "FIX": "leave the attention_mask out for packed rows and call attention with is_causal=True",
}
BATCH, CONTEXT = by_device(4, 1), by_device(4096, 768)
WIDTH, HEADS, LAYERS = by_device(768, 32), by_device(12, 2), by_device(4, 2)
VOCAB = by_device(16_384, 256)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden_states, attention_mask):
        b, t, _ = hidden_states.shape
        q, k, v = self.qkv_proj(hidden_states).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if attention_mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            attention_mask = attention_mask.to(q.dtype)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)  # guilty
        return self.o_proj(y.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_norm, self.post_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.self_attn = Attention()
        self.up_proj = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down_proj = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden_states, attention_mask):
        x = hidden_states
        x = x + self.self_attn(self.input_norm(x), attention_mask)
        return x + self.down_proj(F.silu(self.up_proj(self.post_norm(x))))


def causal_mask(attention_mask, dtype):
    """Return (batch, 1, time, time) with the lowest number where a token must not look."""
    lowest = torch.finfo(dtype).min
    time = attention_mask.shape[1]
    causal = torch.full((time, time), lowest, dtype=dtype, device=attention_mask.device).triu(1)
    return causal[None, None].masked_fill(attention_mask[:, None, None] == 0, lowest)


class LegalForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.embed_positions = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids, labels, attention_mask=None):
        hidden_states = self.embed_tokens(input_ids) + self.embed_positions.weight
        if attention_mask is not None:
            attention_mask = causal_mask(attention_mask, hidden_states.dtype)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask)
        logits = self.lm_head(self.norm(hidden_states))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(with_mask):
    model = LegalForCausalLM().to(device())
    optimizer = adamw(model)

    def collate():
        ids = torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device())
        batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()}
        if with_mask:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        return batch

    data = in_turn(collate)

    def step():
        with mixed():
            loss = model(**next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(with_mask=True)


def clean():
    return build(with_mask=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
