"""Runs the checks on the device of `toy.py`, and prints their errors as JSON, by the name of the check; "" if it holds.

It runs in a process of its own, because torch has one PrivateUse1 device for a whole process:
``python -m tests.backends.on_toy [name]``. With a name, the device has the record of that vendor.
"""

import dataclasses
import gc
import json
import sys
import traceback

import pytest
import torch

from ftrain import backends
from tests.backends import compiling_on_toy, offloading_on_toy, toy, training_on_toy, without_float64_on_toy


def toy_device():
    """Register the device, and return its module and the checks to run on it."""
    module = toy.register()
    # Those of training come first: one of them registers a record of the device.
    return module, {
        **training_on_toy.CHECKS,
        **compiling_on_toy.CHECKS,
        **without_float64_on_toy.CHECKS,
        **offloading_on_toy.CHECKS,
    }


def vendor_device(name):
    """Return the module of a vendor's device, whose package is imported by name, and the checks of its record."""
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
    backends.get(name)
    # Without fused kernels on both sides: a vendor's fused kernel need not give the same bits.
    backends.register(dataclasses.replace(backends.get("cpu"), fused_optimizers=False))
    checks = {label: training_on_toy.CHECKS[label] for label in training_on_toy.BY_RECORD}
    return torch.get_device_module(name), checks


def main(name="toy"):
    module, checks = toy_device() if name == "toy" else vendor_device(name)
    errors = {}
    gc.set_threshold(20_000, 20, 20)
    for label, check in checks.items():
        # So that a check that collects garbage does not traverse the objects of all earlier ones and of imports.
        gc.freeze()
        errors[label] = ""
        try:
            check(name, module)
        # `pytest.raises` fails with an error that is not an Exception.
        except (Exception, pytest.fail.Exception):
            errors[label] = traceback.format_exc()[-1500:]
    sys.stdout.write(json.dumps(errors))


if __name__ == "__main__":
    main(*sys.argv[1:])
