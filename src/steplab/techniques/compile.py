"""torch.compile over each repeated block, the whole model, or the model with its loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from steplab.core import Run, Setting, Settings, units
from steplab.core.codec import decode
from steplab.core.errors import Unsupported, UserError
from steplab.techniques.context import StepContext, Suggestion
from steplab.techniques.technique import Stage, StepParts, Technique

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class CompileSettings:
    """`blocks` compiles one block and reuses its graph for all; `whole` sees across blocks.

    `loss` compiles model and loss together, so that logits need not leave the graph.
    """

    scope: Literal["blocks", "whole", "loss"] = "blocks"
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        "default"
    )
    fullgraph: bool = True
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    optimizer: bool = False  # compile the optimizer's step too, apart from the model
    auto_chunker: bool = False  # Inductor computes head and loss, or the like, chunk by chunk


GRAPH_BREAK_REMEDY = "steplab lint names the line; compile.fullgraph=false compiles around it"
# What Dynamo raises where it may not cut a graph: begins the reason of a Run that failed.
GRAPH_BREAKS = ("Unsupported: ", "UserError: ", "FailOnRecompileLimitHit: ")
GRAPH_MODES = ("reduce-overhead", "max-autotune")
WITH_LOSS = ("loss", "whole")  # scopes in whose graph a loss may be
# Inductor's own threshold, 8, leaves out the head of a Llama of 1B parameters (7.1).
OUTPUT_OVER_INPUT = 4
# What chunks can save: passes over logits that fit the cache, and the logits themselves.
CHUNKED = {"kind:softmax": 0.5, "kind:elementwise": 0.3, "memory:activations": 0.8}
# Timing kernels for every product took more than 136 s of gpt xl's blocks on an H200, where the
# default needed 25 s with all that a gate asks.
AUTOTUNE_EFFORT = 6.0
# Work that a compiler puts into one kernel with its neighbors, or does away with: on a CPU the
# operators of no category are views, allocations and the like.
FUSIBLE = (
    *("elementwise", "normalization", "softmax", "reduction", "copy", "memset", "embedding"),
    "other",
)


class Compile(Technique):
    """Shapes are static (`dynamic=False`): a step's shapes do not change."""

    stage = Stage.COMPILE
    settings: ClassVar[type] = CompileSettings
    replaces = ("torch.compile",)
    slow_start = True

    def check(self, settings: Mapping[str, Setting], name: str) -> None:
        """Modes and chunks belong to inductor."""
        super().check(settings, name)
        backend, chunks = settings.get("backend", "inductor"), settings.get("auto_chunker", False)
        if backend != "inductor" and settings.get("mode", "default") != "default":
            raise UserError(
                f"compile.mode={settings['mode']} has no meaning for the backend {backend}.",
                "Leave the mode or the backend out.",
            )
        if chunks and backend != "inductor":
            raise UserError("compile.auto_chunker is Inductor's.", "Leave the backend out.")
        if chunks and settings.get("scope", "blocks") not in WITH_LOSS:
            raise UserError(
                "compile.auto_chunker needs head and loss in one graph, and the graphs of blocks "
                "have neither.",
                "Use compile=loss.",
            )

    def apply(self, parts: StepParts, settings: Mapping[str, Setting]) -> None:
        """Compile in place; names of parameters stay as they are."""
        import torch
        import torch._dynamo

        chosen: CompileSettings = decode(CompileSettings, dict(settings), "compile")
        if chosen.mode == "reduce-overhead" and parts.device.type != "cuda":
            raise Unsupported(
                "compile.mode=reduce-overhead is CUDA graphs, which need a CUDA GPU.",
                "Use compile.mode=default.",
            )
        from steplab.substitute.backend import name_operators_only

        name_operators_only()
        targets = repeated_blocks(parts.model) if chosen.scope == "blocks" else [parts.model]
        options: dict[str, Any] = {"fullgraph": chosen.fullgraph, "dynamic": False}
        chunking = chunker_options() if chosen.auto_chunker else {}
        if parts.substituting is not None:
            options["backend"] = parts.substituting.before(chosen.backend, chosen.mode, chunking)
        else:
            options["backend"] = chosen.backend
            if chunking:  # torch takes a mode or options
                modes: dict[str, Any] = torch._inductor.list_mode_options(chosen.mode)
                options["options"] = {**modes, **chunking}
            elif chosen.backend == "inductor":
                options["mode"] = chosen.mode
        # Blocks may be all different, and the first one's input needs no gradient: dynamo counts
        # graphs by the function that is compiled, and stops at 8.
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, 2 * len(targets))
        if chosen.scope == "loss":
            parts.wrap_forward = lambda call: torch.compile(call, **options)
        else:
            for module in targets:
                compile_module(module, **options)
        if chosen.optimizer:
            parts.wrap_optimizer_step = lambda step: torch.compile(step, backend=chosen.backend)
        # The first step compiles forward and backward; the second shows whether it was enough.
        parts.settle_steps = 2
        parts.is_compiled = True

    def suggest(self, context: StepContext, current: Settings) -> list[Suggestion]:
        """Suggest each scope; then the update too, autotuned matmuls and CUDA graphs."""
        # Fewer kernels: fewer launches, and in a replayed graph fewer gaps between them.
        fused = {"term:launch": 1.0, "term:dispatch": 1.0, "memory:activations": 1.0}
        fused |= {f"kind:{kind}": 1.0 for kind in FUSIBLE}
        # A built-in model computes its loss inside; another one's logits leave the graph of the
        # model, but not the graph of the loss.
        widest = "loss" if context.run.spec.source else "whole"
        if not current:
            priors = {"blocks": 1.0, widest: 0.5}  # equal blocks compile once and gain as much
            failed = {scope: context.failed.get(f"compile={scope}", "") for scope in priors}
            # What a graph break has stopped can be compiled in pieces, of which the largest is the
            # model where only its loss breaks. What the compiler cannot do may be in the loss.
            broken = [scope for scope in priors if failed[scope].startswith(GRAPH_BREAKS)]
            if failed.get("loss") and "loss" not in broken:
                priors["whole"] = 0.5
            offers = [(scope, prior) for scope, prior in priors.items() if scope not in broken]
            found = [Suggestion({"scope": scope}, fused, prior) for scope, prior in offers]
            for scope in broken:
                found.append(Suggestion({"scope": scope, "fullgraph": False}, fused, prior=0.5))
            return found
        found = []
        if current["scope"] not in ("loss", widest):
            found.append(Suggestion({**current, "scope": widest}, fused, prior=0.5))
        # A loss that was substituted is computed in chunks already.
        chunked = current.get("auto_chunker") or _has_chunked_loss(context.run)
        trains = context.run.spec.mode in ("forward+backward", "full")
        if current["scope"] in WITH_LOSS and trains and not chunked:
            found.append(Suggestion({**current, "auto_chunker": True}, CHUNKED, prior=0.5))
        if context.run.spec.mode == "full" and not current.get("optimizer"):
            found.append(Suggestion({**current, "optimizer": True}, {"phase:optimizer": 1.0}))
        if context.on_cuda and current.get("mode", "default") == "default":
            tuned = {**current, "mode": "max-autotune-no-cudagraphs"}
            found.append(Suggestion(tuned, {"lost:matmul": 1.0}, effort=AUTOTUNE_EFFORT))
            found.append(Suggestion({**current, "mode": "reduce-overhead"}, {"term:launch": 1.0}))
        return found

    def remedy(self, run: Run) -> str:
        """Tell a graph break, which stops it, from recompiling and pieces, which make it slow."""
        if run.status == "failed":
            return GRAPH_BREAK_REMEDY if run.reason.startswith(GRAPH_BREAKS) else ""
        seen = run.compilation
        if run.status != "ok" or seen is None:
            return ""
        if seen.recompiles:
            return f"recompiled {len(seen.recompiles)} times ({seen.recompiles[-1].reason})"
        if seen.breaks:
            breaks = units.counted(sum(seen.breaks.values()), "graph break")
            return f"{breaks}: steplab lint names the lines"
        return "nothing recompiles: there is little to fuse, or the step waits for something else"

    def mismatch(self, settings: Mapping[str, Setting], run: Run) -> str:
        """Something must have been compiled, and CUDA graphs replayed where the mode has them."""
        if run.compilation is None or not run.compilation.graphs:
            return "compile was asked for, but nothing was compiled"
        if settings.get("auto_chunker") and not run.compilation.chunked:
            return (
                "compile.auto_chunker was asked for, but Inductor cut nothing into chunks: no "
                f"product's output is {OUTPUT_OVER_INPUT} times its inputs and has a million "
                "numbers, or it could not follow what is computed from it"
            )
        mode = settings.get("mode", "default")
        if mode not in GRAPH_MODES or run.spec.device != "cuda" or run.ran is None:
            return ""
        if run.compilation.cudagraph_skips or not run.ran.graph_launches:
            skips = run.compilation.cudagraph_skips
            return f"compile.mode={mode} was asked for, but CUDA graphs were skipped {skips} times"
        return ""


