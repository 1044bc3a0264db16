"""The cases for a CPU, one per file; each has a function `run(settings)` that returns rows."""
