"""`compiled(lowering="blocks")`: blocks of one class share a graph; what is refused; what runs uncompiled."""

import logging

import pytest
import torch
from torch import nn
from torch._dynamo import register_backend

import ftrain as ft
from ftrain.errors import BatchError, ComposeError, OptionError, TraceError
from tests.transforms.compile.counting_backend import compiled_graphs

# Dynamo reads the .grad of every tensor it traces, which makes torch warn.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def no_graphs():
    # Before torch 2.13 steps share graphs.
    torch.compiler.reset()
    compiled_graphs.clear()


class Block(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.linear(self.norm(x)).tanh())


def make_net(blocks=3, **options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(*(Block(**options) for _ in range(blocks)))).double()


def square_loss(net, batch):
    return net(batch["x"]).square().mean()


def make_step(*wrappers, net=None, criterion=square_loss, **options):
    compiled = ft.compiled(**{"lowering": "blocks", "backend": "ftrain_counting", **options})
    loss = ft.from_module(make_net() if net is None else net, criterion)
    return ft.compose(ft.train_step(loss, ft.optim.adamw(0.01)), *wrappers, compiled)


def train(step, lengths=(6, 6, 6), **more):
    generator = torch.Generator().manual_seed(1)
    state = step.init()
    for length in lengths:
        state, _ = step(state, {"x": torch.randn(length, 3, generator=generator, dtype=torch.float64), **more})
    return state


