"""Keys of some examples of a batch: they draw the rows of these examples in a draw for the whole batch."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from ftrain import random
from ftrain.errors import OptionError
from ftrain.random.torch_ops import Keyed
from tests.random.draws import DRAWS, assert_same_bits


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    shape=st.lists(st.integers(0, 4), max_size=3),
    derive=st.sampled_from([lambda key: key, lambda key: random.fold_in(key, 3), lambda key: random.split(key, 5)[4]]),
)
def test_microbatches_draw_the_numbers_of_their_examples(lengths, shape, derive):
    key = random.key(21)
    for draw in DRAWS:
        whole = draw(derive(key), (sum(lengths), *shape))
        start = 0
        for length in lengths:
            drawn = draw(derive(random.for_examples(key, start, length)), (length, *shape))
            assert_same_bits(drawn, whole[start : start + length])
            start += length


def test_a_microbatch_of_a_microbatch_draws_the_numbers_of_its_examples():
    key = random.key(22)
    inner = random.for_examples(random.for_examples(key, 3, 6), 2, 4)
    assert_same_bits(random.bits(inner, (4, 3)), random.bits(key, (10, 3))[5:9])
    assert_same_bits(random.dropout(inner, torch.ones(4, 3), 0.5), random.dropout(key, torch.ones(10, 3), 0.5)[5:9])


def test_draws_that_are_not_for_each_example_are_the_same_in_every_microbatch():
    key = random.key(23)
    for start in (0, 4, 8):
        microbatch_key = random.for_examples(key, start, 4)
        for shape in ((), (5,), (3, 7)):  # 4 examples do not divide 5 or 21 numbers.
            assert_same_bits(random.normal(microbatch_key, shape), random.normal(key, shape))


def test_keys_of_every_microbatch_hold_the_two_words_of_the_batchs_key():
    key = random.key(23)
    for start in (0, 4, 8):
        microbatch_key = random.for_examples(key, start, 4)
        assert random.key_data(microbatch_key) == random.key_data(key)
        for derive in (lambda key: random.split(key, 3), lambda key: random.fold_in(key, 1)):
            # The two words after them are the first example and the number of examples.
            assert_same_bits(derive(microbatch_key)[..., :2], derive(key))


def test_a_negative_start_no_example_and_fractions_are_refused():
    with pytest.raises(OptionError, match=r"for_examples: start = 1.5, length = 2; needs integers"):
        random.for_examples(random.key(0), 1.5, 2)
    with pytest.raises(OptionError, match=r"for_examples: start = 1, length = None; needs integers"):
        random.for_examples(random.key(0), 1, None)
    with pytest.raises(OptionError, match=r"for_examples: start = -1, length = 2"):
        random.for_examples(random.key(0), -1, 2)
    with pytest.raises(OptionError, match=r"for_examples: start = 0, length = 0"):
        random.for_examples(random.key(0), 0, 0)
    with pytest.raises(OptionError, match=r"for_examples: start = 9223372036854775808, length = 2; .* below 2\*\*63"):
        random.for_examples(random.key(0), 2**63, 2)
    with pytest.raises(OptionError, match=r"for_examples: start = 0, length = 9223372036854775808"):
        random.for_examples(random.key(0), 0, 2**63)


@pytest.mark.parametrize("size", [1, 3, 4, 6])
def test_keys_of_examples_under_vmap_draw_different_numbers_in_every_microbatch(size):
    drawn = []
    for start in (0, 3):
        keys = random.split(random.for_examples(random.key(24), start, 3), 3)
        drawn += torch.func.vmap(lambda key: random.bits(key, (size,)))(keys).reshape(-1).tolist()
        drawn += torch.func.vmap(lambda key: random.bits(random.fold_in(key, 1), ()))(keys).tolist()
    assert len(set(drawn)) == len(drawn)


def test_keys_of_numbered_examples_under_vmap_draw_the_same_in_a_microbatch():
    def draw(key, numbers):
        keys = random.fold_in(key[:2], numbers)
        return torch.func.vmap(lambda key: random.normal(random.fold_in(key, 1), (3,)))(keys)

    key, numbers = random.key(24), torch.tensor([7, 3, 9, 4, 0])
    assert_same_bits(draw(random.for_examples(key, 2, 3), numbers[2:]), draw(key, numbers)[2:])


def draws_of_microbatch(key):
    """Return draws of 4 examples: three numbers for each, two rows of bools for each, and a word for all."""
    return random.normal(key, (4, 3)), random.bernoulli(random.fold_in(key, 1), 0.5, (8, 3)), random.bits(key, ())


def keys_of_microbatches():
    return torch.stack([random.for_examples(random.key(25), start, 4) for start in (0, 4, 9)])


def test_one_graph_serves_every_microbatch():
    """The start of a microbatch is an input of the graph, not a constant."""
    traced = make_fx(draws_of_microbatch, tracing_mode="fake")(keys_of_microbatches()[0])
    assert not [node for node in traced.graph.nodes if node.op == "get_attr"]
    compiled = torch.compile(draws_of_microbatch, backend="aot_eager", fullgraph=True)
    for key in keys_of_microbatches():
        expected = draws_of_microbatch(key)
        assert_same_bits(traced(key), expected)
        assert_same_bits(compiled(key), expected)


def test_vmap_over_keys_of_microbatches_equals_a_loop():
    # Without the draw of shape (), which under vmap may be a draw for one example.
    draws = torch.func.vmap(lambda key: draws_of_microbatch(key)[:2])(keys_of_microbatches())
    normals, masks, _ = zip(*map(draws_of_microbatch, keys_of_microbatches()), strict=True)
    assert_same_bits(draws, (torch.stack(normals), torch.stack(masks)))


def draw_by_torch(x):
    return F.dropout(x, 0.5), F.dropout1d(x, 0.5), torch.rand_like(x), torch.randn(len(x), 3, dtype=torch.float64)


def test_torchs_operations_draw_the_numbers_of_their_examples():
    key, x = random.key(26), torch.linspace(-1, 1, 40).reshape(8, 5)
    with Keyed(key):
        torch.rand(2)
        whole = draw_by_torch(x)
    with Keyed(key) as keyed:
        # From draw 1 on: draw 0 was that of `rand`.
        with keyed.for_examples(0, 3, 1):
            assert_same_bits(draw_by_torch(x[:3]), tuple(tensor[:3] for tensor in whole))
        with keyed.for_examples(3, 5, 1), keyed.for_examples(1, 4, 1):
            assert_same_bits(draw_by_torch(x[4:]), tuple(tensor[4:] for tensor in whole))


def test_rewound_repeats_the_draws_of_its_examples_and_restores_those_of_the_microbatch():
    key, x = random.key(27), torch.ones(8, 5)
    with Keyed(key):
        first, second, third = (F.dropout(x, 0.5) for _ in range(3))
    with Keyed(key) as keyed, keyed.for_examples(3, 5, 0):
        F.dropout(x[3:], 0.5)
        assert_same_bits(F.dropout(x[3:], 0.5), second[3:])
        with keyed.rewound(0):
            assert_same_bits(F.dropout(x, 0.5), first)
        with keyed.rewound(0, (0, 2)):
            assert_same_bits(F.dropout(x[:2], 0.5), first[:2])
        assert_same_bits(F.dropout(x[3:], 0.5), third[3:])


def test_draws_after_microbatches_are_those_after_the_batch():
    key, x = random.key(26), torch.linspace(-1, 1, 40).reshape(8, 5)
    with Keyed(key) as keyed:
        torch.rand(2)
        start = keyed.offset
        draw_by_torch(x)
        end = keyed.offset
        expected = torch.rand(3)
    with Keyed(key) as keyed:
        torch.rand(2)
        with keyed.for_examples(0, 3, start):
            draw_by_torch(x[:3])
        with keyed.for_examples(3, 5, start):
            draw_by_torch(x[3:])
            with keyed.rewound(start):
                F.dropout(x[3:], 0.5)
        assert (keyed.offset, keyed.examples) == (end, None)
        assert_same_bits(torch.rand(3), expected)
