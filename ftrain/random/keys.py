"""Counter-based random numbers: every draw is a pure function of a key, the same bits on every device.

A key is an int64 tensor of shape (2,) holding two 32-bit integers. Eager, traced, compiled, vmapped and recomputed code
draw the same bits (`ftrain.random.philox`). A key is used once: `split` it or `fold_in` something before the next draw,
because the same key gives the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsFloat, SupportsIndex

import torch
from torch import Tensor

from ftrain import _torch
from ftrain.backends import widest
from ftrain.errors import OptionError
from ftrain.random.host_keys import FOLD, halves, parts_of, wrap_key_data
from ftrain.random.philox import MASK, Words, full, philox

# The third counter word: draws, splits and folds of one key never evaluate the same block.
_BITS, _SPLIT = 0, 1

_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_INT64_MAX = (1 << 63) - 1


def key(seed: int) -> Tensor:
    """Make a key, on the CPU, from any integer that fits in 64 bits.

    A negative seed is the same as its two's complement. Raises `OptionError` outside -2**63 .. 2**64 - 1, and
    `ComposeError` if it is not an integer.

    >>> key(7)
    tensor([7, 0])
    """
    return wrap_key_data(halves("key", "seed", seed))


def split(key: Tensor, num: int = 2) -> Tensor:
    """Make `num` independent keys from one: int64 of shape (num, 2), on the key's device; (num, 4) from `for_examples`.

    Raises `OptionError` if `num` is not a whole number of at least 0.

    >>> first, second = split(key(0))
    """
    key, examples = parts_of("split", key)
    # Not `whole_number`, which makes a constant of the size of a graph.
    is_whole = isinstance(num, SupportsIndex) and not isinstance(num, bool)
    if not is_whole or num < 0:
        raise OptionError(f"split: num is {num!r}, needs a whole number of at least 0")
    keys = torch.stack(_blocks(key, torch.arange(num, device=key.device), _SPLIT)[:2], -1)
    return _join_key(keys, examples)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """Make the key that belongs to `data`, such as a step or microbatch number.

    Args:
        key: the parent.
        data: an integer that fits in 64 bits, or an integer tensor, which may be on another device.

    Returns a key on the parent's device; for a tensor with axes one key for each element, of shape (*data.shape, 2), or
    (*data.shape, 4) from a key of `for_examples`.
    Raises `OptionError` for other data.
    """
    key, examples = parts_of("fold_in", key)
    if isinstance(data, Tensor):
        if data.is_floating_point() or data.is_complex():
            raise OptionError(f"fold_in: data has dtype {data.dtype}; needs an integer tensor.")
        data = to_device(data, key.device).to(torch.int64)
        low, high = data & MASK, (data >> 32) & MASK
    else:
        lower, upper = halves("fold_in", "data", data)
        low, high = full(key, lower), full(key, upper)
    return _join_key(torch.stack(philox(key, (low, high, full(key, FOLD), full(key, 0)))[:2], -1), examples)


def for_examples(key: Tensor, start: int | Tensor, length: int) -> Tensor:
    """Make the key of a microbatch from the key of the batch: int64 of shape (4,), on the same device.

    A draw of n numbers for each of the `length` examples, in row-major order, then returns the rows of these examples
    in the same draw for the whole batch. This holds for a draw that has an axis and whose size `length` divides; any
    other draw is the same in every microbatch. A `permutation` is one of the examples of the microbatch alone. Keys
    made from this one (`split`, `fold_in`) have the same key data in every microbatch, and apply to the same examples.
    Under `vmap` over keys of examples, the numbers of different microbatches are independent, but not those of the
    whole batch. These have ``fold_in(key[:2], numbers)``, with the numbers of the examples in the batch: ``key[:2]`` is
    the key of the whole batch, also where it is not split.

    Args:
        key: the key of the batch, or of a microbatch to divide further.
        start: the number of the first example; a 0-d int64 tensor in a graph for many microbatches.
        length: the number of examples.

    Raises `OptionError` for a negative start, no example, or what is no integer or does not fit in 63 bits.

    >>> whole = bits(key(0), (5, 3))
    >>> torch.equal(bits(for_examples(key(0), 2, 2), (2, 3)), whole[2:4])
    True
    """
    key, examples = parts_of("for_examples", key)
    is_start = isinstance(start, Tensor) or (isinstance(start, SupportsIndex) and 0 <= start <= _INT64_MAX)
    if not is_start or not isinstance(length, SupportsIndex) or not 1 <= length <= _INT64_MAX:
        raise OptionError(
            f"for_examples: start = {start}, length = {length}; needs integers, at least 0 and 1, below 2**63."
        )
    first = (start if isinstance(start, Tensor) else full(key, start)) if examples is None else examples[0] + start
    return torch.cat([key, torch.stack([first, full(key, length)])])


def bits(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Draw uniform 32-bit integers, as int64 in 0 .. 2**32 - 1.

    Element i (in row-major order) depends on the key and on i only: a smaller draw is the beginning of
    a larger one. This holds for every draw in this module except `permutation`.
    """
    return _draw("bits", key, shape, 4, lambda block: block)


