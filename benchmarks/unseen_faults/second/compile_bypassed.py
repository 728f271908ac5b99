"""An encoder for patches, compiled as a whole; its small operators are left to the compiler."""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import TINY, adamw, device, my_turn, pick

FAULT = {
    "NAME": "compile_bypassed",
    "CAUSE": "The model is wrapped by torch.compile, but the loss calls its method encode instead of the model: only forward is compiled, and any other method runs eagerly.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Call the compiled model itself (its forward), or compile the method: model.encode = torch.compile(model.encode).",
    "STYLE": "factory",
    "BATCH": 48,
    "WHY": "Not one compiled kernel runs: compiled.encode is the attribute of the original module, so norms, rotations and gates run as single eager kernels.",
    "GAIN_MS": None,
}
WIDTH, LAYERS, HEADS = pick(1024, 32), pick(4, 1), pick(16, 2)
CONTEXT, CLASSES = pick(256, 16), pick(1024, 8)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 6 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate.float()) * up.float())


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward, self.positions = nn.Linear(768, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, CLASSES)

    def encode(self, patches):
        x = self.inward(patches) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))

    def forward(self, patches):
        return self.encode(patches)


def batches(size):
    ready = [
        (
            torch.randn(size, CONTEXT, 768, device=device()),
            torch.randint(CLASSES, (size,), device=device()),
        )
        for _ in range(4)
    ]
    while True:
        yield from ready


def make(bypassed):
    torch.manual_seed(0)
    model = Encoder()
    compiled = torch.compile(model, backend="aot_eager" if TINY else "inductor")

    def loss(_, batch):
        patches, labels = batch
        with torch.autocast(patches.device.type, torch.bfloat16):
            if bypassed:
                logits = compiled.encode(patches)  # FAULT
            else:
                logits = compiled(patches)
            return F.cross_entropy(logits, labels)

    my_turn()
    return steplab.UserModel(model=model, batches=batches, loss=loss, optimizer=adamw)


def faulty():
    return make(bypassed=True)


def clean():
    return make(bypassed=False)
