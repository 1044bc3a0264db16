"""Settings of every test: one thread, so that results do not depend on how many cores there are."""

import gc

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

# The same examples every time, and no deadline: the first call of an operation may load a library.
hypothesis.settings.register_profile("ftrain", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("ftrain")


def pytest_collection_finish():
    """Leave out what is imported by now whenever garbage is looked for, and let forked processes run autograd."""
    gc.collect()
    gc.freeze()
    # Before the first fake tensor: a torch made for CUDA takes that for a device, for which its first backward pass
    # would start a thread, and then no forked process can run one.
    torch.ones((), requires_grad=True).backward()


@pytest.fixture(autouse=True)
def _each_test_alone():
    """A test draws the same numbers whatever ran before it, and its compiled code counts against no other's limit."""
    # `torch.manual_seed` writes down for each kind of device that is not in use from where it was called: milliseconds.
    seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    seed(0)
    yield
    torch.compiler.reset()
