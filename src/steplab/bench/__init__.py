"""Benchmarks over a grid of cells whose answer is a table. `steplab bench NAME` runs one."""
