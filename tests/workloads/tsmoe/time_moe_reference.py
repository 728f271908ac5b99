"""Time-MoE in plain torch, straight from its description: one token, one layer, one expert a time.

Takes the tensors of a file by their names there and the keys of its config.json, and knows nothing
of steplab.
"""

import torch
import torch.nn.functional as F


def norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def glu(x, w, name):
    gate, up, down = (w[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def rotate(x, theta):
    """(B, H, T, D): halves against each other; the table is rounded to fp32, as it is kept."""
    width = x.shape[-1]
    frequencies = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * torch.cat([frequencies] * 2)
    cos, sin = angles.cos().float().to(x.dtype), angles.sin().float().to(x.dtype)
    left, right = x[..., : width // 2], x[..., width // 2 :]
    return x * cos + torch.cat([-right, left], -1) * sin


def attend(x, w, name, heads, theta):
    def project(letter):
        out = x @ w[f"{name}.{letter}_proj.weight"].T + w[f"{name}.{letter}_proj.bias"]
        return out.unflatten(-1, (heads, -1)).transpose(1, 2)

    q, k, v = rotate(project("q"), theta), rotate(project("k"), theta), project("v")
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return mixed.transpose(1, 2).flatten(-2) @ w[f"{name}.o_proj.weight"].T


def mixture(x, w, name, chosen):
    """Return (output, router logits); the probabilities of the chosen ones are not renormalized."""
    logits = x @ w[f"{name}.gate.weight"].T
    probabilities, experts = logits.softmax(-1).topk(chosen, dim=-1)
    out = torch.sigmoid(x @ w[f"{name}.shared_expert_gate.weight"].T)
    out = out * glu(x, w, f"{name}.shared_expert")
    for place in range(x.shape[0]):
        for p, e in zip(probabilities[place], experts[place].tolist(), strict=True):
            out[place] = out[place] + p * glu(x[place], w, f"{name}.experts.{e}")
    return out, logits


def forward(w, config, values):
    """Return (a list of (B, T, horizon), the router logits of all layers)."""
    x = values[..., None]
    x = F.silu(x @ w["model.embed_layer.gate_layer.weight"].T) * (
        x @ w["model.embed_layer.emb_layer.weight"].T
    )
    routed = []
    for number in range(config["num_hidden_layers"]):
        name = f"model.layers.{number}"
        heads, theta = config["num_attention_heads"], config["rope_theta"]
        y = norm(x, w[f"{name}.input_layernorm.weight"])
        x = x + attend(y, w, f"{name}.self_attn", heads, theta)
        y = norm(x, w[f"{name}.post_attention_layernorm.weight"])
        out, logits = mixture(
            y.flatten(0, 1), w, f"{name}.ffn_layer", config["num_experts_per_tok"]
        )
        x = x + out.view_as(x)
        routed.append(logits)
    x = norm(x, w["model.norm.weight"])
    numbers = range(len(config["horizon_lengths"]))
    return [x @ w[f"lm_heads.{n}.out_layer.weight"].T for n in numbers], torch.cat(routed)


def loss(w, config, values, mask):
    """Mean over heads of the masked Huber loss, plus the balancing loss over all layers at once."""
    outputs, logits = forward(w, config, values[:, :-1])
    labels, known = values[:, 1:], mask[:, 1:].to(values.dtype)
    losses = []
    for horizon, out in zip(config["horizon_lengths"], outputs, strict=True):
        target = F.pad(labels, (0, horizon - 1)).unfold(-1, horizon, 1)
        counted = F.pad(known, (0, horizon - 1)).unfold(-1, horizon, 1)
        error = F.huber_loss(out, target, reduction="none", delta=2.0)
        losses.append((error * counted).sum() / counted.sum())
    probabilities = logits.softmax(-1)
    chosen = probabilities.topk(config["num_experts_per_tok"], dim=-1).indices
    share = F.one_hot(chosen, config["num_experts"]).to(values.dtype).mean(0)
    balance = config["num_experts"] * (share * probabilities.mean(0)).sum()
    return torch.stack(losses).mean() + config["router_aux_loss_factor"] * balance
