"""A training step: its functions, the wrappers that transform them, and evaluation."""
