"""Changes in Inductor's graphs: large products by oneDNN, products of lists, copies of values before they change."""

import pytest
import torch
from torch import fx, nn
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import ftrain as ft
from ftrain.backends import onednn
from ftrain.transforms.compile import graph_passes
from tests.bits import assert_same_bits
from tests.exhaustive import exhaustive

PRODUCT = "ftrain::onednn_product"
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")


def matrices(rows, columns):
    """Return random matrices of one shape by their layout in memory."""
    return {
        "rows": torch.randn(rows, columns),
        "columns": torch.randn(columns, rows).t(),
        "slice": torch.randn(2 * rows, 2 * columns)[::2, ::2],
        "offset": torch.randn(rows * columns + 3)[3:].view(rows, columns),
        "one row": torch.randn(1, columns).expand(rows, columns),
        "one column": torch.randn(rows, 1).expand(rows, columns),
    }


@needs_onednn
@pytest.mark.parametrize("sizes", [(32, 48, 16), (64, 64, 8), (1, 64, 64), (64, 1, 64), (64, 64, 1)], ids=str)
def test_a_product_by_onednn_is_exact_for_every_layout(sizes):
    torch.manual_seed(0)
    rows, inner, columns = sizes
    for layout_of_a, a in matrices(rows, inner).items():
        for layout_of_b, b in matrices(inner, columns).items():
            product, exact = onednn.product()(a, b), a.double() @ b.double()
            assert product.is_contiguous(), (layout_of_a, layout_of_b)
            assert torch.allclose(product.double(), exact, rtol=1e-5, atol=1e-4), (layout_of_a, layout_of_b)


