"""`linear_cross_entropy` equals the cross entropy of the logits, and never holds all of them in memory."""

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.backends import registry
from ftrain.errors import LossError, OptionError
from ftrain.losses import chunked, cross_entropy, linear_cross_entropy
from ftrain.losses.chunked import auto_chunk, losses_and_gradients
from ftrain.transforms.compile import capture as capturing
from tests.exhaustive import exhaustive

F64 = torch.float64
CLASSES, WIDTH = 11, 6
EXACT = {"rtol": 1e-12, "atol": 1e-13}


def randn(*shape, seed=0, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def some_labels(*shape, classes=CLASSES, ignore_index=-100, seed=1):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.3, ignore_index, labels)


def layer(dtype=F64, classes=CLASSES, width=WIDTH):
    return randn(classes, width, seed=2, dtype=dtype), randn(classes, seed=3, dtype=dtype)


def from_logits(hidden, weight, labels, *, bias=None, class_weight=None, chunk=None, **options):
    """Return the loss with all logits in memory; `chunk` is ignored."""
    logits = hidden @ weight.T
    return cross_entropy(logits if bias is None else logits + bias, labels, weight=class_weight, **options)


def derive(function, hidden, weight, labels, *, bias=None, cotangent=1.7, **options):
    """Return the total, the weight, and the gradients of `cotangent` times the total."""
    inputs = [tensor.detach().requires_grad_() for tensor in (hidden, weight, bias) if tensor is not None]
    loss = function(*inputs[:2], labels, bias=None if bias is None else inputs[2], **options)
    return loss.total.detach(), loss.weight, *torch.autograd.grad(loss.total * cotangent, inputs)


def assert_same(actual, expected, **tolerance):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, **(tolerance or EXACT))


SMOOTHINGS = [0.0, 0.1, 1.0]
CLASS_WEIGHTS = [None, torch.linspace(0, 2, CLASSES, dtype=F64)]


