"""Losses refuse wrong arguments with errors that name the function, the argument and its value."""

import re

import numpy as np
import pytest
import torch

from ftrain.errors import LossError, OptionError
from ftrain.losses import accuracy, binary_cross_entropy, cross_entropy, linear_cross_entropy, mse

LOGITS, LABELS = torch.zeros(4, 10), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize("function", [cross_entropy, accuracy])
@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (LOGITS, LABELS.new_zeros(5), r"logits have shape \(4, 10\) and labels \(5,\); .* shape \(4,\)"),
        (LOGITS, LABELS.new_zeros(4, 1), r"labels \(4, 1\); labels must have shape \(4,\)"),
        (LOGITS.expand(2, 4, 10), LABELS.expand(2, 4).T, r"must have shape \(2, 4\), because the class axis"),
        (LOGITS.T.expand(2, 10, 4), LABELS.expand(2, 4), r"pass logits\.movedim\(1, -1\)"),
        (LOGITS, torch.zeros(4), r"labels are float32\[4\]; they must be integer"),
        (LOGITS, torch.zeros(4, 10), r"labels are float32\[4, 10\]; .* argmax\(-1\).* probabilities"),
        (LOGITS, LABELS.bool(), r"labels are bool\[4\]; they must be integer"),
        (LOGITS, LABELS.to(torch.complex64), r"labels are complex64"),
        (LOGITS.long(), LABELS, r"logits are int64\[4, 10\]; they must be floating point"),
        (LOGITS.to(torch.complex64), LABELS, r"logits are complex64"),
        (torch.zeros(()), LABELS, r"logits have shape \(\); they must be \(\.\.\., classes\)"),
        (torch.zeros(4, 0), LABELS, r"logits have shape \(4, 0\); .* at least one class"),
    ],
)
def test_logits_and_labels_that_do_not_fit_are_refused(function, logits, labels, message):
    with pytest.raises(LossError, match=rf"^{function.__name__}: .*{message}"):
        function(logits, labels)


@pytest.mark.parametrize("smoothing", [-0.1, 1.1, float("nan")])
def test_label_smoothing_outside_0_to_1_is_refused(smoothing):
    with pytest.raises(OptionError, match=rf"^cross_entropy: label_smoothing is {smoothing}, .*\[0, 1\]"):
        cross_entropy(LOGITS, LABELS, label_smoothing=smoothing)


@pytest.mark.parametrize("ignore_index", [None, "pad", 1.5, True, torch.tensor(1.5), np.array([1, 2])], ids=repr)
@pytest.mark.parametrize("loss", [cross_entropy, accuracy, linear_cross_entropy], ids=lambda loss: loss.__name__)
def test_an_ignore_index_that_is_no_integer_is_refused(loss, ignore_index):
    outputs = (HIDDEN, WEIGHT, LINEAR_LABELS) if loss is linear_cross_entropy else (LOGITS, LABELS)
    message = rf"^{loss.__name__}: ignore_index is {re.escape(repr(ignore_index))}, needs an integer"
    with pytest.raises(OptionError, match=message):
        loss(*outputs, ignore_index=ignore_index)
    assert loss(*outputs, ignore_index=np.int64(0)).weight == 0


@pytest.mark.parametrize("weight", [torch.ones(9), torch.ones(4, 10), torch.ones(())])
def test_torch_refuses_class_weights_of_another_shape(weight):
    with pytest.raises(RuntimeError, match="weight tensor should be defined either for all 10 classes"):
        cross_entropy(LOGITS, LABELS, weight=weight)


@pytest.mark.parametrize(
    ("function", "outputs_name", "targets_name"),
    [(mse, "predictions", "targets"), (binary_cross_entropy, "logits", "labels")],
)
def test_outputs_and_targets_that_do_not_fit_are_refused(function, outputs_name, targets_name):
    start, values = f"^{function.__name__}: ", torch.zeros(4, 1)
    with pytest.raises(LossError, match=start + rf"{outputs_name} have shape \(4, 1\) and {targets_name} \(4,\);"):
        function(values, torch.zeros(4))
    with pytest.raises(LossError, match=start + rf"{outputs_name} are int64\[4, 1\]; .* floating"):
        function(values.long(), values)
    with pytest.raises(LossError, match=start + rf"{targets_name} are complex64\[4, 1\]; .* real"):
        function(values, values.to(torch.complex64))


