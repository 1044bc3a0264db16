"""Huawei Ascend, by `torch_npu`, which renames PrivateUse1 and adds `torch.npu`.

It has bfloat16 if `get_amp_supported_dtype` lists it. HF32, its form of TF32, is not switched: it keeps the value of
`torch.npu.matmul.allow_hf32`. Graphs are `torch.npu.NPUGraph`. Inductor needs triton-ascend.

Source: https://www.hiascend.com/document/detail/zh/Pytorch/720/apiref/PyTorchNativeapi/ptaoplist_000163.html and
https://github.com/Ascend/pytorch/blob/master/torch_npu/npu/__init__.py. Not run on hardware.
"""

from __future__ import annotations

from ftrain.backends.device_module import DeviceModule

DEVICE = DeviceModule("npu")

BACKEND = DEVICE.record(
    platform="Huawei Ascend",
    package="torch_npu",
    install="pip install torch-npu, https://github.com/Ascend/pytorch",
    distributed="hccl",
    recorder=DEVICE.recorder,
)
