"""What `substitute` replaced in the compiled graphs, and what it left alone."""

from __future__ import annotations

from steplab.core.run import Substitution
from steplab.probes.probe import Probe, Subject


class SubstitutionsProbe(Probe):
    """Empty where the recipe substitutes nothing."""

    found: tuple[Substitution, ...] = ()

    def close_window(self, subject: Subject) -> None:
        """Read what stands in the graphs that were timed."""
        substituting = subject.step.parts.substituting
        if substituting is not None:
            self.found = substituting.found

    def result(self) -> tuple[Substitution, ...]:
        """Return every place that was looked at."""
        return self.found


PROBE = SubstitutionsProbe
