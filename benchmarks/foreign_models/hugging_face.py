"""Six models of transformers, tiny, with random weights: nothing is downloaded.

Each factory is all that a user writes: a config, batches, and the loss that the model returns.
"""

from collections.abc import Iterator
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import steplab

WORDS = 1024


def bert(context: int = 64) -> steplab.UserModel:
    """BERT that fills in masked words; sequences of 16 to 64 words, padded."""
    config = hf.BertConfig(
        vocab_size=WORDS,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=context,
    )

    def batches(size: int) -> Iterator[dict[str, Tensor]]:
        random = torch.Generator().manual_seed(0)
        while True:
            words = torch.randint(5, WORDS, (size, context), generator=random)
            lengths = torch.randint(context // 4, context + 1, (size, 1), generator=random)
            real = torch.arange(context) < lengths
            hidden = (torch.rand(size, context, generator=random) < 0.15) & real
            hidden[:, 0] = True
            yield {
                "input_ids": words.masked_fill(hidden, 4).masked_fill(~real, 0),
                "attention_mask": real.long(),
                "labels": words.masked_fill(~hidden, -100),
            }

    return steplab.UserModel(hf.BertForMaskedLM(config), batches, _own_loss, context)


def t5(context: int = 64) -> steplab.UserModel:
    """T5, encoder and decoder of two layers each."""
    config = hf.T5Config(
        vocab_size=WORDS,
        d_model=128,
        d_kv=32,
        d_ff=512,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )

    def batches(size: int) -> Iterator[dict[str, Tensor]]:
        random = torch.Generator().manual_seed(0)
        while True:
            words = torch.randint(1, WORDS, (2, size, context), generator=random)
            yield {"input_ids": words[0], "labels": words[1]}

    model = hf.T5ForConditionalGeneration(config)
    return steplab.UserModel(model, batches, _own_loss, 2 * context)


def vit(pixels: int = 32) -> steplab.UserModel:
    """A vision transformer over patches of 8 x 8 pixels."""
    config = hf.ViTConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        image_size=pixels,
        patch_size=8,
        num_labels=10,
    )

    def batches(size: int) -> Iterator[dict[str, Tensor]]:
        random = torch.Generator().manual_seed(0)
        while True:
            images = torch.randn(size, 3, pixels, pixels, generator=random)
            labels = torch.randint(10, (size,), generator=random)
            yield {"pixel_values": images, "labels": labels}

    model = hf.ViTForImageClassification(config)
    return steplab.UserModel(model, batches, _own_loss, unit="images")


def llama(context: int = 64) -> steplab.UserModel:
    """Llama with grouped heads."""
    config = hf.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
    )
    return _language_model(hf.LlamaForCausalLM(config), context)


def qwen2_moe(context: int = 64) -> steplab.UserModel:
    """Qwen2-MoE: eight experts, two of them for each word, and one for all."""
    config = hf.Qwen2MoeConfig(
        vocab_size=WORDS,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=256,
        num_experts=8,
        num_experts_per_tok=2,
    )
    return _language_model(hf.Qwen2MoeForCausalLM(config), context)


def gpt2(context: int = 64) -> steplab.UserModel:
    """GPT-2 with the dropout of its config."""
    config = hf.GPT2Config(vocab_size=WORDS, n_positions=context, n_embd=128, n_layer=2, n_head=4)
    return _language_model(hf.GPT2LMHeadModel(config), context)


def _language_model(model: nn.Module, context: int) -> steplab.UserModel:
    def batches(size: int) -> Iterator[dict[str, Tensor]]:
        random = torch.Generator().manual_seed(0)
        while True:
            words = torch.randint(WORDS, (size, context), generator=random)
            yield {"input_ids": words, "labels": words}

    return steplab.UserModel(model, batches, _own_loss, context)


def _own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(**batch)