def assert_equals_uncompiled(net, *wrappers, **options):
    actual = train(make_step(*wrappers, net=net, **{"backend": "aot_eager", **options}))
    expected = train(ft.compose(ft.train_step(ft.from_module(net, square_loss), ft.optim.adamw(0.01)), *wrappers))
    torch.testing.assert_close(actual.params, expected.params, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(actual.buffers, expected.buffers, rtol=1e-12, atol=0)


@pytest.mark.parametrize("wrappers", [(), (ft.accumulate(2), ft.remat(), ft.clip(0.1))], ids=["alone", "stack"])
def test_blocks_of_one_class_share_one_graph(wrappers):
    train(make_step(*wrappers, net=make_net(blocks=5)))
    assert len(compiled_graphs) == 1


def of_step():
    return ft.eval_step(make_step().loss)


def by_itself():
    return ft.compiled(lowering="blocks", backend="ftrain_counting")(uncompiled())


def uncompiled():
    return ft.eval_step(ft.from_module(make_net(), square_loss))


@pytest.mark.parametrize("make_evaluation", [of_step, by_itself])
def test_an_evaluation_compiles_blocks_as_well(make_evaluation):
    state, batches = make_step().init(), [{"x": torch.randn(4, 3, dtype=torch.float64)} for _ in range(2)]
    expected = ft.evaluate(uncompiled(), state, batches)
    assert not compiled_graphs
    assert ft.evaluate(make_evaluation(), state, batches) == expected
    assert len(compiled_graphs) == 1


def test_layers_of_transformers_share_a_graph_without_their_cache_of_keys_and_values(caplog):
    families = pytest.importorskip("tests.laws.transformers_families")
    torch.manual_seed(0)
    llama = families.causal("LlamaConfig", "LlamaForCausalLM", num_hidden_layers=3).double()
    batch, params = families.of_tokens(), []
    for wrappers in ([ft.compiled(lowering="blocks", backend="ftrain_counting")], []):
        with caplog.at_level(logging.WARNING, "ftrain"):
            step = ft.compose(ft.train_step(ft.from_module(llama), ft.optim.adamw(0.01)), *wrappers)
            state = step.init()
            for _ in range(2):
                state, _ = step(state, batch)
        params.append(state.params)
    torch.testing.assert_close(*params, rtol=1e-12, atol=1e-14)
    assert len(compiled_graphs) == 1
    assert caplog.text.count("LlamaForCausalLM runs without its cache of keys and values") == 1
    assert llama.config.use_cache


class Counting(nn.Module):
    """A block with BatchNorm, which changes buffers in place, and that keeps the last mean in a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x):
        x = self.norm(x)
        self.last = x.detach().mean(0)
        return x + self.linear(x) * self.last


@pytest.mark.parametrize("wrappers", [(), (ft.accumulate(2), ft.remat())], ids=["alone", "stack"])
def test_buffers_that_blocks_change_advance_as_in_an_eager_step(wrappers):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(Counting(), Counting())).double()
    assert_equals_uncompiled(net, *wrappers)


def test_more_shapes_than_max_graphs_are_an_error_and_texts_do_not_count():
    step = make_step(max_graphs=2)
    for name in "abcd":
        train(step, lengths=(4, 6), name=name)
    with pytest.raises(BatchError, match=r"compiled: 3 kinds of batches need as many graphs.*batch\.x"):
        train(step, lengths=(4, 6, 8))


def test_dynamic_shapes_need_no_graph_for_each_length():
    train(make_step(dynamic=True, max_graphs=1), lengths=range(4, 14))
    assert len(compiled_graphs) <= 2


HOOKS = {
    "forward": lambda layer: layer.register_forward_hook(lambda layer, inputs, output: output * 1.5),
    "pre": lambda layer: layer.register_forward_pre_hook(lambda layer, inputs: (inputs[0] * 1.5,)),
    "backward": lambda layer: layer.register_full_backward_hook(lambda layer, grads, of_output: (grads[0] * 2,)),
}


@pytest.mark.parametrize("lowering", ["blocks", "split"])
@pytest.mark.parametrize("add_hook", HOOKS.values(), ids=HOOKS)
def test_a_hook_on_a_layer_of_one_block_is_called_there_alone(add_hook, lowering):
    net = make_net()
    add_hook(net[1][1].linear)
    assert_equals_uncompiled(net, lowering=lowering)


class Turned(nn.Module):
    """A block that doubles complex numbers in place, in the memory of the tensor that it gets."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, turned):
        turned.mul_(2)
        return x + self.linear(x) * torch.view_as_real(turned.resolve_conj()).sum()


class TurnedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.blocks = nn.Linear(3, 4), nn.ModuleList(Turned() for _ in range(2))

    def forward(self, x):
        x = self.inner(x)
        turned = torch.complex(x.detach(), 1 + x.detach()).conj()
        for block in self.blocks:
            x = block(x, turned)
        return x


def test_blocks_with_conjugated_inputs_run_uncompiled():
    """Inductor's code ignores the bit of a conjugated tensor, and in a copy the block's change would be lost."""
    torch.manual_seed(0)
    assert_equals_uncompiled(TurnedNet().double(), backend="ftrain_counting")
    assert not compiled_graphs


class Named(Block):
    """A block with a text, which is a constant of its graph."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        return super().forward(x) * (1 + int(self.name) / 16)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch allows at most 8 graphs for all steps")
@pytest.mark.parametrize("dynamic", [False, True])
def test_twelve_blocks_with_constants_of_their_own_have_twelve_graphs(dynamic):
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Named(str(index)) for index in range(12)))
    net = nn.Sequential(nn.Linear(3, 4), blocks).double()
    train(make_step(net=net, dynamic=dynamic, fullgraph=True, max_graphs=1))
    assert len(compiled_graphs) == 12


def gradient_penalty(net, batch):
    x = batch["x"].detach().requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return gradient.square().mean()


class Listing(Block):
    def forward(self, x, outputs, named):
        x = super().forward(x)
        outputs.append(x)
        named["count"] = named.get("count", 0) + 1
        return x


class ListingNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.blocks = nn.Linear(3, 4), nn.ModuleList(Listing() for _ in range(3))

    def forward(self, x):
        x, outputs, named = self.inner(x), [], {}
        for block in self.blocks:
            x = block(x, outputs, named=named)
        return sum(outputs) * named["count"]


def test_lists_and_dicts_that_a_block_changes_are_changed():
    torch.manual_seed(0)
    assert_equals_uncompiled(ListingNet().double())


class InPlace(Block):
    """A block that counts in a buffer, in place, and reads it afterwards."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return super().forward(x) / (1 + self.count)


@pytest.mark.parametrize("wrappers", [(), (ft.accumulate(2), ft.remat())], ids=["alone", "stack"])
def test_blocks_that_change_a_buffer_in_place_run_uncompiled_and_the_log_says_so(wrappers, caplog):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(InPlace(), InPlace())).double()
    with caplog.at_level(logging.WARNING, "ftrain"):
        assert_equals_uncompiled(net, *wrappers)
        train(make_step(*wrappers, net=net))
    assert caplog.text.count("the blocks InPlace of square_loss(Sequential) run uncompiled") == 2
    assert not compiled_graphs


class LaterInPlace(InPlace):
    """A block that counts in place in long batches only."""

    def forward(self, x):
        return super().forward(x) if len(x) > 4 else Block.forward(self, x) / (1 + self.count)


def test_a_block_that_begins_to_change_a_buffer_in_place_is_an_error():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(LaterInPlace(), LaterInPlace())).double()
    with pytest.raises(ft.errors.LossError, match="a block LaterInPlace changes a buffer in place, which no such"):
        train(make_step(net=net), lengths=(4, 2, 6))


class DrawsFirst:
    """A compiled block that draws one number more than the block itself, so that its dropout is another."""

    def __init__(self, forward):
        self.forward = forward

    def __call__(self, *inputs):
        torch.rand(1)
        return self.forward(*inputs)


