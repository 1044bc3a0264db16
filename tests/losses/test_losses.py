"""The losses equal those of torch, add up over pieces of a batch, and refuse wrong arguments."""

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from ftrain.errors import LossError, OptionError
from ftrain.losses import accuracy, binary_cross_entropy, cross_entropy, linear_cross_entropy, mse
from ftrain.types import Mean

CLASSES = 5
F64 = torch.float64
EXACT = {"rtol": 1e-13, "atol": 1e-14}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def some_labels(*shape: int, ignore_index: int = -100, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.3, ignore_index, labels)


def class_weights() -> Tensor:
    return torch.tensor([0.5, 1.0, 2.0, 0.0, 3.0], dtype=F64)


def value_and_grad(function: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    at = at.detach().requires_grad_()
    value = function(at)
    return value.detach(), torch.autograd.grad(value, at)[0]


def check_parity(actual: Callable[[Tensor], Mean], expected: Callable[[Tensor], Tensor], at: Tensor) -> None:
    """Check that a loss of ours and one of torch have the same value, gradient and dtype at a tensor."""
    value, grad = value_and_grad(lambda x: actual(x).value, at)
    expected_value, expected_grad = value_and_grad(expected, at)
    assert value.dtype == expected_value.dtype
    torch.testing.assert_close(value, expected_value, **EXACT)
    torch.testing.assert_close(grad, expected_grad, **EXACT)


def is_scalar(mean: Mean, dtype: torch.dtype) -> bool:
    return all(x.shape == () and x.dtype == dtype for x in (mean.total, mean.weight))


def numbers(mean: Mean) -> tuple[float, float]:
    """Return the total and the weight."""
    return float(mean.total.detach()), float(mean.weight)


def add(means: list[Mean]) -> Mean:
    return functools.reduce(Mean.pooled, means)


class TestCrossEntropyParity:
    @pytest.mark.parametrize("shape", [(17,), (4, 6), (2, 3, 4)])
    @pytest.mark.parametrize("ignore_index", [-100, 0, 2])
    @pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
    @pytest.mark.parametrize("weight", [None, class_weights()])
    def test_value_and_gradient(self, shape, ignore_index, smoothing, weight) -> None:
        labels = some_labels(*shape, ignore_index=ignore_index)
        options = {"ignore_index": ignore_index, "label_smoothing": smoothing, "weight": weight}
        check_parity(
            lambda x: cross_entropy(x, labels, **options),
            lambda x: F.cross_entropy(x.movedim(-1, 1), labels, **options),
            randn(*shape, CLASSES),
        )

    def test_formula(self) -> None:
        logits, labels, w, s = randn(6, CLASSES), torch.tensor([0, 1, 2, 3, 4, -100]), class_weights(), 0.1
        logp = logits.log_softmax(-1)
        kept = range(5)
        of_labels = sum(w[i] * logp[i, i] for i in kept)
        of_all_classes = sum((w * logp[i]).sum() for i in kept)
        total = -(1 - s) * of_labels - s / CLASSES * of_all_classes
        loss = cross_entropy(logits, labels, label_smoothing=s, weight=w)
        torch.testing.assert_close(loss.total, total, **EXACT)
        assert float(loss.weight) == 6.5

    def test_weight_counts_labels(self) -> None:
        labels = torch.tensor([[0, -100, 2], [-100, -100, 4]])
        loss = cross_entropy(randn(2, 3, CLASSES), labels)
        assert is_scalar(loss, F64)
        assert float(loss.weight) == 3

    def test_one_element_and_no_batch_axis(self) -> None:
        logits, label = randn(CLASSES), torch.tensor(2)
        for loss in (cross_entropy(logits, label), cross_entropy(logits[None], label[None])):
            torch.testing.assert_close(loss.value, -logits.log_softmax(-1)[2], **EXACT)
            assert is_scalar(loss, F64)

    @pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
    def test_any_integer_labels(self, dtype: torch.dtype) -> None:
        logits, labels = randn(7, CLASSES), some_labels(7, ignore_index=3)
        narrow = cross_entropy(logits, labels.to(dtype), ignore_index=3)
        assert torch.equal(narrow.value, cross_entropy(logits, labels, ignore_index=3).value)

    def test_narrow_labels_do_not_wrap_into_ignore_index(self) -> None:
        logits, labels = randn(1, 200), torch.tensor([156], dtype=torch.uint8)
        assert float(cross_entropy(logits, labels).weight) == 1
        assert float(accuracy(logits, labels).weight) == 1

    def test_not_contiguous(self) -> None:
        logits, labels = randn(CLASSES, 6, 4).permute(2, 1, 0), some_labels(6, 4).T
        actual = cross_entropy(logits, labels)
        assert torch.equal(actual.total, cross_entropy(logits.contiguous(), labels.contiguous()).total)

    def test_class_weight_gets_no_gradient(self) -> None:
        weight = class_weights().requires_grad_()
        loss = cross_entropy(randn(4, CLASSES).requires_grad_(), some_labels(4), weight=weight)
        assert not loss.weight.requires_grad
        loss.total.backward()
        assert weight.grad is None


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, class_weights()])
class TestCrossEntropyWithNothingToCount:
    def test_all_ignored(self, smoothing: float, weight: Tensor | None) -> None:
        logits = randn(3, 4, CLASSES).requires_grad_()
        labels = torch.full((3, 4), -100)
        loss = cross_entropy(logits, labels, label_smoothing=smoothing, weight=weight)
        assert numbers(loss) == (0.0, 0.0)
        (grad,) = torch.autograd.grad(loss.total, logits)
        assert torch.equal(grad, torch.zeros_like(grad))

    @pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
    def test_empty(self, smoothing: float, weight: Tensor | None, shape: tuple[int, ...]) -> None:
        logits = torch.zeros(*shape, CLASSES, dtype=F64, requires_grad=True)
        labels = torch.zeros(shape, dtype=torch.int64)
        loss = cross_entropy(logits, labels, label_smoothing=smoothing, weight=weight)
        assert numbers(loss) == (0.0, 0.0)
        assert torch.autograd.grad(loss.total, logits)[0].shape == logits.shape


