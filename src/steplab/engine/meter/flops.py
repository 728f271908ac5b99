"""FLOPs per token of a model nobody has described: six per weight of its matrix products."""

from __future__ import annotations

from torch import nn

TABLES = (nn.Embedding, nn.EmbeddingBag)  # looked up, not multiplied


def count_flops_per_token(model: nn.Module) -> tuple[float | None, str]:
    """Return (FLOPs of one token's forward and backward or None, the formula in words).

    Counts the 2-D parameters of all modules but embeddings, a shared one once; a head that is
    tied to the embedding is multiplied and so counts. What the formula leaves out or cannot know
    is said in its words.
    """
    owned = [
        parameter
        for module in model.modules()
        if not isinstance(module, TABLES)
        for parameter in module.parameters(recurse=False)
    ]
    distinct = list({id(parameter): parameter for parameter in owned}.values())
    matrices = [parameter for parameter in distinct if parameter.ndim == 2]
    weights = sum(parameter.numel() for parameter in matrices)
    frozen = sum(parameter.numel() for parameter in matrices if not parameter.requires_grad)
    higher = sum(parameter.numel() for parameter in distinct if parameter.ndim > 2)
    words = [f"6 x {weights:,} matmul parameters per token", "attention not counted"]
    if higher:
        words.append(f"{higher:,} weights of more than 2 dimensions not counted")
    if frozen:
        words.append(f"{frozen:,} frozen ones counted as trained")
    return (6.0 * weights or None), "; ".join(words)
