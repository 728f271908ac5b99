"""The gate: does a candidate compute what the plain step computes?"""
