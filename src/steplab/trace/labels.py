"""Labels: the texts that the columns of Work count in."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import ArrayLike

from steplab.trace.analysis import UNATTRIBUTED
from steplab.trace.events import Codes, Trace


class Labels:
    """A growing list of texts without repetition; number 0 is UNATTRIBUTED."""

    def __init__(self) -> None:
        self._codes = {UNATTRIBUTED: 0}

    def code(self, text: str) -> int:
        """Number of `text`, a new one if need be."""
        return self._codes.setdefault(text, len(self._codes))

    def codes(self, texts: Iterable[str]) -> Codes:
        """Numbers of several texts."""
        return np.array([self.code(text) for text in texts], np.int32)

    def texts(self) -> tuple[str, ...]:
        """All texts so far, in the order of their numbers."""
        return tuple(self._codes)

    def translated(self, trace: Trace, codes: ArrayLike, name: Callable[[str], str] = str) -> Codes:
        """Turn numbers of `Trace.texts` into labels, each text through `name`; -1 becomes 0."""
        distinct, where = np.unique(np.asarray(codes), return_inverse=True)
        labels = [self.code(name(trace.texts[c])) if c >= 0 else 0 for c in distinct.tolist()]
        return np.array(labels, np.int32)[where.ravel()]