@register_backend
def ftrain_drawing(graph, inputs):
    return DrawsFirst(graph.forward)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_recomputation_has_the_random_numbers_of_its_forward_pass(steps):
    """A block runs uncompiled in the first step, and compiled in the next ones, with other random numbers."""
    lengths = (6,) * steps
    states = [
        train(make_step(*wrappers, net=make_net(p=0.5), backend="ftrain_drawing"), lengths)
        for wrappers in ((), (ft.remat(),))
    ]
    torch.testing.assert_close(states[0].params, states[1].params, rtol=1e-12, atol=1e-15)


def test_fit_finds_out_whether_a_loss_is_additive_without_a_false_log_line(caplog):
    step = make_step(ft.accumulate(2))
    data = [{"x": torch.randn(6, 3, dtype=torch.float64)} for _ in range(4)]
    with caplog.at_level(logging.WARNING, "ftrain"):
        ft.fit(step, step.init(), data, log_every=2, progress=False)
    assert "run uncompiled" not in caplog.text
    assert len(compiled_graphs) == 1


def test_sync_batch_norm_is_refused():
    with pytest.raises(ComposeError, match=r"lowering='blocks' cannot be combined with sync_batch_norm"):
        make_step(ft.sync_batch_norm(), net=nn.Sequential(nn.BatchNorm1d(3), make_net()))


@pytest.mark.parametrize("on_mesh", [False, True])
def test_a_gradient_of_a_gradient_is_an_error(on_mesh):
    # On a mesh blocks are compiled from the second step on.
    wrappers = [ft.sharded(ft.parallel.mesh())] if on_mesh else []
    with pytest.raises(TraceError, match=r"differentiates it again.*lowering='whole'"):
        train(make_step(*wrappers, criterion=gradient_penalty, backend="aot_eager"))


def test_it_needs_repeated_layers():
    step = ft.train_step(lambda params, batch: params["w"].sum(), ft.optim.sgd(0.1))
    with pytest.raises(ComposeError, match=r"repeated in a ModuleList or Sequential, and loss has none"):
        ft.compiled(lowering="blocks")(step)
    step = ft.train_step(ft.from_module(nn.Linear(2, 2), square_loss), ft.optim.sgd(0.1))
    with pytest.raises(ComposeError, match=r"square_loss\(Linear\) has none"):
        ft.compiled(lowering="blocks")(step)


def test_it_has_no_graph_of_the_whole_step():
    with pytest.raises(OptionError, match=r"replay=True needs one graph of the whole step"):
        ft.compiled(lowering="blocks", replay=True)
    step = make_step()
    assert "square_loss(Sequential) <- compiled(blocks=3)" in repr(step)
    with pytest.raises(ComposeError, match=r"Step\.lower: the step has no graph to report"):
        step.lower(step.init(), {"x": torch.ones(2, 3, dtype=torch.float64)})


@pytest.mark.parametrize(
    "remat", [ft.remat("dots"), ft.remat(blocks={Block: "dots"}), ft.remat(budget=0.5)], ids=["all", "some", "budget"]
)
def test_a_policy_of_remat_is_refused_in_either_order(remat):
    with pytest.raises(ComposeError, match=r"lowering='blocks' cannot be combined with a policy of remat"):
        make_step(remat)
    with pytest.raises(ComposeError, match=r"lowering='blocks' cannot be combined with a policy of remat"):
        remat(make_step())


def test_memory_is_predicted_from_uncompiled_blocks():
    step, batch = make_step(), {"x": torch.ones(4, 3, dtype=torch.float64)}
    report = ft.anatomy(step, step.init(), batch, measure=False)
    eager = ft.compose(ft.train_step(ft.from_module(make_net(), square_loss), ft.optim.adamw(0.01)))
    assert report.peak == ft.anatomy(eager, eager.init(), batch, measure=False).peak
    assert not compiled_graphs
    train(step)
    assert len(compiled_graphs) == 1


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_blocks_that_draw_run_uncompiled_on_a_mesh_and_the_log_says_so(p, caplog):
    net = make_net(p=p)
    mesh = ft.parallel.mesh()
    with caplog.at_level(logging.WARNING, "ftrain"):
        actual = train(make_step(ft.accumulate(2), ft.sharded(mesh), net=net))
    eager = ft.compose(
        ft.train_step(ft.from_module(net, square_loss), ft.optim.adamw(0.01)), ft.accumulate(2), ft.sharded(mesh)
    )
    torch.testing.assert_close(actual.params, train(eager).params, rtol=1e-12, atol=1e-15)
    assert len(compiled_graphs) == (0 if p else 1)
    assert ("run uncompiled, since they draw random numbers" in caplog.text) == bool(p)
