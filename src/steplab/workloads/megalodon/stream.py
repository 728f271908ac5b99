"""A stream of tokens through the model: any number of them, in a fixed amount of memory."""

# B rows, T new tokens, V vocabulary
from __future__ import annotations

import torch
from torch import Tensor

from steplab.workloads.megalodon.model import Megalodon


class Stream:
    """Call it with new tokens (B, T); it returns the logits (B, V) after the last of them.

    On a GPU the step of a single token is captured as a CUDA graph at its second time: one launch
    instead of some hundreds. Weights must stay where they are; their values may change. Under
    autocast every token casts all weights: a model cast to bf16 beforehand is faster.
    """

    def __init__(self, model: Megalodon, rows: int, graphs: bool = True) -> None:
        self.model, self.cache = model, model.empty_cache(rows)
        self.graphs = graphs and next(model.parameters()).is_cuda
        self.graph: torch.cuda.CUDAGraph | None = None
        self.singles = 0
        self.token_B1 = torch.zeros(rows, 1, dtype=torch.int64, device=self.device)
        self.logits_BV: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def tokens(self) -> int:
        """How many tokens each row has seen."""
        return self.cache.position.tokens

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        """Go on with new tokens; the result is the caller's own."""
        if tokens_BT.shape[1] == 1 and self.graphs:
            logits_BV = self._one(tokens_BT)
        else:
            logits_BV = self.model.extend(tokens_BT, self.cache)
        self.cache.position.tokens += tokens_BT.shape[1]
        return logits_BV

    @torch.no_grad()
    def _one(self, token_B1: Tensor) -> Tensor:
        self.cache.check(token_B1)  # a copy would give one row's token to all
        self.token_B1.copy_(token_B1)
        if self.graph is None:
            self.singles += 1
            if self.singles == 1:
                return self.model.extend(self.token_B1, self.cache)
            self._capture()
        assert self.graph is not None and self.logits_BV is not None
        self.graph.replay()
        return self.logits_BV.clone()

    def _capture(self) -> None:
        """Record one step. The cache is left as it was: a warm-up on its own stream moves it."""
        kept = [x.clone() for x in self.cache.tensors]
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        # Weights that autocast has cast once are freed with its context; the graph casts its own.
        enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        alone = torch.autocast("cuda", dtype, enabled, cache_enabled=False)
        # Other threads may use the device meanwhile.
        recording = torch.cuda.graph(graph, capture_error_mode="thread_local")
        try:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.model.extend(self.token_B1, self.cache)
            torch.cuda.current_stream().wait_stream(side)
            with alone, recording:
                self.logits_BV = self.model.extend(self.token_B1, self.cache)
            self.graph = graph
        finally:
            for own, old in zip(self.cache.tensors, kept, strict=True):
                own.copy_(old)
