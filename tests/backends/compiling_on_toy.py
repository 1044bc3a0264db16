"""Checks of compiled steps on the device of `toy.py`; `on_toy.py` runs them."""

import torch

import ftrain as ft
from ftrain.transforms.compile.host_constants import tensors_of
from tests.backends.toy_problem import assert_bitwise, assert_near, batches, check_adder

CHECKS = {}
check = check_adder(CHECKS)


@check
def it_compiles_with_the_compiler_of_its_record(name, module):
    def compiled(device, **options):
        loss_fn = lambda params, batch: ((batch @ params["w"]) ** 2).mean()  # noqa: E731
        step = ft.compose(ft.train_step(loss_fn, ft.optim.sgd(0.1, momentum=0.9)), ft.compiled(donate=True, **options))
        state = step.init({"w": torch.linspace(-1, 1, 48).reshape(16, 3)}, device=device)
        return ft.fit(step, state, batches(), progress=False)

    ours, history = compiled(name)
    theirs, expected = compiled("cpu", backend="eager")
    assert history["loss"] == expected["loss"]
    assert_bitwise(ours, theirs)


@check
def a_compiled_step_reads_nothing_that_the_loss_makes_on_the_host(name, module):
    """It is made once, and kept on the device, so that no step waits for a copy; a tensor from outside may change."""
    from torch._dynamo import register_backend  # Imported here: it takes a second, and other checks do not need it.

    outside, host_nodes = torch.tensor([1.0, 2.0, 3.0]), []

    @register_backend(name="ftrain_toy_watched")
    def watched(graph, inputs):
        nodes = [node for node in graph.graph.nodes if node.op in ("get_attr", "call_function")]
        host_nodes.extend(str(node.op) for node in nodes for tensor in tensors_of(node) if tensor.device.type == "cpu")
        return graph.forward

    def loss(params, batch):
        y = batch @ params["w"]
        factors = torch.tensor([0.5, 2.0, 1.0]).to(y.device)
        factors.mul_(2)  # Each step has a new tensor.
        positions = torch.arange(3).to(y.device, torch.float32)
        mask = torch.ones(3).masked_fill(torch.tensor([True, False, True]), 0.25).to(y.device)
        total = (y[:, torch.tensor([2, 0, 1])] * factors + positions) * mask * torch.tensor(1.5)
        return (total * outside.to(y.device)).square().mean()

    def run(device, **options):
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(1e-4)), ft.compiled(donate=True, **options))
        return ft.fit(step, step.init({"w": torch.ones(16, 3)}, device=device), batches(), progress=False)

    ours, history = run(name, backend="ftrain_toy_watched")
    theirs, expected = run("cpu", backend="eager")
    # A 0-d tensor, which a kernel takes from the host, and its copy. And the tensor from outside.
    assert sorted(host_nodes) == ["call_function", "get_attr", "get_attr"], host_nodes
    assert history["loss"] == expected["loss"]
    assert_bitwise(ours, theirs)


@check
def tensors_that_the_loss_changes_on_the_host_are_made_in_each_compiled_step(name, module):
    """Changed by index, by a view, or in a list: the device gets the last values, as in an eager step."""

    def loss(params, batch):
        table, first, halves, ends = torch.zeros(3, 2), torch.ones(3), torch.ones(3), torch.zeros(4)
        table[:, 0] = torch.arange(3.0)
        first[0] = 4.0
        torch._foreach_mul_([halves[:1], halves[2:]], 0.5)
        read = ends[1:]
        ends.view(2, 2)[1].add_(2.0)
        y = batch @ params["w"]
        y = (y + table.to(y.device)[:, 0]) * halves.to(y.device) + first.to(y.device) * read.to(y.device)
        return y.square().mean()

    def run(device, *wrappers):
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(1e-3)), *wrappers)
        return ft.fit(step, step.init({"w": torch.ones(16, 3)}, device=device), batches(), progress=False)

    ours, history = run(name, ft.compiled(donate=True, lowering="whole"))
    theirs, expected = run("cpu")
    assert_near(history["loss"], expected["loss"])
    assert_near(ours.params, theirs.params)
