"""A Qwen2 learns to answer with one word at the end of a prompt. The loss takes the logits of the
last position, but the model computes those of all 512: the head multiplies every token of the
prompt by the whole vocabulary, and the backward does so twice more, with zeros.
A good finding names the logits or the head's products that are not needed, and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 16,
    "CPU_BATCH": 4,
    "CAUSE": "the head computes the logits of all positions, of which the loss uses the last one",
    "FIX": "model(ids, logits_to_keep=1)",
}
TIME, VOCAB = by_device(512, 64), by_device(128256, 8192)
WIDTH, LAYERS = by_device(1024, 128), by_device(8, 2)


def qwen():
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=WIDTH * 11 // 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH // 64,
        num_key_value_heads=WIDTH // 64,
        max_position_embeddings=TIME,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device(device()):
        return Qwen2ForCausalLM(config)


def answer_from_all(model, ids):
    return model(ids).logits[:, -1]  # guilty


def answer_from_last(model, ids):
    return model(ids, logits_to_keep=1).logits[:, -1]


def build(answer):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randint(VOCAB, (size, TIME), device=device()),
                torch.randint(VOCAB, (size,), device=device()),
            )
        )

    def loss(model, batch):
        ids, word = batch
        with mixed():
            return F.cross_entropy(answer(model, ids), word)

    return steplab.UserModel(qwen(), batches, loss, unit="sequences")


def faulty():
    return build(answer_from_all)


def clean():
    return build(answer_from_last)