class TestExtremes:
    # At +1e4 one label of five is wrong and costs 1e4. At -1e4 four labels are right and cost 1e4 each, and the four
    # classes beside the one with the low logit share the probability: log 4 for every row.
    @pytest.mark.parametrize("dtype", [torch.float32, F64])
    @pytest.mark.parametrize(("scale", "expected"), [(1e4, 1e4), (-1e4, 4e4 + 5 * math.log(4))])
    def test_huge_logits(self, dtype: torch.dtype, scale: float, expected: float) -> None:
        logits, labels = torch.eye(CLASSES, dtype=dtype) * scale, torch.tensor([1, 1, 2, 3, 4])
        total, grad = value_and_grad(lambda x: cross_entropy(x, labels).total, logits)
        assert float(total) == pytest.approx(expected, rel=1e-6)
        assert torch.isfinite(grad).all()

    @pytest.mark.parametrize(("scale", "expected"), [(1e4, 0.0), (-1e4, 1e4)])
    def test_huge_binary_logits(self, scale: float, expected: float) -> None:
        labels = torch.tensor([True, False])
        logits = torch.tensor([scale, -scale])
        value, grad = value_and_grad(lambda x: binary_cross_entropy(x, labels).value, logits)
        assert float(value) == expected
        assert torch.isfinite(grad).all()

    def test_minus_infinity_rules_a_class_out(self) -> None:
        full = randn(6, CLASSES)
        masked = full.clone()
        masked[:, 3:] = -torch.inf
        labels = torch.tensor([0, 1, 2, 0, 1, 2])
        value, grad = value_and_grad(lambda x: cross_entropy(x, labels).value, masked)
        expected, expected_grad = value_and_grad(lambda x: cross_entropy(x, labels).value, full[:, :3])
        torch.testing.assert_close(value, expected, **EXACT)
        torch.testing.assert_close(grad[:, :3], expected_grad, **EXACT)
        assert torch.equal(grad[:, 3:], torch.zeros(6, 2, dtype=F64))

    def test_label_ruled_out_costs_infinity(self) -> None:
        logits = torch.tensor([[0.0, -torch.inf]])
        assert float(cross_entropy(logits, torch.tensor([1]))) == float("inf")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_logits_are_upcast(self, dtype: torch.dtype) -> None:
        logits, labels = randn(64, 1000, dtype=dtype) * 5, torch.arange(64)
        for function, targets in [(cross_entropy, labels), (mse, randn(64, 1000)), (accuracy, labels)]:
            mean = function(logits, targets)
            assert is_scalar(mean, torch.float32)
            wide = function(logits.double(), targets)
            torch.testing.assert_close(mean.value.double(), wide.value, rtol=1e-6, atol=0)
        halves = torch.full((64, 1000), 0.5, dtype=dtype)
        wide = binary_cross_entropy(logits.double(), halves.double())
        assert float(binary_cross_entropy(logits, halves)) == pytest.approx(float(wide), rel=1e-6)
        _, grad = value_and_grad(lambda x: cross_entropy(x, labels).value, logits)
        _, wide_grad = value_and_grad(lambda x: cross_entropy(x, labels).value, logits.double())
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.double(), wide_grad, rtol=torch.finfo(dtype).eps, atol=1e-7)

    def test_autocast_does_not_lower_the_dtype(self) -> None:
        logits, labels = randn(8, CLASSES, dtype=torch.float32), some_labels(8)
        plain = cross_entropy(logits, labels)
        with torch.autocast("cpu", torch.bfloat16):
            inside = cross_entropy(logits, labels)
        assert torch.equal(plain.value, inside.value)


