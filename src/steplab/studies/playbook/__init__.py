"""Megalodon's profiling playbook: lengths x reductions, traces, tables and one summary."""
