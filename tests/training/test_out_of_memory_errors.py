"""Which errors say that memory ran out, and what is freed then, before a step is tried again."""

import errno
import types
import weakref

import pytest
import torch

from ftrain.backends.oom import is_out_of_memory, release
from tests.training.out_of_memory import batches, fit, loss_without_dropout, make_step


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 1.2 GiB"),
        RuntimeError("backend='inductor' raised:\nMemoryError: "),
        RuntimeError("std::bad_alloc"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=["numpy", "compiler", "C++", "cuDNN", "cuBLAS", "system"],
)
def test_is_out_of_memory_knows_the_errors_of_allocators_and_libraries(error):
    assert is_out_of_memory(error)


def test_is_out_of_memory_knows_the_error_of_torch_on_this_host():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("index out of range")]
)
def test_other_errors_are_not_out_of_memory(error):
    assert not is_out_of_memory(error)


def test_release_frees_the_tensors_that_the_traceback_holds():
    references = []

    def failing():
        activation = torch.zeros(10)
        references.append(weakref.ref(activation))
        try:
            raise torch.OutOfMemoryError("out of memory")
        except RuntimeError as error:
            raise RuntimeError("wrapped: out of memory") from error

    with pytest.raises(RuntimeError) as caught:
        failing()
    (activation,) = references
    assert activation() is not None
    release(caught.value, torch.device("cpu"))
    assert activation() is None


def test_release_waits_for_copies_to_the_host(monkeypatch):
    waits = []
    copier = types.SimpleNamespace(wait=lambda: waits.append("wait"))
    monkeypatch.setattr("ftrain.backends.oom.copier_of", lambda device: copier)
    release(RuntimeError("out of memory"), torch.device("cpu"))
    assert waits == ["wait"]


def test_the_tensors_of_a_failed_attempt_are_freed_before_the_next():
    references, alive_counts = [], []

    def loss(params, batch):
        alive_counts.append(sum(reference() is not None for reference in references))
        activation = torch.zeros(1234) + params["w1"].sum()
        references.append(weakref.ref(activation))
        if len(batch["x"]) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return loss_without_dropout(params, batch)[0].total / len(batch["x"]) + 0 * activation.sum()

    fit(make_step(loss=loss), batches(1, 4))
    # One attempt with 4 examples, two pieces of 2, and the pairs of examples that `fit` compares after a split.
    assert len(alive_counts) > 3
    assert not any(alive_counts)
