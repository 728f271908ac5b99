"""Traces of several ranks: one clock, who waited for whom, and why."""
