"""The questions to a CPU, one a file; each has `run(settings)`, which returns rows."""
