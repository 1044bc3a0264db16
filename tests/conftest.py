"""Settings of every test: one thread, so that results do not depend on how many cores there are."""

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

# The same examples every time, and no deadline: the first call of an operation may load a library.
hypothesis.settings.register_profile("ftrain", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("ftrain")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """Compiled code of one test must not count against the recompile limit of another."""
    yield
    torch.compiler.reset()