def uniform(
    key: Tensor,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    low: float = 0.0,
    high: float = 1.0,
) -> Tensor:
    """Draw uniformly from [low, high); never `high` itself, even after rounding to the dtype.

    A unit draw is a multiple of 2**-24 in float32, 2**-53 in float64, 2**-11 in float16 and 2**-8 in
    bfloat16. A range other than [0, 1) is mapped in float64 and then rounded to a value inside it; in
    float64 the last bit may then depend on whether a device fuses the multiplication and the addition. A device
    without float64 (`ftrain.backends.widest`) uses float32, with other last bits.

    Raises `OptionError` for other dtypes, for bounds beyond those of `dtype`, and if it has no value in [low, high).
    """
    digits = _digits("uniform", dtype)
    if (low, high) == (0.0, 1.0):
        return _draw("uniform", key, shape, _columns(dtype), lambda block: _unit(block, digits, dtype))
    smallest, largest = _range("uniform", low, high, dtype)
    # 29 bits times a unit draw of 24 is exact in float64, so fusing it with the sum changes nothing.
    mantissa, exponent = math.frexp(high - low)
    span = math.ldexp(round(math.ldexp(mantissa, 29)), exponent - 29) if digits < 53 else high - low
    wide = torch.float64 if digits == 53 else widest(key.device)
    unit = _draw("uniform", key, shape, _columns(dtype), lambda block: _unit(block, digits, wide))
    return (unit * span + low).to(dtype).clamp(smallest, largest)