def pieces(draw: st.DrawFn, size: int) -> list[slice]:
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=5)))
    return [slice(a, b) for a, b in itertools.pairwise([0, *cuts, size])]


@st.composite
def splits(draw: st.DrawFn) -> tuple[Callable[[slice, Tensor], Mean], Tensor, list[slice]]:
    """Draw a loss of a slice of a batch, the outputs of the batch, and slices that make up the batch."""
    size, seed = draw(st.integers(0, 12)), draw(st.integers(0, 10**6))
    labels = some_labels(size, 3, seed=seed)
    targets = torch.rand(size, 3, CLASSES, generator=torch.Generator().manual_seed(seed), dtype=F64)
    weight = draw(st.sampled_from([None, targets > 0.4, targets + 0.1]))
    options = {
        "label_smoothing": draw(st.sampled_from([0.0, 0.3])),
        "weight": draw(st.sampled_from([None, class_weights()])),
    }
    losses: dict[str, Callable[[slice, Tensor], Mean]] = {
        "cross_entropy": lambda s, x: cross_entropy(x[s], labels[s], **options),
        "binary": lambda s, x: binary_cross_entropy(x[s], targets[s], weight=None if weight is None else weight[s]),
        "mse": lambda s, x: mse(x[s], targets[s], weight=None if weight is None else weight[s]),
        # The second Mean, of weight 0, gives the accuracy a gradient of 0.
        "accuracy": lambda s, x: accuracy(x[s], labels[s]).pooled(Mean(0.0 * x.sum(), torch.zeros((), dtype=F64))),
    }
    loss = losses[draw(st.sampled_from(sorted(losses)))]
    return loss, randn(size, 3, CLASSES, seed=seed), pieces(draw, size)