class Net(nn.Module):
    """Products with a bias, without one, and with a sum that Inductor makes a part of the product."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(32, 32), nn.Linear(32, 32, bias=False), nn.Linear(32, 8)

    def forward(self, x):
        return self.head(x + self.second(F.gelu(self.first(x))))


def count_products():
    """Return how many products of a compiled step oneDNN computes, and how many torch; check the step itself."""
    loss_fn = ft.from_module(Net(), lambda model, batch: model(batch).square().mean())
    eager = ft.train_step(loss_fn, ft.optim.sgd(0.1))
    compiled, batch = ft.compiled()(eager), torch.randn(16, 32)
    state = compiled.init(seed=0)
    (after, _), (expected, _) = compiled(state, batch), eager(state, batch)
    torch.testing.assert_close(after.params, expected.params, rtol=1e-5, atol=1e-6)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        compiled(state, batch)
    names = [event.name for event in profiled.events()]
    return names.count(PRODUCT), names.count("aten::mm") + names.count("aten::addmm")


@needs_onednn
def test_large_products_of_a_compiled_step_are_by_onednn_where_it_is_faster(monkeypatch):
    least = onednn.Least(16 * 32 * 32, 16 * 32 * 32)
    monkeypatch.setattr(onednn, "least_faster", lambda: least)
    # The first two layers have five large products: two outputs, two gradients of weights and one of an input. Those
    # of the head are small.
    assert count_products() == (5, 3)
    # The two gradients of weights read a transposed matrix, which must be copied.
    least = least._replace(transposed=least.transposed + 1)
    assert count_products() == (3, 5)
    least = None
    assert count_products() == (0, 8)


@needs_onednn
def test_products_of_unknown_sizes_and_of_float64_are_not_replaced():
    least = onednn.Least(1, 1)
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    product = graph.call_function(torch.ops.aten.mm.default, (a, b))
    graph.output(product)
    graph_passes.products_by_onednn(graph, least)
    assert product.target is torch.ops.aten.mm.default
    a.meta["val"] = b.meta["val"] = torch.ones(2, 2, dtype=torch.float64)
    graph_passes.products_by_onednn(graph, least)
    assert product.target is torch.ops.aten.mm.default
    a.meta["val"] = b.meta["val"] = torch.ones(2, 2)
    graph_passes.products_by_onednn(graph, least)
    assert product.target is onednn.product()


@pytest.fixture
def least_on(monkeypatch):
    """Return a function that returns `least_faster` on another CPU."""

    def least_faster(name, capability, cpuinfo):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": name})
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        monkeypatch.setattr(onednn.Path, "read_text", lambda path, encoding: cpuinfo)
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
        return onednn.least_faster.__wrapped__()

    return least_faster


@needs_onednn
@pytest.mark.parametrize(
    ("name", "capability", "family", "expected"),
    [
        ("AMD EPYC", "AVX512", 26, onednn.WITH_WHOLE_VECTORS),
        ("AMD Ryzen 7 PRO", "AVX512", 25, onednn.WITH_HALF_VECTORS),
        ("AMD EPYC", "AVX512", "unknown", onednn.WITH_HALF_VECTORS),
        ("AMD EPYC", "AVX2", 25, None),
        ("Intel(R) Xeon(R)", "AVX512", 6, None),
        ("", "AVX512", 6, None),
    ],
)
def test_onednn_is_chosen_by_the_maker_the_vectors_and_the_family_of_the_cpu(
    name, capability, family, expected, least_on, monkeypatch
):
    assert least_on(name, capability, f"processor\t: 0\ncpu family\t: {family}\nmodel\t\t: 17\n") == expected
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert onednn.least_faster.__wrapped__() is None


@needs_onednn
def test_the_family_is_read_from_the_name_of_the_processor_on_other_systems(least_on, monkeypatch):
    def refuse(path, encoding):
        raise FileNotFoundError(path)

    least_on("AMD Ryzen", "AVX512", "")
    monkeypatch.setattr(onednn.Path, "read_text", refuse)
    for name, expected in (
        ("AMD64 Family 26 Model 36 Stepping 0, AuthenticAMD", onednn.WITH_WHOLE_VECTORS),
        ("AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD", onednn.WITH_HALF_VECTORS),
    ):
        monkeypatch.setattr(onednn.platform, "processor", lambda name=name: name)
        assert onednn.least_faster.__wrapped__() == expected


@pytest.mark.parametrize("sizes", [(1,), (3,), (1, 3, 1)], ids=str)
def test_the_products_of_a_list_become_one_operation_each(sizes):
    """Inductor would make one kernel of a list on a GPU, and could not fuse it with others."""

    def scale(factor, *gradients):
        return torch._foreach_mul(list(gradients), factor)

    inputs = [torch.tensor(0.5), *(torch.randn(size) for size in sizes)]
    graph = make_fx(scale)(*inputs)
    graph_passes.products_apart(graph.graph)
    graph.recompile()
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert names == ["aten.mul.Tensor"] * len(sizes)
    assert_same_bits(graph(*inputs), scale(*inputs))


@pytest.mark.parametrize("lowering", ["whole", *exhaustive(["split"])])
def test_a_donated_buffer_that_gets_the_old_value_of_another(lowering, tmp_path):
    """The graph overwrites that other buffer first. Torch's cache would take the second graph for the first."""

    def final_buffers(source_of_b, *wrappers):
        """Return the buffers after 3 steps, which set "a" from the batch and "b" to the old value of a buffer."""

        def loss(params, batch, buffers):
            return (batch @ params).square().mean(), {}, {"a": batch[0], "b": buffers[source_of_b]}

        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.01)), *wrappers)
        state = step.init(torch.ones(2), buffers={"a": torch.zeros(2), "b": torch.full((2,), 7.0)})
        for batch in torch.arange(18.0).reshape(3, 3, 2):
            state, _ = step(state, batch)
        return state.buffers

    # Inductor compiles a program to find out which vectors a CPU has; in each new directory it would take ten seconds.
    pick_vec_isa()
    for source_of_b in ("a", "b"):
        compiled = ft.compiled(lowering=lowering, donate=True, cache_dir=tmp_path)
        assert_same_bits(final_buffers(source_of_b, compiled), final_buffers(source_of_b))