class TestParity:
    @pytest.mark.parametrize("smoothing", SMOOTHINGS)
    @pytest.mark.parametrize("class_weight", CLASS_WEIGHTS)
    @pytest.mark.parametrize("biased", [False, True])
    def test_value_and_gradients(self, smoothing, class_weight, biased):
        weight, bias = layer()
        for shape, ignored, chunk in itertools.product([(20,), (4, 5), (2, 2, 5)], [-100, 2], [None, 1, 3, 20, 100]):
            options = {"ignore_index": ignored, "label_smoothing": smoothing, "class_weight": class_weight}
            options |= {"bias": bias if biased else None, "chunk": chunk}
            case = randn(*shape, WIDTH), weight, some_labels(*shape, ignore_index=ignored)
            assert_same(derive(linear_cross_entropy, *case, **options), derive(from_logits, *case, **options))

    def test_one_token_and_no_batch_axis(self):
        weight, bias = layer()
        for case in ((randn(WIDTH), weight, torch.tensor(3)), (randn(1, WIDTH), weight, torch.tensor([3]))):
            assert_same(derive(linear_cross_entropy, *case, bias=bias), derive(from_logits, *case, bias=bias))

    @pytest.mark.parametrize("smoothing", SMOOTHINGS)
    @pytest.mark.parametrize("class_weight", CLASS_WEIGHTS)
    @pytest.mark.parametrize("shape", [(7,), (0,), (0, 3)])
    def test_nothing_to_count(self, smoothing, class_weight, shape):
        weight, bias = layer()
        labels = torch.full(shape, -100)
        options = {"bias": bias, "label_smoothing": smoothing, "class_weight": class_weight, "chunk": 2}
        total, count, *grads = derive(linear_cross_entropy, randn(*shape, WIDTH), weight, labels, **options)
        assert (float(total), float(count)) == (0.0, 0.0)
        assert [grad.shape for grad in grads] == [(*shape, WIDTH), weight.shape, bias.shape]
        assert not any(grad.any() for grad in grads)

    @pytest.mark.parametrize("dtype", [torch.float32, F64])
    @pytest.mark.parametrize("scale", [1e4, -1e4])
    def test_huge_logits(self, dtype, scale):
        case = torch.eye(CLASSES, dtype=dtype) * scale, torch.eye(CLASSES, dtype=dtype), torch.arange(CLASSES).roll(1)
        actual = derive(linear_cross_entropy, *case, chunk=4)
        assert_same(actual, derive(from_logits, *case), rtol=1e-5, atol=1e-5)
        assert all(tensor.isfinite().all() for tensor in actual)

    def test_minus_infinity_rules_a_class_out(self):
        weight, bias = layer()
        bias[8:] = -torch.inf
        case = randn(9, WIDTH), weight, some_labels(9, classes=8)
        assert_same(derive(linear_cross_entropy, *case, bias=bias), derive(from_logits, *case, bias=bias))

    @pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
    @pytest.mark.parametrize("smoothing", SMOOTHINGS)
    @pytest.mark.parametrize("chunk", [None, 1, 4])
    def test_a_row_without_a_label_may_hold_infinity_or_nan(self, chunk, smoothing, value):
        weight, bias = layer()
        hidden, labels = randn(9, WIDTH), some_labels(9, seed=2)
        ignored = labels == -100
        assert 0 < ignored.sum() < 9
        spoilt = hidden.masked_fill(ignored[:, None], value)
        options = {"bias": bias, "label_smoothing": smoothing, "class_weight": CLASS_WEIGHTS[1]}
        for labels_of_case in (labels, torch.full_like(labels, -100)):
            case = weight, labels_of_case
            actual = derive(linear_cross_entropy, spoilt, *case, chunk=chunk, **options)
            assert_same(actual, derive(from_logits, hidden, *case, **options))
            with torch.no_grad():
                assert torch.equal(linear_cross_entropy(spoilt, *case, chunk=chunk, **options).total, actual[0])

    @pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
    def test_a_row_without_a_label_may_hold_infinity_or_nan_under_autocast_and_in_a_step(self, narrow):
        weight, _ = layer(torch.float32)
        hidden, labels = randn(9, WIDTH, dtype=torch.float32), some_labels(9, seed=2)
        spoilt = hidden.masked_fill((labels == -100)[:, None], torch.nan)

        def derive_under_autocast(hidden):
            with torch.autocast("cpu", narrow):
                return derive(linear_cross_entropy, hidden, weight, labels, chunk=4)

        assert_same(derive_under_autocast(spoilt), derive_under_autocast(hidden), rtol=0, atol=0)
        step = ft.train_step(
            lambda params, batch: linear_cross_entropy(batch["hidden"] * params["scale"], params["weight"], labels),
            ft.optim.sgd(0.1),
        )
        for wrapper in (ft.compiled(lowering="whole", backend="eager"), ft.donated()):
            states = []
            for inputs in (hidden, hidden.masked_fill((labels == -100)[:, None], torch.inf)):
                state = step.init({"scale": torch.ones(WIDTH), "weight": weight.clone()})
                states.append(wrapper(step)(state, {"hidden": inputs})[0])
            assert torch.equal(states[0].params["weight"], states[1].params["weight"])

    @pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
    def test_any_integer_labels(self, dtype):
        labels = some_labels(9, ignore_index=2)
        case = randn(9, WIDTH), layer()[0]
        actual = linear_cross_entropy(*case, labels.to(dtype), ignore_index=2)
        assert torch.equal(actual.value, linear_cross_entropy(*case, labels, ignore_index=2).value)

    @pytest.mark.parametrize("label", [CLASSES, -1])
    def test_a_label_out_of_range_is_an_error(self, label):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            linear_cross_entropy(randn(2, WIDTH), layer()[0], torch.tensor([0, label]))

    def test_not_contiguous(self):
        hidden, weight, labels = randn(WIDTH, 5, 4).permute(2, 1, 0), randn(WIDTH, CLASSES).T, some_labels(5, 4).T
        case = hidden, weight, labels
        assert_same(derive(linear_cross_entropy, *case, chunk=3), derive(from_logits, *case))

    def test_pieces_add_up_to_the_whole(self):
        hidden, labels, weight = randn(12, WIDTH), some_labels(12), layer()[0]
        whole = linear_cross_entropy(hidden, weight, labels)
        slices = (slice(5), slice(5, 6), slice(6, 12))
        first, second, third = (linear_cross_entropy(hidden[rows], weight, labels[rows]) for rows in slices)
        pooled = first.pooled(second).pooled(third)
        assert_same((pooled.total, pooled.weight), (whole.total, whole.weight))


