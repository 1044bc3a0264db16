"""Rematerialisation (activation checkpointing) of blocks."""
