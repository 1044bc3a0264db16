"""Eager, donated and captured as a graph: the modes in which tests of a wrapper run a step."""

import pytest

import ftrain as ft

CAPTURED = ft.compiled(lowering="whole", backend="eager")
modes = pytest.mark.parametrize("mode", [(), (ft.donated(),), (CAPTURED,)], ids=["eager", "donated", "captured"])
"""Runs a test with the wrappers of each mode, which come last in a step."""