@pytest.fixture
def calls(monkeypatch):
    """Return a list that gets, at each call of the operation, for which inputs it must compute gradients."""
    recorded = []

    def record(*args):
        recorded.append(args[-1])
        return losses_and_gradients(*args)

    monkeypatch.setattr(chunked, "losses_and_gradients", record)
    return recorded


class TestRequestedGradients:
    @pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3))[1:])
    def test_no_others_are_computed(self, needs, calls):
        weight, bias = layer()
        inputs = [x.requires_grad_(need) for x, need in zip((randn(9, WIDTH), weight, bias), needs, strict=True)]
        labels, differentiated = some_labels(9), [x for x in inputs if x.requires_grad]
        loss = linear_cross_entropy(*inputs[:2], labels, bias=inputs[2], chunk=4)
        actual = torch.autograd.grad(loss.total, differentiated)
        assert calls == [list(needs)]
        expected = from_logits(*inputs[:2], labels, bias=inputs[2])
        assert_same(actual, torch.autograd.grad(expected.total, differentiated))

    def test_none_in_evaluation(self, calls):
        hidden, weight = randn(9, WIDTH), layer()[0].requires_grad_()
        with torch.no_grad():
            loss = linear_cross_entropy(hidden, weight, some_labels(9))
        linear_cross_entropy(hidden, weight.detach(), some_labels(9))
        assert calls == [[False] * 3] * 2
        assert not loss.total.requires_grad
        assert_same((loss.total,), (from_logits(hidden, weight.detach(), some_labels(9)).total,))

    def test_gradients_are_returned_without_a_copy(self, monkeypatch):
        computed = []

        def record(*args):
            computed.extend(losses_and_gradients(*args))
            return computed

        monkeypatch.setattr(chunked, "losses_and_gradients", record)
        weight, bias = (tensor.requires_grad_() for tensor in layer())
        inputs = randn(9, WIDTH).requires_grad_(), weight, bias
        loss = linear_cross_entropy(*inputs[:2], some_labels(9), bias=bias)
        actual = torch.autograd.grad(loss.value, inputs)
        assert [grad.data_ptr() for grad in actual] == [grad.data_ptr() for grad in computed[1:]]

    def test_a_second_backward_pass_gives_the_same(self, calls):
        hidden, weight = randn(9, WIDTH).requires_grad_(), layer()[0].requires_grad_()
        total = linear_cross_entropy(hidden, weight, some_labels(9)).total * 3
        first = [grad.clone() for grad in torch.autograd.grad(total, (hidden, weight), retain_graph=True)]
        assert len(calls) == 1
        assert_same(torch.autograd.grad(total, (hidden, weight)), first, rtol=0, atol=0)

    def test_a_second_derivative_is_refused(self):
        hidden = randn(9, WIDTH).requires_grad_()
        total = linear_cross_entropy(hidden, layer()[0], some_labels(9)).total
        with pytest.raises(LossError, match=r"^linear_cross_entropy: .*create_graph.*use cross_entropy"):
            torch.autograd.grad(total, hidden, create_graph=True)

    def test_transforms_of_torch_func_are_refused(self):
        weight, labels = layer()[0], some_labels(9)
        with pytest.raises(RuntimeError, match="functorch transforms"):
            torch.func.grad(lambda hidden: linear_cross_entropy(hidden, weight, labels).total)(randn(9, WIDTH))

    # torch compiles its rules for forward mode with torch.jit.script when it first needs them.
    @pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
    def test_a_derivative_in_forward_mode_is_refused(self):
        # Without this error torch would return 0.
        hidden, weight, labels = randn(9, WIDTH), layer()[0], some_labels(9)
        with pytest.raises(LossError, match=r"^linear_cross_entropy: .*forward-mode.*use cross_entropy"):
            torch.func.jvp(lambda x: linear_cross_entropy(x, weight, labels).total, (hidden,), (hidden,))