def normal(key: Tensor, shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw from the standard normal distribution, by the transform of Box and Muller (1958).

    Radius and angle use 32 bits each, 53 for float64. It is evaluated in float64 and rounded to
    `dtype`: the last bits of log and cos differ between devices and compilers, but float32 results then
    differ only where the float64 value lies next to a tie, about once in 10**8 draws. float64 draws may
    differ in their last bits, as do all on a device without float64, which evaluates it in float32. Raises
    `OptionError` for a dtype that `uniform` does not draw.
    """
    digits = _digits("normal", dtype)

    def columns(block: Words) -> tuple[Tensor, ...]:
        units = _open_unit(block, digits)
        values: list[Tensor] = []
        for first, second in zip(units[::2], units[1::2], strict=True):
            radius, angle = (first.log() * -2.0).sqrt(), second * (2.0 * math.pi)
            values += [(radius * angle.cos()).to(dtype), (radius * angle.sin()).to(dtype)]
        return tuple(values)

    return _draw("normal", key, shape, _columns(dtype), columns)


def exponential(key: Tensor, shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw from the exponential distribution of rate 1; never zero. Evaluated as in `normal`."""
    digits = _digits("exponential", dtype)

    def columns(block: Words) -> tuple[Tensor, ...]:
        return tuple((-unit.log()).to(dtype) for unit in _open_unit(block, digits))

    drawn = _draw("exponential", key, shape, _columns(dtype), columns)
    return drawn.clamp(min=torch.finfo(dtype).tiny)


def bernoulli(key: Tensor, p: float, shape: Sequence[int]) -> Tensor:
    """Draw bools that are true with probability `p`, rounded to a multiple of 2**-32.

    The bits are compared as integers, so 0 and 1 are certain. Raises `OptionError` for p outside [0, 1].
    """
    _check_p("bernoulli", p)
    threshold = round(p * (1 << 32))
    return _draw("bernoulli", key, shape, 4, lambda block: tuple(word < threshold for word in block))


def dropout(key: Tensor, x: Tensor, p: float) -> Tensor:
    """Zero each element with probability `p` and scale the others by 1 / (1 - p).

    p = 0 returns `x`, p = 1 zeros. Draws on the device of `x`, to which the key is moved. The gradient is
    that of the elements that are kept. Raises `OptionError` for p outside [0, 1] or `x` not of a float dtype.
    """
    parts_of("dropout", key)  # Before it is moved to a device.
    _check_p("dropout", p)
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        what = f"has dtype {x.dtype}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
        raise OptionError(f"dropout: x {what}; needs a floating point tensor.")
    if p == 0:
        return x
    keep = bernoulli(to_device(key, x.device), 1.0 - p, x.shape)
    # Selected, not multiplied by a mask: an overflow in a dropped element must not become NaN.
    return torch.where(keep, x * keep_scale(p), 0.0)


def keep_scale(p: float) -> float:
    """Return 1 / (1 - p), the factor by which dropout scales; 1 for p = 1, when every element is zeroed."""
    return 1.0 / (1.0 - p) if p < 1 else 1.0


def randint(key: Tensor, shape: Sequence[int], low: int, high: int) -> Tensor:
    """Draw integers from [low, high), as int64; the bias is below (high - low) / 2**63.

    Raises `OptionError` for an empty range or one that does not fit.
    """
    is_whole = isinstance(low, SupportsIndex) and isinstance(high, SupportsIndex)
    if not is_whole or not -_INT64_MAX <= low < high <= _INT64_MAX or high - low > _INT64_MAX:
        raise OptionError(f"randint: low = {low}, high = {high}; needs integers, low < high, less than 2**63 apart.")

    def columns(block: Words) -> tuple[Tensor, ...]:
        return tuple(value % (high - low) + low for value in _join(block, 63))

    return _draw("randint", key, shape, 2, columns)


def permutation(key: Tensor, num: int) -> Tensor:
    """Draw an order of 0 .. num - 1, as int64 of shape (num,)."""
    # Stable, so that ties (one pair in 2**63) are ordered the same on every device.
    return torch.argsort(_draw("permutation", key, (num,), 2, lambda block: _join(block, 63)), stable=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor, from the host without waiting for the device."""
    # Safe for memory that is not pinned, because it is staged before the call returns.
    return tensor if tensor.device == device else tensor.to(device, non_blocking=tensor.device.type == "cpu")


def _draw(
    function: str,
    key: Tensor,
    shape: Sequence[int],
    num: int,
    columns: Callable[[Words], tuple[Tensor, ...]],
) -> Tensor:
    """Return a draw of a shape, of which block j of the cipher gives the elements num * j to num * j + num - 1.

    `columns` returns `num` tensors of numbers from the words of the blocks.
    """
    key, examples = parts_of(function, key)
    if not isinstance(shape, Iterable) or not all(isinstance(size, SupportsIndex) and size >= 0 for size in shape):
        raise OptionError(f"{function}: shape = {shape}; needs a sequence of sizes that are not negative.")
    size = math.prod(shape)
    index = torch.arange((size + num - 1) // num + (0 if examples is None else 1), device=key.device)
    if examples is None:
        # Interleaved after `columns`, because its results are smaller than the int64 words.
        drawn = torch.stack(columns(_blocks(key, index, _BITS)), -1)
    else:
        first = _first_of(key, examples, shape)
        rows = torch.stack(columns(_blocks(key, index + first // num, _BITS)))
        # Column j holds elements j, j + num, ... A draw that starts at another element uses other columns, or their
        # next rows. Which ones is computed on the device, so that one graph serves all microbatches.
        rows = torch.cat([rows[:, :-1], rows[:, 1:]])
        drawn = rows[first % num + torch.arange(num, device=key.device)].mT
    return drawn.reshape(-1)[:size].reshape(tuple(shape))


def _first_of(key: Tensor, examples: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the first element of a draw for some examples in the draw for the whole batch, as a 0-d tensor."""
    start, length = examples.unbind()
    size = full(key, math.prod(shape))
    # For a draw whose size `length` does not divide. Under vmap it may be a draw for one example, and must not start
    # where the draw of another microbatch does.
    indivisible = start * size if _torch.is_batched(key) else full(key, 0)
    return torch.where(size % length == 0, start * (size // length), indivisible) if shape else indivisible


def _blocks(key: Tensor, index: Tensor, domain: int) -> Words:
    return philox(key, (index & MASK, index >> 32, full(key, domain), full(key, 0)))


def _columns(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.float64 else 4


def _join(block: Words, num: int) -> tuple[Tensor, Tensor]:
    """Return two integers of `num` bits, 32 < num < 64, from a block."""
    left, right = num - 32, 64 - num
    return (block[0] << left) | (block[1] >> right), (block[2] << left) | (block[3] >> right)


def _unit(block: Words, digits: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return multiples of 2**-digits in [0, 1)."""
    values = _join(block, 53) if digits == 53 else tuple(word >> (32 - digits) for word in block)
    return tuple(value.to(dtype) * 2.0**-digits for value in values)


def _open_unit(block: Words, digits: int) -> tuple[Tensor, ...]:
    """Return float64 numbers in (0, 1): odd multiples of 2**-33, or of 2**-53 if 53 digits are needed.

    In float32, where a device has no float64, those next to 1 are 1.
    """
    if digits == 53:
        return tuple((value | 1).double() * 2.0**-53 for value in _join(block, 53))
    return tuple(((word << 1) | 1).to(widest(word.device)) * 2.0**-33 for word in block)


def _range(function: str, low: float, high: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return the smallest and the largest value of `dtype` in [low, high)."""
    are_numbers = isinstance(low, SupportsFloat) and isinstance(high, SupportsFloat)
    if not are_numbers or not (low < high and math.isfinite(high - low)):
        raise OptionError(f"{function}: low = {low}, high = {high}; needs finite numbers, low < high.")
    largest = torch.finfo(dtype).max
    if max(-low, high) > largest:
        raise OptionError(f"{function}: low = {low}, high = {high}; {dtype} has no values above {largest:g}.")
    smallest = -_round_down(-low, dtype)
    largest = _round_down(math.nextafter(high, -math.inf), dtype)
    if smallest > largest:
        raise OptionError(f"{function}: {dtype} has no value in [{low}, {high}); widen it or its dtype.")
    return smallest, largest


def _round_down(value: float, dtype: torch.dtype) -> float:
    """Return the largest value of `dtype` that is not above `value`."""
    info = torch.finfo(dtype)
    spacing = max(math.ldexp(info.eps, math.frexp(value)[1] - 1), info.smallest_normal * info.eps)
    return min(math.floor(value / spacing) * spacing, info.max)


def _digits(function: str, dtype: torch.dtype) -> int:
    if dtype not in _DIGITS:
        raise OptionError(f"{function}: dtype = {dtype}; needs one of {', '.join(map(str, _DIGITS))}.")
    return _DIGITS[dtype]


def _join_key(keys: Tensor, examples: Tensor | None) -> Tensor:
    return keys if examples is None else torch.cat([keys, examples.expand(*keys.shape[:-1], 2)], -1)


def _check_p(function: str, p: Any) -> None:
    is_number = isinstance(p, SupportsFloat) and not isinstance(p, Tensor)
    if not is_number or not 0 <= p <= 1:
        raise OptionError(f"{function}: p = {p}; needs a probability, 0 <= p <= 1, that is no tensor.")
