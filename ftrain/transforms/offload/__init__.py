"""Offloading of activations and of the optimizer's state."""
