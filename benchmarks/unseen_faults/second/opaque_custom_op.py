"""Compiled blocks whose gated activation is registered as an operator of its own."""

import steplab
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import TINY, adamw, my_turn, next_token_loss, pick, token_batches

FAULT = {
    "NAME": "opaque_custom_op",
    "CAUSE": "The gated activation is wrapped as a custom operator, which the compiler cannot look into: it runs as a chain of eager kernels in fp32, and nothing is fused with it.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Call the plain function; the compiler turns it and its backward into one kernel each.",
    "STYLE": "factory",
    "BATCH": 12,
    "WHY": "Inside the compiled block the custom operator is opaque, so its casts, sigmoid and products are separate eager kernels over tokens x 3072; without the wrapper they are fused.",
    "GAIN_MS": None,
}
WIDTH, LAYERS, HEADS, INNER = pick(1024, 32), pick(6, 1), pick(16, 2), pick(3072, 64)
CONTEXT, VOCAB = pick(1024, 16), pick(8192, 64)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


@torch.library.custom_op("unseen::gated", mutates_args=())
def gated_op(gate: Tensor, up: Tensor) -> Tensor:
    return gated(gate, up)


@torch.library.custom_op("unseen::gated_backward", mutates_args=())
def gated_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad, wide, up32 = grad.float(), gate.float(), up.float()
    sigmoid = wide.sigmoid()
    of_gate = grad * up32 * sigmoid * (1 + wide * (1 - sigmoid))
    return of_gate.to(gate.dtype), (grad * wide * sigmoid).to(up.dtype)


@gated_op.register_fake
def _(gate, up):
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@gated_backward.register_fake
def _(grad, gate, up):
    plain = torch.contiguous_format
    return torch.empty_like(gate, memory_format=plain), torch.empty_like(up, memory_format=plain)


gated_op.register_autograd(
    lambda ctx, grad: gated_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Layer(nn.Module):
    def __init__(self, opaque):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.opaque = opaque

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        y = self.norm2(x)
        if self.opaque:
            y = gated_op(self.gate(y), self.up(y))  # FAULT
        else:
            y = gated(self.gate(y), self.up(y))
        return x + self.down(y)


class Decoder(nn.Module):
    def __init__(self, opaque):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer(opaque) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make(opaque):
    torch.manual_seed(0)
    model = Decoder(opaque)
    for layer in model.layers:
        layer.compile(backend="aot_eager" if TINY else "inductor")
    my_turn()
    return steplab.UserModel(
        model=model,
        batches=token_batches(VOCAB, CONTEXT),
        loss=next_token_loss,
        optimizer=adamw,
    )


def faulty():
    return make(opaque=True)


def clean():
    return make(opaque=False)
