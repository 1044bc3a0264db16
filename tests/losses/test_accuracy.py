"""`accuracy` counts the labels that are not ignored, and those that are right."""

import torch

from ftrain.losses import accuracy
from tests.losses.cases import is_scalar, numbers


def test_the_right_labels_and_all_labels_are_counted():
    logits = torch.tensor([[[0.0, 1.0], [2.0, 1.0]], [[0.0, -1.0], [5.0, 6.0]]])
    mean = accuracy(logits, torch.tensor([[1, 1], [0, -100]]))
    assert numbers(mean) == (2.0, 3.0)
    assert is_scalar(mean, torch.float32)


def test_ignored_labels_do_not_count():
    assert numbers(accuracy(torch.eye(3), torch.tensor([0, 1, 2]), ignore_index=1)) == (2.0, 2.0)
    assert numbers(accuracy(torch.eye(3), torch.full((3,), -100))) == (0.0, 0.0)


def test_an_empty_batch_has_no_accuracy():
    assert numbers(accuracy(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))) == (0.0, 0.0)


def test_one_example_without_a_batch_axis():
    assert float(accuracy(torch.tensor([0.0, 1.0]), torch.tensor(1))) == 1.0


def test_accuracy_has_no_gradient():
    assert not accuracy(torch.eye(3, requires_grad=True), torch.arange(3)).total.requires_grad
