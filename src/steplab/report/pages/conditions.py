"""The conditions that every number of a page carries: the foot, and the figures at its head."""

from __future__ import annotations

from steplab import units
from steplab.record import Run
from steplab.report.pages.markup import Html, element, join


def run_title(run: Run) -> str:
    """What was measured, in one line."""
    spec = run.spec
    size = f" {spec.size}" if spec.size else ""
    return f"{spec.workload}{size}, batch {spec.batch}, {spec.mode}, {spec.recipe.label}"


def tiles(figures: dict[str, str]) -> Html:
    """Return a row of figures with their names: name -> value."""
    drawn = [
        element("div", element("b", value), element("span", name), class_="tile")
        for name, value in figures.items()
    ]
    return element("div", *drawn, class_="tiles")


def run_figures(run: Run) -> dict[str, str]:
    """Return what a reader looks for first; what is not known is left out."""
    figures = {}
    if run.clock is not None and run.clock.step.values:
        step = run.clock.step
        name = f"step, median of {len(step)} (spread {units.percent(step.spread)})"
        figures[name] = units.milliseconds(step.median)
    if run.tokens_per_second:
        figures["tokens per second"] = units.count(run.tokens_per_second)
    if run.figures is not None and run.figures.possible_mfu is not None:
        figures["MFU"] = units.percent(run.figures.possible_mfu)
    if run.memory is not None:
        figures[f"peak memory, {run.memory.source}"] = units.bytes_(run.memory.peak)
    if run.parameters:
        figures["parameters"] = units.count(run.parameters)
    return figures


def run_foot(run: Run) -> Html:
    """Return machine, versions, settings and notes."""
    spec, environment = run.spec, run.environment
    lines = [
        f"Run {run.id}, {run.created or 'time unknown'}, status {run.status}",
        environment.conditions_on(spec.device),
        f"warm-up {spec.warmup}, timed steps {spec.steps}, accumulate {spec.accumulate}, "
        f"clip {spec.clip:g}, seed {spec.seed}",
    ]
    if run.profile is not None:
        wait, warmup, active, repeat = run.profile.schedule
        lines.append(
            f"profiler schedule: wait {wait}, warm-up {warmup}, active {active}, repeat {repeat}"
        )
    if run.figures is not None and run.figures.peak_tflops is not None:
        lines.append(f"peak: {run.figures.peak_tflops:g} TFLOP/s, {run.figures.peak_source}")
    lines += [f"{name}={value}" for name, value in environment.variables.items()]
    lines += list(run.notes)
    return paragraphs(lines)


def paragraphs(lines: list[str]) -> Html:
    """Return each line as a paragraph."""
    return join(element("p", line) for line in lines)
