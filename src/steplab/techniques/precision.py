"""Precision of the matrix products: fp32, tf32, autocast to bf16 or fp16, bf16 weights, fp8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from steplab.core import Run, Setting, Settings
from steplab.core.errors import Unsupported
from steplab.costs.fp8 import saved_share
from steplab.hardware.kernel_names import matmul_dtypes
from steplab.techniques.context import Savings, StepContext, Suggestion
from steplab.techniques.technique import Stage, StepParts, Technique

TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16"}
BF16_WEIGHTS = "bf16-weights"
FP8 = "fp8"  # changes what is computed: `tune` tries it where it is allowed by name
FP8_BF16_WEIGHTS = "fp8-bf16-weights"
WITH_BF16_WEIGHTS = (BF16_WEIGHTS, FP8_BF16_WEIGHTS)
MASTER_WEIGHT_OPTIMIZER = "one-pass"  # the optimizer that keeps fp32 weights beside 16-bit ones
# Work that moves numbers more than it multiplies them: half the bytes, half the time.
MEMORY_BOUND = ("elementwise", "normalization", "softmax", "reduction", "copy", "embedding")


@dataclass(frozen=True)
class PrecisionSettings:
    """`fp32`: no TF32. `tf32`: fp32 storage, 10-bit products. `bf16`, `fp16`: autocast.

    `bf16-weights`: weights in bf16 too (but those of batch norm), so nothing is cast; the optimizer
    keeps them in fp32 as well, and gradients add up in bf16. Autocast stays on for what it computes
    in fp32: losses, softmax, the statistics of norms.

    `fp8`: as `bf16`, and the `nn.Linear`s that gain by it and the networks of a mixture multiply in
    fp8 (`modules/fp8.py`). `fp8-bf16-weights`: the same, over `bf16-weights`.

    `sums`: in what cuBLAS adds the partial sums of a bf16 product whose long axis it splits over
    thread blocks. torch's own choice is bf16, which is faster and rounds once more.
    """

    dtype: Literal["fp32", "tf32", "bf16", "fp16", "bf16-weights", "fp8", "fp8-bf16-weights"] = (
        "fp32"
    )
    sums: Literal["bf16", "fp32"] = "bf16"


class Precision(Technique):
    """Most leave the weights in fp32; fp16 adds a scaler against underflow."""

    stage = Stage.PRECISION
    settings: ClassVar[type] = PrecisionSettings
    replaces = ("torch.autocast", "GradScaler")

    def apply(self, parts: StepParts, settings: Mapping[str, Setting]) -> None:
        """Set the global matmul precision or the forward's autocast context, or round weights."""
        import torch

        from steplab.modules.precision import batch_norm_parameters, round_bf16_sums

        dtype = str(settings["dtype"])
        parts.matmul_dtype = product_dtype(dtype)
        if "sums" in settings:
            if parts.device.type != "cuda":
                raise Unsupported(
                    "precision.sums is a setting of cuBLAS, which a CPU does not use.",
                    "Leave it out.",
                )
            round_bf16_sums(settings["sums"] == "bf16")
        if dtype in WITH_BF16_WEIGHTS:
            # Norms' weights and biases too: one of them in fp32 would widen the whole stream. Not
            # those of batch norm: its op wants them in the dtype of the running statistics, which
            # are fp32, and returns the dtype of its input all the same.
            kept = batch_norm_parameters(parts.model)
            for parameter in parts.model.parameters():
                if parameter.dtype == torch.float32 and parameter not in kept:
                    parts.master_weights[parameter] = parameter.detach()
                    parameter.data = parameter.data.bfloat16()
        if dtype == "tf32":
            if parts.device.type != "cuda" or torch.cuda.get_device_capability() < (8, 0):
                raise Unsupported(
                    "tf32 needs an NVIDIA GPU of compute capability 8.0 or newer.",
                    "Use precision=fp32 or precision=bf16.",
                )
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True  # convolutions and recurrent layers
        if parts.matmul_dtype == FP8:
            self._to_fp8(parts)
        around = "bf16" if parts.matmul_dtype == FP8 else parts.matmul_dtype
        if around in TORCH_NAMES:
            kind = parts.device.type
            half = getattr(torch, TORCH_NAMES[around])
            parts.forward_context = lambda: torch.autocast(kind, dtype=half)
        if dtype == "fp16":
            parts.scaler = torch.amp.GradScaler(parts.device.type)

    def _to_fp8(self, parts: StepParts) -> None:
        """Convert the layers that gain by fp8, and note what became of each."""
        from steplab.modules import fp8

        fp8.refuse_device(parts.device)
        parts.fp8_linears = fp8.plan_layers(parts.model, parts.device, parts.tokens)
        chosen = [name for name, reason in parts.fp8_linears.items() if reason == fp8.PAYS]
        if not chosen:
            why = fp8.main_reason(parts.model, parts.fp8_linears)
            raise Unsupported(
                f"No layer of this model would gain by fp8 ({why}).", "Use precision=bf16."
            )
        fp8.convert_layers(parts.model, chosen)

    def conflict(self, settings: Mapping[str, Setting], recipe: Mapping[str, Settings]) -> str:
        """bf16 weights need an optimizer that keeps them in fp32 too; none of torch's does."""
        if product_dtype(str(settings["dtype"])) == FP8 and "parallel" in recipe:
            return "fp8 has been tried on one rank only"
        if "sums" in settings and product_dtype(str(settings["dtype"])) != "bf16":
            return f"sums are those of bf16 products, and the products are {settings['dtype']}"
        asked = recipe.get("optimizer", {}).get("impl", MASTER_WEIGHT_OPTIMIZER)
        if settings["dtype"] in WITH_BF16_WEIGHTS and asked != MASTER_WEIGHT_OPTIMIZER:
            needed = f"optimizer={MASTER_WEIGHT_OPTIMIZER}"
            return f"{settings['dtype']} needs {needed}, which keeps the weights in fp32 too"
        return ""

    def suggest(self, context: StepContext, current: Settings) -> list[Suggestion]:
        """Suggest fewer bits than now; bf16 rather than fp16, which needs a scaler.

        bf16 weights require the optimizer that keeps them in fp32 too. fp8 follows bf16.
        """
        ladder = ("fp32", "tf32", "bf16", BF16_WEIGHTS) if context.on_cuda else ("fp32", "bf16")
        present = str(current.get("dtype", "fp32"))
        fewer = ladder[ladder.index(present) + 1 :] if present in ladder else ()
        updates = context.run.spec.mode == "full"
        keeper: dict[str, Settings] = {"optimizer": {"impl": MASTER_WEIGHT_OPTIMIZER}}
        has_keeper = context.recipe.techniques.get("optimizer") == keeper["optimizer"]
        found = []
        refusal = ""
        if not context.on_cuda and context.run.environment.cpu_bf16 is False:
            refusal = "this CPU has no bf16 instructions: products would be emulated"
        for dtype in reversed(fewer):
            savings = _savings(dtype, present, context)
            if dtype == BF16_WEIGHTS and updates and not has_keeper:
                savings = {**savings, "phase:optimizer": 1.0}
                found.append(Suggestion({"dtype": dtype}, savings, requires=keeper))
            else:
                found.append(Suggestion({"dtype": dtype}, savings, refusal=refusal))
        return found + self._suggest_fp8(context, present)

    def _suggest_fp8(self, context: StepContext, present: str) -> list[Suggestion]:
        """Name fp8 as what it is; it is tried where that was allowed.

        Which layers gain is known when the model is there: at most all bf16 products do.
        """
        dtype = {"bf16": FP8, BF16_WEIGHTS: FP8_BF16_WEIGHTS}.get(present)
        is_allowed = FP8 in context.allowed
        if dtype is None or not (context.on_cuda or is_allowed):
            return []
        refusal = ""
        if not context.on_cuda:
            refusal = "a CPU has no fp8 products"
        elif context.card is not None and not context.card.peak(FP8):
            refusal = f"{context.card.name} has no fp8 products"
        elif not is_allowed:
            refusal = f"rounds the factors of products to 8 bits, so only with --allow {FP8}"
        saved = saved_share(context.card)
        least = f"{1 - saved:.0%}".replace("%", " %")
        reason = f"products in fp8 take {least} of their time in bf16 at best"
        savings = {"kind:matmul bf16": saved}
        return [Suggestion({"dtype": dtype}, savings, refusal=refusal, reason=reason)]

    def mismatch(self, settings: Mapping[str, Setting], run: Run) -> str:
        """Most matrix products must have run in the dtype, by the ops or kernels in the trace."""
        asked, seen = product_dtype(str(settings["dtype"])), matmul_dtypes(run.ran)
        # Beside fp8, attention and the layers that do not gain multiply in bf16.
        least = 0.0 if asked == FP8 else 0.5 * sum(seen.values())
        if seen and seen.get(asked, 0) <= least:
            shown = ", ".join(f"{n} x {dtype}" for dtype, n in seen.items())
            return f"precision {asked} was asked for, but the matrix products ran as {shown}"
        sums = run.ran.bf16_sums if run.ran else None
        if sums and settings.get("sums", sums) != sums:
            return f"partial sums in {settings['sums']} were asked for, but they were in {sums}"
        wanted = {"tf32": "high", "fp32": "highest"}.get(asked)
        if run.ran and wanted and run.ran.matmul_precision != wanted:
            found = run.ran.matmul_precision
            return f"{asked} was asked for, but matmul precision was {found!r}"
        return ""

    def unverified(self, settings: Mapping[str, Setting], run: Run) -> str:
        """Replayed graphs and generated kernels do not always show their dtype."""
        if matmul_dtypes(run.ran):
            return ""
        return (
            f"unverified: no matrix product in the trace shows a dtype ({settings['dtype']} asked)"
        )


def product_dtype(dtype: str) -> str:
    """Return the dtype in which a setting multiplies matrices: fp32, tf32, bf16, fp16 or fp8."""
    return {BF16_WEIGHTS: "bf16", FP8_BF16_WEIGHTS: FP8}.get(dtype, dtype)


def _savings(setting: str, present: str, context: StepContext) -> Savings:
    """Products gain by the ratio of the peaks, where the card is known; 16 bits halve the bytes."""
    dtype = product_dtype(setting)
    if product_dtype(present) == dtype:  # the products stay as they are, the stream gets narrow
        return {f"kind:{kind}": 0.5 for kind in MEMORY_BOUND}
    before, after = (context.card.peak(d) if context.card else None for d in ("fp32", dtype))
    share = 1 - before / after if before and after else 1.0
    savings = {"kind:matmul fp32": share, "kind:matmul other": share}
    if dtype in TORCH_NAMES:
        savings |= {"kind:attention": share, "kind:matmul tf32": 0.5}
        savings |= {f"kind:{kind}": 0.5 for kind in MEMORY_BOUND} | {"memory:activations": 0.5}
    return savings


TECHNIQUE = Precision()