class TestAdditivity:
    @settings(deadline=None, max_examples=150)
    @given(splits())
    def test_pieces_add_up_to_the_whole(self, case) -> None:
        loss, outputs, slices = case
        outputs.requires_grad_()
        whole = loss(slice(None), outputs)
        parts = add([loss(piece, outputs) for piece in slices])
        torch.testing.assert_close(parts.total, whole.total, **EXACT)
        torch.testing.assert_close(parts.weight, whole.weight, **EXACT)
        grads = [torch.autograd.grad(mean.total, outputs)[0] for mean in (parts, whole)]
        torch.testing.assert_close(*grads, **EXACT)

    def test_the_pooled_mean_is_not_the_mean_of_means(self) -> None:
        logits, labels = randn(4, CLASSES), torch.tensor([0, 2, 3, 1])
        three, one = cross_entropy(logits[:3], labels[:3]), cross_entropy(logits[3:], labels[3:])
        torch.testing.assert_close(three.pooled(one).value, cross_entropy(logits, labels).value, **EXACT)
        assert abs(float(three.pooled(one)) - (float(three) + float(one)) / 2) > 1e-3


ELEMENTWISE = [(mse, F.mse_loss), (binary_cross_entropy, F.binary_cross_entropy_with_logits)]


class TestElementwise:
    @pytest.mark.parametrize(("ours", "theirs"), ELEMENTWISE)
    @pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 3, 4)])
    def test_parity(self, ours, theirs, shape) -> None:
        targets = randn(*shape, seed=3).sigmoid()
        check_parity(lambda x: ours(x, targets), lambda x: theirs(x, targets), randn(*shape))
        assert float(ours(randn(*shape), targets).weight) == targets.numel()

    @pytest.mark.parametrize("shape", [(), (4,), (3, 1)])
    def test_pos_weight(self, shape) -> None:
        targets, weight, pos_weight = randn(3, 4, seed=3).sigmoid(), randn(4, seed=4).abs(), randn(*shape, seed=5).abs()
        check_parity(
            lambda x: binary_cross_entropy(x, targets, weight=weight, pos_weight=pos_weight),
            lambda x: (
                F.binary_cross_entropy_with_logits(x, targets, weight, reduction="sum", pos_weight=pos_weight)
                / weight.expand(3, 4).sum()
            ),
            randn(3, 4),
        )

    @pytest.mark.parametrize(("ours", "theirs"), ELEMENTWISE)
    @pytest.mark.parametrize("shape", [(), (4,), (3, 4), (3, 1), (1, 1)])
    def test_weight_is_broadcast(self, ours, theirs, shape) -> None:
        targets, weight = randn(3, 4, seed=3).sigmoid(), randn(*shape, seed=4).abs()
        full = weight.broadcast_to(3, 4)
        check_parity(
            lambda x: ours(x, targets, weight=weight),
            lambda x: (theirs(x, targets, reduction="none") * full).sum() / full.sum(),
            randn(3, 4),
        )

    @pytest.mark.parametrize("loss", [mse, binary_cross_entropy])
    def test_mask_as_weight(self, loss) -> None:
        outputs, targets = randn(3, 4), torch.rand(3, 4)
        mask = torch.tensor([[True], [False], [True]])
        expected = loss(outputs[::2], targets[::2])
        for weight in (mask, mask.int()):
            actual = loss(outputs, targets, weight=weight)
            torch.testing.assert_close(actual.value, expected.value, **EXACT)
            assert float(actual.weight) == 8

    @pytest.mark.parametrize("loss", [mse, binary_cross_entropy])
    def test_nothing_to_count(self, loss) -> None:
        outputs = randn(3, 4).requires_grad_()
        for actual in (
            loss(outputs, torch.zeros(3, 4), weight=torch.zeros(())),
            loss(outputs[:0], torch.zeros(0, 4)),
            loss(outputs[:0], torch.zeros(0, 4), weight=torch.ones(1)),
        ):
            assert numbers(actual) == (0.0, 0.0)
            (grad,) = torch.autograd.grad(actual.total, outputs)
            assert torch.equal(grad, torch.zeros_like(grad))

    @pytest.mark.parametrize("loss", [mse, binary_cross_entropy])
    def test_dtype_is_that_of_the_outputs(self, loss) -> None:
        targets = torch.tensor([0, 1])
        for dtype in (torch.float32, F64):
            for converted in (targets, targets.bool(), targets.double()):
                assert is_scalar(loss(randn(2, dtype=dtype), converted), dtype)

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    @pytest.mark.parametrize("loss", [mse, binary_cross_entropy])
    def test_elements_without_weight_may_be_infinite_or_nan(self, loss, value) -> None:
        weight = torch.tensor([1.0, 0.0, 0.0, 2.0])
        outputs = torch.tensor([0.5, value, 0.5, 0.25], requires_grad=True)
        actual = loss(outputs, torch.tensor([1.0, 0.0, value, 0.0]), weight=weight)
        expected = loss(outputs[[0, 3]], torch.tensor([1.0, 0.0]), weight=weight[[0, 3]])
        assert numbers(actual) == numbers(expected)
        grads = [torch.autograd.grad(mean.total, outputs)[0] for mean in (actual, expected)]
        assert torch.equal(*grads)
        assert grads[0][1] == 0

    def test_a_weight_of_zero_has_a_gradient(self) -> None:
        weight = torch.zeros(3, dtype=F64, requires_grad=True)
        (grad,) = torch.autograd.grad(mse(randn(3), torch.zeros(3), weight=weight).total, weight)
        assert torch.equal(grad, randn(3).square())

    @pytest.mark.parametrize("loss", [mse, binary_cross_entropy])
    def test_sum_of_weights_is_not_differentiated(self, loss) -> None:
        weight = torch.ones(3, dtype=F64, requires_grad=True)
        actual = loss(randn(3), torch.zeros(3), weight=weight)
        assert not actual.weight.requires_grad
        (grad,) = torch.autograd.grad(actual.total, weight)
        errors = [float(loss(x, torch.zeros(()))) for x in randn(3)]
        assert grad.tolist() == pytest.approx(errors)


