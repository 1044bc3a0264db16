"""The length and the device of a batch, and `to`, which moves it."""

import torch

from ftrain import tree


def test_the_length_of_a_batch_is_that_of_its_first_tensor_with_axes():
    assert tree.batch_length({"scale": torch.tensor(1.0), "x": torch.ones(5, 2), "z": torch.ones(7)}) == 5
    assert tree.batch_length([torch.tensor(1.0), "text"]) is None
    assert tree.batch_length(None) is None


def test_the_device_of_a_tree_without_tensors_is_the_host():
    host = torch.ones(1).device
    assert tree.device_of({"a": torch.ones(1)}) == tree.device_of({}) == tree.device_of({"a": 1}) == host
    assert tree.device_of({"a": torch.ones(1, device="meta")}) == torch.device("meta")


def test_to_moves_tensors_and_keeps_other_leaves():
    meta = tree.to({"a": torch.ones(2), "n": 3}, "meta")
    assert (meta["a"].is_meta, meta["n"]) == (True, 3)


def test_to_returns_a_tree_itself_that_is_on_the_device():
    on_meta = {"a": torch.ones(2, device="meta")}
    assert tree.to(on_meta, torch.device("meta")) is on_meta


class Graph:
    """A batch with a method `to` that changes the object itself, as in PyTorch Geometric and transformers."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        self.x = self.x.to(device)
        return self


def test_an_object_with_a_method_to_is_copied_before_it_is_moved():
    graph = Graph(torch.ones(2))
    meta = tree.to([graph, {"name": "a", "graph": graph}], "meta")
    assert (meta[0].x.is_meta, meta[1]["graph"].x.is_meta, meta[1]["name"]) == (True, True, "a")
    assert not graph.x.is_meta


def test_a_packed_sequence_keeps_its_sizes_on_the_host():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2, 3), torch.ones(4, 3)], enforce_sorted=False)
    meta = tree.to({"p": packed}, "meta")["p"]
    assert (meta.data.is_meta, meta.batch_sizes.is_meta, meta.sorted_indices.is_meta) == (True, False, True)