def relative_error(actual, expected):
    """Return the norm of the difference, relative to the norm of the expected tensor."""
    return float((actual.double() - expected).norm() / expected.norm())


class TestSixteenBits:
    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast(self, dtype, smoothing):
        weight, bias = layer(torch.float32, classes=100, width=32)
        case = randn(64, 32, dtype=torch.float32), weight / 4, some_labels(64, classes=100)
        wide = [x.double() if x.is_floating_point() else x for x in case]
        exact = derive(from_logits, *wide, bias=bias.double(), label_smoothing=smoothing)
        with torch.autocast("cpu", dtype):
            actual = derive(linear_cross_entropy, *case, bias=bias, label_smoothing=smoothing, chunk=16)
            expected = derive(from_logits, *case, bias=bias, label_smoothing=smoothing)
        assert all(tensor.dtype == torch.float32 for tensor in actual)
        # Both round the logits to 16 bits, so the values agree; the gradients have at most 1.2 times the same error.
        assert float(actual[0]) == pytest.approx(float(expected[0]), rel=1e-6)
        assert float(actual[0]) != pytest.approx(float(exact[0]), rel=1e-9)
        for a, b, c in zip(actual[2:], expected[2:], exact[2:], strict=True):
            assert relative_error(a, c) < 1.2 * relative_error(b, c) < 0.02

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_narrow_inputs_accumulate_in_float32(self, dtype):
        # 4096 equal rows, one in each chunk: a sum in 16 bits would stop growing long before the last one.
        row, weight = randn(1, WIDTH, dtype=dtype), layer(dtype)[0]
        labels = torch.full((4096,), 3)
        actual = derive(linear_cross_entropy, row.expand(4096, -1), weight, labels, chunk=1, cotangent=1 / 4096)
        expected = derive(from_logits, row.double(), weight.double(), labels[:1], cotangent=1.0)
        assert [tensor.dtype for tensor in actual] == [torch.float32] * 2 + [dtype] * 2
        assert relative_error(actual[3], expected[3]) < 4 * torch.finfo(dtype).eps
        assert relative_error(actual[2].double().sum(0, keepdim=True), expected[2]) < 8 * torch.finfo(dtype).eps

    def test_small_probabilities_survive_float16(self):
        weight = torch.tensor([[0.0], [-20.0]]).half()
        case = torch.ones(1, 1).half(), weight, torch.tensor([0])
        grad = derive(linear_cross_entropy, *case, cotangent=2.0**16)[3]
        expected = derive(from_logits, *(x.double() if x.is_floating_point() else x for x in case), cotangent=2.0**16)[
            3
        ]
        assert float(grad[1]) == pytest.approx(float(expected[1]), rel=1e-2)

    def test_autocast_leaves_float64_alone(self):
        case = randn(9, WIDTH), layer()[0], some_labels(9)
        with torch.autocast("cpu", torch.bfloat16):
            actual = derive(linear_cross_entropy, *case)
        assert_same(actual, derive(from_logits, *case))

    def test_tiles_of_the_classes_add_up(self, monkeypatch):
        case = randn(9, WIDTH, dtype=torch.float32), layer(torch.float32)[0], some_labels(9)
        with torch.autocast("cpu", torch.bfloat16):
            expected = derive(linear_cross_entropy, *case)
            monkeypatch.setattr(chunked, "TILE", 3 * WIDTH)
            assert_same(derive(linear_cross_entropy, *case), expected, rtol=1e-2, atol=1e-2)
        assert len(list(chunked._tiles(case[1].bfloat16(), torch.float32))) == 4  # Of 3 classes, of 11.
        assert len(list(chunked._tiles(case[1], torch.float32))) == 1


