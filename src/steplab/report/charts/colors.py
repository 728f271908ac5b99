"""One color per category of work and per term of the budget, the same on every page.

They are of medium lightness, so that each is visible on white and on near black.
"""

from __future__ import annotations

CATEGORIES = {
    "matmul fp32 simt": "#2f57bd",
    "matmul tf32": "#4269d0",
    "matmul bf16": "#5b83e6",
    "matmul fp16": "#7396ec",
    "matmul fp8": "#8eabf0",
    "matmul other": "#7f93c4",
    "attention flash": "#a463f2",
    "attention cudnn": "#b57df4",
    "attention efficient": "#8d52d9",
    "attention triton": "#c598f6",
    "attention other": "#9a7bb8",
    "normalization": "#3ca951",
    "softmax": "#52b9a1",
    "elementwise": "#e3a611",
    "reduction": "#d98324",
    "copy": "#9c6b4e",
    "memset": "#b98d74",
    "optimizer": "#f2664f",
    "embedding": "#ee7fae",
    "sort and index": "#cc5a93",
    "communication": "#d23c4f",
    "other": "#8f949d",
}
TERMS = {
    "kernels": "#4269d0",
    "communication": "#d23c4f",
    "copies": "#9c6b4e",
    "data wait": "#e3a611",
    "synchronization": "#f2664f",
    "launch": "#8f949d",
    "dispatch": "#b9bec7",
    "residual": "#d7dae0",
}
PHASES = {
    "data": "#e3a611",
    "forward": "#4269d0",
    "backward": "#a463f2",
    "clip": "#d98324",
    "optimizer": "#f2664f",
}
IDLE_TERMS = ("data wait", "synchronization", "launch", "dispatch", "residual")  # nothing ran


def category_class(name: str) -> str:
    """Return the class of a category; one that is not known looks like `other`."""
    return _class("c", name if name in CATEGORIES else "other")


def term_class(name: str) -> str:
    """Return the class of a term of the budget; terms in which nothing ran are hatched."""
    known = name if name in TERMS else "residual"
    return f"{_class('t', known)} idle" if known in IDLE_TERMS else _class("t", known)


def phase_class(name: str) -> str:
    """Return the class of a phase; a range that is no phase of a step is gray."""
    return _class("p", name) if name in PHASES else _class("c", "other")


def color_css() -> str:
    """Return the CSS of all classes, for shapes and for boxes."""
    groups = (("c", CATEGORIES), ("t", TERMS), ("p", PHASES))
    return "".join(
        f".{_class(letter, name)}{{--color:{color}}}"
        for letter, colors in groups
        for name, color in colors.items()
    )


def _class(letter: str, name: str) -> str:
    return f"{letter}-{name.replace(' ', '-')}"
