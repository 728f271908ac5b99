"""The training step: built from a workload and a recipe, run, timed, captured, measured."""