class TestOperation:
    @pytest.mark.parametrize("needs", [[False] * 3, [True, False, True], [True] * 3])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_fake_results_are_like_real_ones(self, needs, dtype):
        weight, bias = layer(torch.float32)
        args = randn(9, WIDTH, dtype=torch.float32), weight, bias, some_labels(9), None, -100, 0.1, 4, dtype, needs
        torch.library.opcheck(losses_and_gradients, args, test_utils=("test_schema", "test_faketensor"))

    @pytest.mark.parametrize(("classes", "width", "expected"), [(50257, 256, 256), (2**17, 4096, 512), (10**9, 8, 1)])
    def test_automatic_chunk(self, classes, width, expected):
        weight = torch.empty(classes, width, device="meta")
        assert auto_chunk(weight, torch.float32, chunked.CHUNK_BYTES) == expected

    def test_automatic_chunk_counts_bytes(self):
        weight = torch.empty(2**16, 8, device="meta")
        chunks = [auto_chunk(weight, t, chunked.CHUNK_BYTES) for t in (torch.bfloat16, torch.float32, F64)]
        assert chunks == [256, 256, 128]

    @pytest.mark.parametrize("smoothing", SMOOTHINGS)
    def test_classes_are_padded_where_matmuls_need_it(self, monkeypatch, smoothing):
        """The padding changes neither the loss nor the gradients."""
        padding = dataclasses.replace(ft.backends.get("cpu"), multiple=lambda dtype: 8, immediate=False)
        monkeypatch.setitem(registry._records, "cpu", padding)
        shapes, mm = [], torch.mm

        def record(a, b, **out):
            shapes.append(b.shape)
            return mm(a, b, **out)

        monkeypatch.setattr(torch, "mm", record)
        weight, bias = layer()
        case, options = (randn(9, WIDTH), weight, some_labels(9)), {"bias": bias, "label_smoothing": smoothing}
        options["class_weight"] = CLASS_WEIGHTS[1]
        actual = derive(linear_cross_entropy, *case, chunk=4, **options)
        assert {(WIDTH, 16)} == set(shapes)
        assert_same(actual, derive(from_logits, *case, **options))