def _has_chunked_loss(run: Run) -> bool:
    return any(one.rewrite == "loss" and one.what for one in run.substitutions)


def chunker_options() -> dict[str, Any]:
    """Return the options of Inductor with which it looks for large outputs to cut into chunks.

    A graph that AOTAutograd takes out of its cache passes the chunker by, and is not counted: the
    cache is off until the next step is assembled.
    """
    import torch._functorch.config
    import torch._inductor.config

    if not hasattr(torch._inductor.config, "auto_chunker"):
        raise Unsupported(
            f"compile.auto_chunker: torch {torch.__version__} has no auto_chunker.",
            "Leave it out, or use substitute=loss.",
        )
    torch._functorch.config.enable_autograd_cache = False
    threshold = {"auto_chunker.amplify_ratio_threshold": OUTPUT_OVER_INPUT}
    return {"auto_chunker.enable": True, **threshold}


def compile_module(module: nn.Module, **options: Any) -> None:
    """Compile a module in place, also one of torch's own classes.

    Dynamo traces no frame of torch's own files, so `nn.Sequential(...).compile()` compiles nothing
    (torch 2.11 is silent about it). A function of another file is traced, and all that it calls.
    """
    import torch

    def torchs_module(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    # Generated ones (fx) name no file, and those of torch.jit refuse in their own words.
    file = type(module).forward.__module__ or ""
    if file.startswith("torch.") and not isinstance(module, torch.jit.ScriptModule):
        module._compiled_call_impl = torch.compile(torchs_module, **options)
    else:
        module.compile(**options)


def repeated_blocks(model: nn.Module, instead: str = "Use compile=whole.") -> list[nn.Module]:
    """Return the repeated blocks; without any, `instead` is suggested."""
    found = find_blocks(model)
    if not found:
        raise Unsupported(
            "This model has no nn.ModuleList of two or more modules of one class.", instead
        )
    return found


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the members of every ModuleList whose members are of one class, outermost first."""
    from torch import nn

    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or module in inside:
            continue
        blocks = [child for child in module if child is not None]  # a list may hold a None
        kinds = {type(block) for block in blocks}
        # A list of lists has nothing to call: its model takes the lists apart.
        if len(blocks) >= 2 and len(kinds) == 1 and not kinds & {nn.ModuleList, nn.ModuleDict}:
            found.extend(blocks)
            inside.update(m for block in blocks for m in block.modules())
    return found


TECHNIQUE = Compile()
