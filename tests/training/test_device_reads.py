"""Metrics are read from the device together: every `log_every` steps in `fit`, and at the end of an evaluation."""

import pytest
import torch

import ftrain as ft
from tests.training.problem import batches, fit, make_step, params, squares


class PythonReads:
    """Counts the calls in Python that copy the value of a floating-point or bool tensor to the host."""

    NAMES = ("item", "tolist", "numpy", "__float__", "__bool__", "__int__", "__index__", "__format__", "__array__")

    def __init__(self, monkeypatch):
        self.count = 0
        for name in self.NAMES:
            monkeypatch.setattr(torch.Tensor, name, self._counting(getattr(torch.Tensor, name)))

    def _counting(self, method):
        def counted(tensor, *args, **kwargs):
            # The step count and the key are integers, and always on the host.
            self.count += tensor.is_floating_point() or tensor.dtype == torch.bool
            return method(tensor, *args, **kwargs)

        return counted

    def before_each(self, data, counts):
        """Yield the batches of data; append the count before each of them to `counts`."""
        for batch in data:
            counts.append(self.count)
            yield batch


class DispatcherReads(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the reads of single values that operations make without a method of Python."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            # As above, integers are on the host.
            self.count += args[0].dtype != torch.int64
        return func(*args, **(kwargs or {}))


STACKS = {
    "plain": (),
    "stack": (ft.accumulate(2), ft.clip(1.0), ft.ema(0.9), ft.skip_nonfinite()),
    "fp16": (ft.with_amp("fp16"), ft.clip(value=0.1)),
    "compiled": (ft.clip(1.0), ft.compiled(backend="eager", lowering="whole")),
}


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("donate", [True, False])
def test_values_are_read_only_every_log_every_steps(name, donate, monkeypatch):
    step = make_step(*STACKS[name])
    state = step.init(params())
    reads, counts = PythonReads(monkeypatch), []
    with DispatcherReads() as dispatcher_reads:
        fit(step, reads.before_each(batches(9), counts), state, log_every=4, donate=donate)
    # The batch with the index k is drawn after k steps, so the count rises only after steps 4 and 8.
    assert counts[:4] == [0] * 4
    assert len(set(counts[4:8])) == 1
    # `accumulate` checks once, with three pairs of examples, whether the loss is a mean over examples.
    check_reads = 3 if name == "stack" else 0
    assert counts[4] > check_reads
    assert counts[8] - counts[4] == counts[4] - check_reads
    assert dispatcher_reads.count == 0


def test_all_metrics_of_several_steps_are_read_in_one_transfer(monkeypatch):
    step = make_step()
    state = step.init(params())
    reads = PythonReads(monkeypatch)
    fit(step, batches(8), state, log_every=8)
    assert reads.count == 1


def test_an_evaluation_reads_the_device_once_after_its_last_batch(monkeypatch):
    state = make_step().init(params())
    evaluation = ft.eval_step(squares)
    reads, counts = PythonReads(monkeypatch), []
    ft.evaluate(evaluation, state, reads.before_each(batches(5), counts))
    assert counts == [0] * 5
    assert reads.count == 1
