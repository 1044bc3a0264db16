"""Moore Threads GPUs, by `torch_musa`, which renames PrivateUse1 and adds `torch.musa`.

It has bfloat16 if `get_amp_supported_dtype` lists it. TF32 is muDNN's, switched by `torch.backends.mudnn.allow_tf32`;
no function reports whether a card has it. Graphs are `torch.musa.MUSAGraph`.

Source: https://github.com/MooreThreads/torch_musa/tree/main/torch_musa/core (amp/common.py, random.py, memory.py,
mudnn.py) and https://github.com/MooreThreads/torch_musa/tree/main/torch_musa/musa_graph. Not run on hardware.
"""

from __future__ import annotations

import torch

from ftrain.backends.device_module import DeviceModule, allow_tf32

DEVICE = DeviceModule("musa")


BACKEND = DEVICE.record(
    platform="Moore Threads GPU",
    package="torch_musa",
    install="Moore Threads' wheels or image, https://github.com/MooreThreads/torch_musa",
    distributed="mccl",
    tf32=lambda: allow_tf32(torch.backends.mudnn),  # type: ignore[attr-defined]
    recorder=DEVICE.recorder,
)