class TestAccuracy:
    def test_by_hand(self) -> None:
        logits = torch.tensor([[[0.0, 1.0], [2.0, 1.0]], [[0.0, -1.0], [5.0, 6.0]]])
        labels = torch.tensor([[1, 1], [0, -100]])
        actual = accuracy(logits, labels)
        assert numbers(actual) == (2.0, 3.0)
        assert is_scalar(actual, torch.float32)

    def test_ignored_labels_never_count(self) -> None:
        logits = torch.eye(3)
        actual = accuracy(logits, torch.tensor([0, 1, 2]), ignore_index=1)
        assert numbers(actual) == (2.0, 2.0)
        nothing = accuracy(logits, torch.full((3,), -100))
        assert numbers(nothing) == (0.0, 0.0)

    def test_empty_and_scalar(self) -> None:
        nothing = accuracy(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
        assert numbers(nothing) == (0.0, 0.0)
        assert float(accuracy(torch.tensor([0.0, 1.0]), torch.tensor(1))) == 1.0

    def test_has_no_gradient(self) -> None:
        actual = accuracy(torch.eye(3, requires_grad=True), torch.arange(3))
        assert not actual.total.requires_grad


TRACED: dict[str, Callable[[Tensor, Tensor], Mean]] = {
    "cross_entropy": lambda x, y: cross_entropy(x, y),
    "smoothed": lambda x, y: cross_entropy(x, y, label_smoothing=0.1, weight=class_weights()),
    "binary_cross_entropy": lambda x, y: binary_cross_entropy(x, x.detach().sigmoid()),
    "weighted_mse": lambda x, y: mse(x, torch.zeros_like(x), weight=(y >= 0).unsqueeze(-1)),
    "accuracy": lambda x, y: accuracy(x, y),
}


@pytest.mark.parametrize("name", TRACED)
class TestTracing:
    def test_make_fx_with_fake_values(self, name: str) -> None:
        # With fake tensors, reading a value on the host is an error.
        def program(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            loss = TRACED[name](logits, labels)
            return loss.total, loss.weight

        graph = make_fx(program, tracing_mode="fake")(randn(4, 3, CLASSES), some_labels(4, 3))
        logits, labels = randn(4, 3, CLASSES, seed=8), some_labels(4, 3, seed=9)
        for actual, expected in zip(graph(logits, labels), program(logits, labels), strict=True):
            torch.testing.assert_close(actual, expected, **EXACT)

    def test_one_compiled_graph_for_any_batch(self, name: str) -> None:
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
        def program(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            loss = TRACED[name](logits, labels)
            return loss.total, loss.weight

        for size in (4, 6):
            logits, labels = randn(size, 3, CLASSES).requires_grad_(), some_labels(size, 3)
            expected = TRACED[name](logits, labels)
            total, weight = program(logits, labels)
            torch.testing.assert_close(total, expected.total, **EXACT)
            torch.testing.assert_close(weight, expected.weight, **EXACT)
            if total.requires_grad:
                grads = [torch.autograd.grad(x, logits)[0] for x in (total, expected.total)]
                torch.testing.assert_close(*grads, **EXACT)

    def test_vmap(self, name: str) -> None:
        def program(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            loss = TRACED[name](logits, labels)
            return loss.total, loss.weight.expand(())

        logits, labels = randn(4, 3, CLASSES), some_labels(4, 3)
        total, weight = torch.func.vmap(program)(logits, labels)
        totals, weights = zip(*(program(x, y) for x, y in zip(logits, labels, strict=True)), strict=True)
        torch.testing.assert_close(total, torch.stack(totals), **EXACT)
        torch.testing.assert_close(weight, torch.stack(weights), **EXACT)


LOGITS, LABELS = torch.zeros(4, 10), torch.zeros(4, dtype=torch.int64)


class TestErrors:
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
    def test_class_losses(self, function, logits, labels, message) -> None:
        with pytest.raises(LossError, match=rf"^{function.__name__}: .*{message}"):
            function(logits, labels)

    @pytest.mark.parametrize("smoothing", [-0.1, 1.1, float("nan")])
    def test_label_smoothing(self, smoothing: float) -> None:
        with pytest.raises(OptionError, match=rf"^cross_entropy: label_smoothing is {smoothing}, .*\[0, 1\]"):
            cross_entropy(LOGITS, LABELS, label_smoothing=smoothing)

    @pytest.mark.parametrize("weight", [torch.ones(9), torch.ones(4, 10), torch.ones(())])
    def test_class_weight(self, weight: Tensor) -> None:
        with pytest.raises(RuntimeError, match="weight tensor should be defined either for all 10 classes"):
            cross_entropy(LOGITS, LABELS, weight=weight)

    @pytest.mark.parametrize(
        ("function", "names"),
        [(mse, ("predictions", "targets")), (binary_cross_entropy, ("logits", "labels"))],
    )
    def test_elementwise(self, function, names: tuple[str, str]) -> None:
        start, outputs = f"^{function.__name__}: ", torch.zeros(4, 1)
        with pytest.raises(LossError, match=start + rf"{names[0]} have shape \(4, 1\) and {names[1]} \(4,\);"):
            function(outputs, torch.zeros(4))
        with pytest.raises(LossError, match=start + rf"{names[0]} are int64\[4, 1\]; .* floating"):
            function(outputs.long(), outputs)
        with pytest.raises(LossError, match=start + rf"{names[1]} are complex64\[4, 1\]; .* real"):
            function(outputs, outputs.to(torch.complex64))

    @pytest.mark.parametrize("function", [mse, binary_cross_entropy])
    @pytest.mark.parametrize("shape", [(4,), (2, 3), (1, 4, 3), (4, 0)])
    def test_elementwise_weight(self, function, shape: tuple[int, ...]) -> None:
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
def test_an_argument_that_is_no_tensor_is_refused(call, message):
    with pytest.raises(LossError, match=message):
        call()


@pytest.mark.parametrize("loss", [cross_entropy, binary_cross_entropy, mse], ids=lambda loss: loss.__name__)
def test_a_complex_weight_is_refused(loss):
    targets = torch.zeros(2, dtype=torch.int64) if loss is cross_entropy else torch.zeros(2, 3)
    with pytest.raises(LossError, match=rf"^{loss.__name__}: the weight is complex64\[3\]; it must be real"):
        loss(torch.zeros(2, 3), targets, weight=torch.ones(3, dtype=torch.complex64))
