"""The methods of compression that tests try, and gradients."""

import torch

import ftrain as ft

METHODS = {
    "bf16": lambda: "bf16",
    "fp16": lambda: "fp16",
    "powersgd": lambda: ft.parallel.powersgd(2),
    "sign": lambda: ft.parallel.sign(),
}
"""Name -> function that returns the argument `reduce` of `sharded`."""

REMEMBERING = ["powersgd", "sign"]
"""Methods that keep what they have not sent."""


def gradients(rank, step, shapes):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
