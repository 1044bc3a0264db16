"""Settings of every test: one thread, so that results do not depend on the number of cores."""

import gc

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

# The same examples every time, and no deadline: the first call of an operation may load a library.
hypothesis.settings.register_profile("ftrain", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("ftrain")


def pytest_collection_finish():
    """Exclude the objects that exist now from garbage collection, and let forked processes run autograd."""
    gc.collect()
    gc.freeze()
    # This backward pass must come before the first fake tensor. A torch built for CUDA treats a fake tensor as a
    # device, and starts a thread for it in the first backward pass. No process forked later can run a backward pass.
    torch.ones((), requires_grad=True).backward()


@pytest.fixture(autouse=True)
def _isolate_test():
    """Seed torch before each test, and discard its compiled code afterwards."""
    # `torch.manual_seed` records a stack trace for each type of device that is not in use, which takes milliseconds.
    seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    seed(0)
    yield
    torch.compiler.reset()