class Tiny(nn.Module):
    """An embedding, two blocks and a head, whose weight is that of the embedding if `tied`."""

    def __init__(self, tied):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def trunk(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return x


def fused(model, batch):
    hidden = model.trunk(batch["x"])
    return linear_cross_entropy(hidden, model.head.weight, batch["y"], bias=model.head.bias, chunk=7)


def unfused(model, batch):
    return cross_entropy(model.head(model.trunk(batch["x"])), batch["y"])


def batches():
    return [{"x": some_labels(4, 5, ignore_index=0, seed=s), "y": some_labels(4, 5, seed=s + 9)} for s in range(3)]


def train(criterion, *wrappers, tied=True, dtype=F64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Tiny(tied).to(dtype)
    step = ft.compose(ft.train_step(ft.from_module(module, criterion), ft.optim.sgd(0.5, momentum=0.9)), *wrappers)
    state = step.init(seed=0)
    for batch in batches():
        state, metrics = step(state, batch)
    return ft.tree.leaves(state.params), metrics


STACKS = {
    "plain": [],
    "remat": [ft.remat()],
    "dots": [ft.remat("dots")],
    "accumulate": [ft.accumulate(2), ft.clip(0.1)],
    "all": [ft.remat(), ft.accumulate(2), ft.clip(0.1), ft.ema()],
}
# The (stack, tied) that `make test` runs; `make test-all` runs all of them.
CHOSEN = {("plain", True), ("plain", False), ("dots", True), ("all", True)}


class TestPipelines:
    @pytest.mark.parametrize(
        ("stack", "tied"),
        [
            pytest.param(stack, tied, marks=[] if (stack, tied) in CHOSEN else pytest.mark.exhaustive)
            for stack, tied in itertools.product(STACKS, (True, False))
        ],
    )
    def test_equals_the_loss_of_logits_eager_and_captured(self, stack, tied):
        wrappers = STACKS[stack]
        expected = train(unfused, *wrappers, tied=tied)[0]
        captured = ft.compiled(lowering="whole", backend="aot_eager", donate=True)
        assert_same(train(fused, *wrappers, tied=tied)[0], expected)
        assert_same(train(fused, *wrappers, captured, tied=tied)[0], expected)

    # Dynamo looks at the .grad of every tensor it traces, and makes an instance of every Function: torch warns of both.
    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
    @pytest.mark.parametrize("stack", ["all", *exhaustive(["plain"])])
    def test_equals_the_loss_of_logits_split(self, stack):
        split = ft.compiled(lowering="split", backend="aot_eager")
        assert_same(train(fused, *STACKS[stack], split)[0], train(unfused, *STACKS[stack])[0])

    @pytest.mark.parametrize("dtype", ["bf16", "fp16"])
    def test_mixed_precision(self, dtype):
        amp = ft.with_amp(dtype)
        actual, expected = (train(criterion, amp, dtype=torch.float32)[0] for criterion in (fused, unfused))
        for a, b in zip(actual, expected, strict=True):
            assert a.dtype == torch.float32
            assert relative_error(a, b.double()) < 0.02
        captured = ft.compiled(lowering="whole", backend="aot_eager")
        assert_same(train(fused, amp, captured, dtype=torch.float32)[0], actual, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("policy", ["full", "dots"])
    def test_inside_of_a_block(self, policy):
        def loss_of(function):
            block = ft.block(lambda h, w, y: function(torch.tanh(h), w, y).total)
            return lambda params, batch: block(params["h"], params["w"], batch).mul(0.5)

        def run(function, *wrappers):
            step = ft.compose(ft.train_step(loss_of(function), ft.optim.sgd(0.5)), *wrappers)
            state, _ = step(step.init({"h": randn(9, WIDTH), "w": layer()[0]}), some_labels(9))
            return ft.tree.leaves(state.params)

        captured = ft.compiled(lowering="whole", backend="eager")
        expected = run(from_logits)
        for wrappers in ([], [ft.remat(policy)], [ft.remat(policy), captured]):
            assert_same(run(linear_cross_entropy, *wrappers), expected)

    def test_chunks_are_one_node_of_the_graph(self, monkeypatch):
        recorded, capture = [], capturing.capture

        def record(*args):
            recorded.append(capture(*args))
            return recorded[-1]

        monkeypatch.setattr(capturing, "capture", record)
        train(fused, ft.compiled(lowering="whole", backend="eager"))
        (captured,) = recorded
        targets = [node.target for node in captured.graph.nodes]
        assert targets.count(torch.ops.ftrain.linear_cross_entropy.default) == 1
        sizes = [node.meta["val"].numel() for node in captured.graph.nodes if hasattr(node.meta.get("val"), "numel")]
        assert 4 * 5 * CLASSES not in sizes

    def test_evaluation(self):
        module = Tiny(True).double()
        state = ft.train_step(ft.from_module(module, fused), ft.optim.sgd(0.1)).init()
        actual, expected = (
            ft.evaluate(ft.eval_step(ft.from_module(module, criterion)), state, batches())["loss"]
            for criterion in (fused, unfused)
        )
        assert float(actual) == pytest.approx(float(expected), rel=1e-12)


WEIGHT = torch.zeros(10, 4)
HIDDEN, LABELS = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
WRONG = [
    ({"hidden": HIDDEN.long()}, r"hidden states are int64\[3, 4\]; they must be floating"),
    ({"weight": WEIGHT.long()}, r"weights are int64\[10, 4\]; they must be floating"),
    ({"weight": WEIGHT.double()}, r"hidden is float32.* and weight float64.* one dtype.*autocast"),
    ({"weight": WEIGHT[0]}, r"hidden has shape \(3, 4\) and weight \(4,\); .*\(classes, width\)"),
    ({"weight": WEIGHT.T}, r"hidden has shape \(3, 4\) and weight \(4, 10\); they must be \(\.\.\., width\)"),
    ({"hidden": torch.zeros(())}, r"hidden has shape \(\) and weight"),
    ({"labels": LABELS[:2]}, r"hidden has shape \(3, 4\) and labels \(2,\); labels must have shape \(3,\)"),
    ({"labels": LABELS.float()}, r"labels are float32\[3\]; they must be integer"),
    ({"labels": LABELS.bool()}, r"labels are bool"),
    ({"bias": torch.zeros(4)}, r"bias is float32\[4\] .*shape \(10,\)"),
    ({"bias": torch.zeros(10).double()}, r"bias is float64.* the dtype of weight"),
    ({"class_weight": torch.zeros(4)}, r"class_weight is float32\[4\]; .*shape \(10,\)"),
    ({"label_smoothing": 1.5}, r"label_smoothing is 1\.5, needs a number in \[0, 1\]"),
    ({"label_smoothing": float("nan")}, r"label_smoothing is nan"),
    ({"chunk": 0}, r"chunk is 0, needs a whole number of at least 1"),
    ({"chunk": 2.0}, r"chunk is 2\.0"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_errors(wrong, message):
    case = {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS, **wrong}
    with pytest.raises((LossError, OptionError), match=rf"^linear_cross_entropy: {message}"):
        linear_cross_entropy(**case)


# Runs in a new process, because the peak memory of a process never falls. The step that needs less memory comes first.
# The profiler's trace has every allocation of a tensor. The peak memory of the process is measured as a second check.
MEASURE = """
import json, sys, torch, ftrain as ft

folder, lowering, rows, classes, width = *sys.argv[1:3], *map(int, sys.argv[3:])
torch.set_num_threads(1)
labels = torch.arange(rows) * 17
profiler = lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)

def plain(params, batch):
    return ft.losses.cross_entropy(batch * params["scale"] @ params["weight"].T, labels)

def chunked(params, batch):
    return ft.losses.linear_cross_entropy(batch * params["scale"], params["weight"], labels)

def peak():
    return ft.backends.of(torch.device("cpu")).memory().peak

def measure(loss, wrapper):
    step = wrapper(ft.train_step(loss, ft.optim.sgd(0.1)))
    generator = torch.Generator().manual_seed(0)
    params = {"weight": torch.randn(classes, width, generator=generator).div_(8), "scale": torch.ones(width)}
    batch = torch.randn(rows, width, generator=generator)
    state = step.init(params, seed=0)
    if wrapper is compiled:  # Memory for compiling is not measured.
        state, _ = step(state, batch)
    before = peak()
    with profiler() as profile:
        state, metrics = step(state, batch)
    process = peak() - before
    profile.export_chrome_trace(f"{folder}/{len(measured)}.json")
    measured.append([process, float(metrics["loss"])])

compiled, measured = ft.compiled(lowering="whole", donate=True), []
with profiler():  # Nor is memory that the libraries and the profiler allocate once.
    small = torch.ones(64, width, requires_grad=True)
    ft.losses.linear_cross_entropy(small, small, torch.arange(64)).total.backward()
    ft.losses.cross_entropy(small @ small.T, torch.arange(64)).total.backward()
cases = {"eager": [(chunked, ft.donated()), (plain, ft.donated())], "compiled": [(chunked, compiled)]}
for case in cases[lowering]:
    measure(*case)
print(json.dumps(measured))
"""
MB = 10**6
ROWS, VOCABULARY, HIDDEN_WIDTH = 1024, 50257, 64
GRADIENTS = 4 * (VOCABULARY * HIDDEN_WIDTH + ROWS * HIDDEN_WIDTH + HIDDEN_WIDTH)
LOGITS = 4 * ROWS * VOCABULARY


def peak_of_tensors(trace):
    """Return the peak bytes of tensors in a trace of the profiler."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    assert events
    events.sort(key=lambda event: event["ts"])
    return max(itertools.accumulate(event["args"]["Bytes"] for event in events))


def peaks(tmp_path, lowering):
    """Return the peak bytes of the process and of tensors, without inputs and gradients, and the losses, by step."""
    process = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), lowering, str(ROWS), str(VOCABULARY), str(HIDDEN_WIDTH)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    process_peaks, losses = zip(*json.loads(process.stdout.splitlines()[-1]), strict=True)
    tensors = [peak_of_tensors(tmp_path / f"{number}.json") - GRADIENTS for number in range(len(process_peaks))]
    return [peak - GRADIENTS for peak in process_peaks], tensors, losses


def test_memory_of_an_eager_step(tmp_path):
    (chunked_process, plain_process), (chunked, plain), losses = peaks(tmp_path, "eager")
    assert chunked < LOGITS / 3
    assert chunked_process < LOGITS / 2  # More than that of tensors: the libraries have memory of their own.
    assert plain > 1.9 * LOGITS
    assert plain_process > 1.5 * LOGITS  # Beyond the peak of the chunked step.
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.exhaustive
def test_memory_of_a_compiled_step(tmp_path):
    _, (compiled,), _ = peaks(tmp_path, "compiled")
    assert compiled < LOGITS / 3
