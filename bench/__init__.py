"""Benchmarks: `python -m bench` prints what a step costs beside the loops it replaces."""
