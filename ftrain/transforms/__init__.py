"""Wrappers: each takes a step and returns a step, and each lives in a file or a folder of its own."""