@pytest.mark.parametrize("function", [mse, binary_cross_entropy])
@pytest.mark.parametrize("shape", [(4,), (2, 3), (1, 4, 3), (4, 0)])
def test_torch_refuses_a_weight_that_is_not_broadcast_to_the_outputs(function, shape):
    with pytest.raises(RuntimeError, match=r"expand"):
        function(torch.zeros(4, 3), torch.zeros(4, 3), weight=torch.ones(shape))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cross_entropy({"logits": LOGITS}, LABELS), r"cross_entropy: logits are dict; .* pass output\.logits"),
        (lambda: cross_entropy(LOGITS, LABELS.tolist()), r"cross_entropy: labels are list; .* torch\.as_tensor"),
        (lambda: cross_entropy(LOGITS, LABELS, weight=[1.0] * 10), "cross_entropy: weights are list"),
        (lambda: accuracy(LOGITS, LABELS.numpy()), "accuracy: labels are ndarray"),
        (lambda: mse(LOGITS, 0.0), "mse: targets are float"),
        (lambda: linear_cross_entropy((LOGITS,), LOGITS, LABELS), "linear_cross_entropy: hidden states are tuple"),
    ],
)
def test_an_argument_that_is_not_a_tensor_is_refused(call, message):
    with pytest.raises(LossError, match=message):
        call()


@pytest.mark.parametrize("loss", [cross_entropy, binary_cross_entropy, mse], ids=lambda loss: loss.__name__)
def test_a_complex_weight_is_refused(loss):
    targets = torch.zeros(2, dtype=torch.int64) if loss is cross_entropy else torch.zeros(2, 3)
    with pytest.raises(LossError, match=rf"^{loss.__name__}: the weight is complex64\[3\]; it must be real"):
        loss(torch.zeros(2, 3), targets, weight=torch.ones(3, dtype=torch.complex64))


HIDDEN, WEIGHT, LINEAR_LABELS = torch.zeros(3, 4), torch.zeros(10, 4), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden": HIDDEN.long()}, r"hidden states are int64\[3, 4\]; they must be floating"),
        ({"weight": WEIGHT.long()}, r"weights are int64\[10, 4\]; they must be floating"),
        ({"weight": WEIGHT.double()}, r"hidden is float32.* and weight float64.* one dtype.*autocast"),
        ({"weight": WEIGHT[0]}, r"hidden has shape \(3, 4\) and weight \(4,\); .*\(classes, width\)"),
        ({"weight": WEIGHT.T}, r"hidden has shape \(3, 4\) and weight \(4, 10\); they must be \(\.\.\., width\)"),
        ({"hidden": torch.zeros(())}, r"hidden has shape \(\) and weight"),
        ({"labels": LINEAR_LABELS[:2]}, r"hidden has shape \(3, 4\) and labels \(2,\); labels must have shape \(3,\)"),
        ({"labels": LINEAR_LABELS.float()}, r"labels are float32\[3\]; they must be integer"),
        ({"labels": LINEAR_LABELS.bool()}, r"labels are bool"),
        ({"bias": torch.zeros(4)}, r"bias is float32\[4\] .*shape \(10,\)"),
        ({"bias": torch.zeros(10).double()}, r"bias is float64.* the dtype of weight"),
        ({"bias": [0.0] * 10}, r"biases are list; they must be a tensor"),
        ({"weight": torch.zeros(0, 4)}, r"weight has shape \(0, 4\); it needs at least one class and a width"),
        ({"weight": torch.zeros(9, 0), "hidden": torch.zeros(3, 0)}, r"weight has shape \(9, 0\); it needs"),
        ({"class_weight": torch.zeros(4)}, r"class_weight is float32\[4\]; .*shape \(10,\)"),
        ({"label_smoothing": 1.5}, r"label_smoothing is 1\.5, needs a number in \[0, 1\]"),
        ({"label_smoothing": float("nan")}, r"label_smoothing is nan"),
        ({"chunk": 0}, r"chunk is 0, needs a whole number of at least 1"),
        ({"chunk": 2.0}, r"chunk is 2\.0"),
    ],
)
def test_arguments_of_linear_cross_entropy_that_do_not_fit_are_refused(changed, message):
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "labels": LINEAR_LABELS, **changed}
    with pytest.raises((LossError, OptionError), match=rf"^linear_cross_entropy: {message}"):
        linear_cross_entropy(**arguments)
