"""Models that know nothing of steplab, as their authors would write them."""

# B batch, T tokens, D width, H heads, V vocabulary
import torch
import torch.nn.functional as F
from torch import Tensor, nn

V = 61  # prime, so that no other size is taken for it


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inner = nn.Linear(width, 3 * width)
        self.outer = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        parts = self.inner(x_BTD).split(D, dim=2)
        q, k, v = (p.view(B, T, self.heads, D // self.heads).transpose(1, 2) for p in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.outer(out.transpose(1, 2).contiguous().view(B, T, D))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.after = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.before(x_BTD))
        return x_BTD + self.down(F.gelu(self.up(self.after(x_BTD))))


class LanguageModel(nn.Module):
    """Learned positions, layer norms, a head that shares its weight with the embedding.

    Returns logits and loss, as many small trainers do.
    """

    def __init__(self, width: int = 24, heads: int = 2, layers: int = 2, context: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(V, width)
        self.places = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, V, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.words(tokens_BT) + self.places(places_T)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        logits_BTV = self.head(self.last(x_BTD))
        flat = logits_BTV.view(-1, logits_BTV.size(-1))
        return logits_BTV, F.cross_entropy(flat, targets_BT.view(-1), ignore_index=-1)


def language_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of `LanguageModel`."""
    return model(*batch)[1]


def language_batch(batch: int = 3, context: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, V, (batch, context + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, :3] = -1
    return tokens[:, :-1].contiguous(), targets
