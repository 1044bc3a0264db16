"""Runs: the loop over steps, metrics, logs, checkpoints to resume from, early stopping, running out of memory."""
