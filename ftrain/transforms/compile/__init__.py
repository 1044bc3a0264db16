"""Compilation of steps: capture, settings, caching, fallbacks."""
