"""Images with the channels of a pixel side by side in memory, as fast convolutions want them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from steplab.core import Run, Setting, Settings
from steplab.core.errors import Unsupported
from steplab.techniques.context import StepContext, Suggestion
from steplab.techniques.technique import Stage, StepParts, Technique

CHANNELS_LAST = "channels_last"
CONTIGUOUS = "contiguous"


@dataclass(frozen=True)
class MemoryFormatSettings:
    """`channels_last`: NHWC in memory, and NDHWC for volumes; shapes stay as they are."""

    layout: Literal["channels_last"] = "channels_last"


class MemoryFormat(Technique):
    """The weights of convolutions are laid out so, and their outputs follow by torch's own rules.

    Shapes, values and names stay as they are. Batches may come as they like: the first convolution
    lays them out.
    """

    stage = Stage.MEMORY
    settings: ClassVar[type] = MemoryFormatSettings

    def apply(self, parts: StepParts, settings: Mapping[str, Setting]) -> None:
        """Lay out the weights; a model without convolutions over images is refused."""
        import torch
        from torch import nn

        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        kinds = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        found = [module for module in parts.model.modules() if isinstance(module, kinds)]
        if not found:
            raise Unsupported(
                "memory_format=channels_last is for convolutions over images, and this model has "
                "no Conv2d or Conv3d.",
                "Leave memory_format out.",
            )
        for module in found:
            weight = module.weight
            weight.data = weight.data.contiguous(memory_format=formats[weight.dim()])

    def suggest(self, context: StepContext, current: Settings) -> list[Suggestion]:
        """Suggested where most products are convolutions on channels that are apart.

        A vision transformer has one, for its patches, and would gain nothing.
        """
        ran = context.run.ran
        if current or ran is None:
            return []
        products = sum(ran.matmul_dtypes.values())  # forward and backward; of a convolution three
        if not 3 * ran.conv_layouts.get(CONTIGUOUS, 0) > products:
            return []
        savings = {"kind:matmul": 0.5, "kind:normalization": 0.5, "kind:copy": 1.0}
        return [Suggestion({"layout": CHANNELS_LAST}, savings)]

    def mismatch(self, settings: Mapping[str, Setting], run: Run) -> str:
        """Every convolution must have had its input or its weight in that layout."""
        layouts = run.ran.conv_layouts if run.ran else {}
        apart = layouts.get(CONTIGUOUS, 0)
        if apart:
            return f"channels_last was asked for, but {apart} of {sum(layouts.values())} " + (
                "convolutions ran on channels that are apart"
            )
        return ""

    def unverified(self, settings: Mapping[str, Setting], run: Run) -> str:
        """Generated kernels and replayed graphs may show no convolution."""
        if run.ran and run.ran.conv_layouts:
            return ""
        return "unverified: no convolution in the trace shows its layout"


TECHNIQUE = MemoryFormat()
