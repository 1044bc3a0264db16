"""Torch's random operations (`nn.Dropout`, `torch.randn`, ...), drawing from a key, not a global generator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ftrain import _torch, backends, random
from ftrain._torch import operations
from ftrain.backends.transfers import is_abstract
from ftrain.errors import OptionError, TraceError
from ftrain.random.unfused import Unfused, is_inert

_Arguments: TypeAlias = dict[str, Any]
_Draw: TypeAlias = Callable[[Tensor, _Arguments], Any]

_CHUNK = 32
"""Number of draws whose keys are folded at once."""


class Keyed(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which torch's random operations draw from `key`, the n-th from ``fold_in(key, n)``.

    A graph that is traced in it has no random operation, only arithmetic on the key, and computes the same bits as
    eager mode. An operation that cannot draw from a key raises `TraceError`, as does one with a generator. Results are
    contiguous, also where the operation asks for another memory format. Attention and recurrent nets with dropout run
    without their fused kernels, which cannot draw from a key.

    Args:
        key: int64 tensor of shape (2,) from `ftrain.random.key`; moved to the device of each draw.
        on_host: whether all operations run on the host. No fused kernel draws there, so attention and recurrent nets
            are called unchanged, which takes less time.

    >>> with Keyed(random.key(0)) as first:
    ...     a = torch.rand(3)
    >>> with Keyed(random.key(0)):
    ...     b = torch.rand(3)
    >>> torch.equal(a, b), first.offset
    (True, 1)
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch prepare the branches of `torch.cond` while a graph is captured, as it does without a mode."""
        return _torch.is_capturing()

    def __init__(self, key: Tensor, *, on_host: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if _torch.is_batched(key):
            # Dispatch happens below the transforms of torch.func, where their tensors have no storage.
            raise TraceError(
                "Keyed: the key is a tensor of a torch.func transform. Enter Keyed outside of vmap (with "
                "randomness='different'), or draw with ftrain.random, which takes batched keys."
            )
        self.key = key
        self.offset = 0
        """Number of draws so far."""
        self.examples: tuple[int | Tensor, int] | None = None
        """In a microbatch, the number of its first example and its number of examples."""
        self._chunks: dict[tuple[int, torch.device], Tensor] = {}
        self._unfused: Any = nullcontext() if on_host else Unfused()

    def __enter__(self) -> Any:
        self._unfused.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._unfused.__exit__(*error)

    @contextmanager
    def for_examples(self, start: int | Tensor, length: int, offset: int) -> Iterator[None]:
        """Context that draws for some examples of a batch, as `random.for_examples` does, from draw `offset` on."""
        outer, self.offset = self.examples, offset
        self.examples = start + (outer[0] if outer is not None else 0), length
        try:
            yield
        finally:
            self.examples = outer

    @contextmanager
    def rewound(self, offset: int, examples: tuple[int | Tensor, int] | None = None) -> Iterator[None]:
        """Context that repeats the draws from number `offset` on, for `examples`. After it the current draws go on."""
        resumed = self.offset, self.examples
        self.offset, self.examples = offset, examples
        try:
            # `torch.autograd.grad` suspends modes of functions while it runs, and so while it recomputes.
            with self._unfused:
                yield
        finally:
            self.offset, self.examples = resumed

    @contextmanager
    def drawing_from(self, key: Tensor) -> Iterator[None]:
        """Context that draws from `key`: an equal key in another tensor, such as an input of a graph."""
        outer, self.key, self._chunks = (self.key, self._chunks), key, {}
        try:
            yield
        finally:
            self.key, self._chunks = outer

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Draw the results of random operations from the key; call other operations as they are."""
        kwargs = kwargs or {}
        # A nested tensor decomposes its operations itself.
        if operations.is_composite(func) and not any(isinstance(each, Tensor) and each.is_nested for each in args):
            # Torch has not decomposed it, which happens only in inference mode, and its parts may be random. Without
            # function modes, because `Unfused` would call the whole operation again.
            with _torch.without_functions(), self:
                return func.decompose(*args, **kwargs)
        if not _is_random(func):
            return func(*args, **kwargs)
        arguments = _bind(func, args, kwargs)
        if is_inert(arguments):
            return func(*args, **kwargs)
        return self._draw(func, arguments)

    def _draw(self, func: Any, arguments: _Arguments) -> Any:
        unbounded = arguments.get("to", 0) is None
        if func not in _DRAWS or unbounded or arguments.get("generator") is not None:
            raise TraceError(_refusal(func, arguments))
        if is_recomputing():
            raise TraceError(
                f"Keyed: {func} is recomputed by torch.utils.checkpoint, which does not know the key and would draw "
                "other numbers; use ft.remat() instead of the checkpointing of the model"
            )
        target: Any = arguments.get("self", arguments.get("input"))
        device = arguments.get("device") or (torch.get_default_device() if target is None else target.device)
        drawn = self._drawn(func, arguments, device)
        return target.copy_(drawn) if operations.schema_of(func).is_mutable else drawn

    def _drawn(self, func: Any, arguments: _Arguments, device: torch.device) -> Any:
        return _DRAWS[func](self._next(device), arguments)

    def _next(self, device: torch.device) -> Tensor:
        # A fold costs the same for many draws as for one.
        chunk, index = divmod(self.offset, _CHUNK)
        if (chunk, device) not in self._chunks:
            draws = torch.arange(chunk * _CHUNK, (chunk + 1) * _CHUNK, device=self.key.device)
            self._chunks[chunk, device] = random.to_device(random.fold_in(self.key, draws), device)
        self.offset += 1
        key = self._chunks[chunk, device][index]
        return key if self.examples is None else random.for_examples(key, *self.examples)


def is_recomputing() -> bool:
    """Whether `torch.utils.checkpoint` is recomputing now. It then has an active pack hook for saved tensors."""
    hook = _torch.saved_tensors_pack_hook()
    # The hook of `remat` hides the hooks that were active before it, and records whether one of them recomputes.
    hidden: bool = getattr(getattr(hook, "__self__", None), "is_recomputing", False)
    return hidden or _torch.recomputes(hook)


def current() -> Keyed | None:
    """Return the innermost active `Keyed`; None if there is none."""
    # Torch's stack of modes, because it is also set in autograd's threads during the backward pass.
    return next((mode for mode in _torch.active_modes()[::-1] if isinstance(mode, Keyed)), None)


def rng_snapshot(device: torch.device, inputs: Iterable[Tensor] = ()) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that returns a context in which torch's random operations draw what they would draw now.

    `inputs` are the inputs of the operations that will draw in it. If one has no values, nothing is recorded, because
    its device may not exist on this machine.
    """
    keyed = current()
    if keyed is not None:
        return functools.partial(keyed.rewound, keyed.offset, keyed.examples)
    if any(map(is_abstract, inputs)):
        return nullcontext
    snapshot = backends.of(device).generators
    restore_recorded = snapshot()

    @contextmanager
    def rewound() -> Iterator[None]:
        restore_current = snapshot()
        restore_recorded()
        try:
            yield
        finally:
            restore_current()

    return rewound


def is_draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this call of an operation draws random numbers."""
    return _is_random(func) and not is_inert(_bind(func, args, kwargs))


@functools.cache
def _is_random(func: Any) -> bool:
    return isinstance(func, _torch.OpOverload) and torch.Tag.nondeterministic_seeded in func.tags


def _bind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
    """Return the arguments of a call by name, with the defaults of the operation."""
    parameters = operations.schema_of(func).arguments
    names = [parameter.name for parameter in parameters]
    defaults = {parameter.name: parameter.default_value for parameter in parameters if parameter.has_default_value()}
    return defaults | dict(zip(names, args, strict=False)) | kwargs


def _refusal(func: Any, arguments: _Arguments) -> str:
    """Return the error text for an operation that cannot draw from a key."""
    if arguments.get("generator") is not None:
        return f"Keyed: {func} has a generator, whose state is not an input of the step. Remove the argument."
    advice = (
        "Draw it where the data is made, or with ftrain.random from the key of the step (rng=): one of n choices is "
        "(weights / ftrain.random.exponential(rng, weights.shape)).argmax(-1)."
    )
    if "dropout_p" in arguments:
        advice += " For attention, use torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or no dropout."
    return f"Keyed: {func} draws from a global generator, and cannot draw from a key. {advice}"


def _dtype(arguments: _Arguments, default: torch.dtype) -> torch.dtype:
    # Torch's schemas give some default dtypes as a number.
    dtype = arguments.get("dtype")
    return dtype if isinstance(dtype, torch.dtype) else default


def float_dtype_of(a: _Arguments) -> torch.dtype:
    """Return the dtype of the numbers that an operation draws: its argument, that of ``self``, or torch's default."""
    return _dtype(a, a["self"].dtype if "self" in a else torch.get_default_dtype())


def shape_of(a: _Arguments) -> Any:
    """Return the shape of the numbers that an operation draws: its argument ``size``, or the shape of ``self``."""
    return a["size"] if "size" in a else a["self"].shape


def _uniform(key: Tensor, a: _Arguments) -> Tensor:
    low, high = a.get("from", 0.0), a.get("to", 1.0)
    if low == high:
        return torch.full_like(a["self"], low)
    return random.uniform(key, shape_of(a), dtype=float_dtype_of(a), low=low, high=high)


def _normal(key: Tensor, a: _Arguments) -> Tensor:
    mean, std = a.get("mean", 0.0), a.get("std", 1.0)
    if std < 0:
        raise OptionError(f"normal: std = {std}; needs a number of at least 0.")
    drawn = random.normal(key, shape_of(a), dtype=float_dtype_of(a))
    return drawn if (mean, std) == (0.0, 1.0) else drawn.mul(std).add(mean)


def _normal_of_tensors(key: Tensor, a: _Arguments) -> Tensor:
    like: Tensor = a["mean"] + a["std"]
    return random.normal(key, like.shape, dtype=like.dtype).mul(a["std"]).add(a["mean"])


def _exponential(key: Tensor, a: _Arguments) -> Tensor:
    if not a["lambd"] > 0:
        raise OptionError(f"exponential: lambd = {a['lambd']}; needs a number above 0.")
    return random.exponential(key, shape_of(a), dtype=float_dtype_of(a)).div(a["lambd"])


def _bernoulli(key: Tensor, a: _Arguments) -> Tensor:
    like: Tensor = a["self"]
    p: float | Tensor = a.get("p", like)
    if not isinstance(p, Tensor):
        return random.bernoulli(key, p, like.shape).to(like.dtype)
    # Scaling by a power of two is exact in float32 and float64, so this is `random.bernoulli` per element.
    scaled = p.to(torch.promote_types(p.dtype, torch.float32)) * 2.0**32
    return (random.bits(key, like.shape) < scaled.round().to(torch.int64)).to(like.dtype)


def _randint(key: Tensor, a: _Arguments) -> Tensor:
    low: Any = a.get("low", a.get("from", 0))
    high: Any = a.get("high", a.get("to"))
    dtype = _dtype(a, a["self"].dtype if "self" in a else torch.int64)
    smallest, largest = _bounds(dtype)
    _require_bounds(f"randint: low = {low}, high = {high}", dtype, smallest <= low and high - 1 <= largest)
    return random.randint(key, shape_of(a), low, high).to(dtype)


def _randperm(key: Tensor, a: _Arguments) -> Tensor:
    dtype = _dtype(a, torch.int64)
    # Larger integers are rounded, so that some would be drawn twice.
    largest = 2 / torch.finfo(dtype).eps if dtype.is_floating_point else _bounds(dtype)[1]
    _require_bounds(f"randperm: n = {a['n']}", dtype, a["n"] - 1 <= largest)
    return random.permutation(key, a["n"]).to(dtype)


def _bounds(dtype: torch.dtype) -> tuple[float, float]:
    """Return the smallest and the largest value of a dtype."""
    info = torch.finfo(dtype) if dtype.is_floating_point else None if dtype == torch.bool else torch.iinfo(dtype)
    return (info.min, info.max) if info is not None else (0, 1)


def _require_bounds(call: str, dtype: torch.dtype, are_within: bool) -> None:
    """Check that a dtype has all integers that may be drawn. Raises an OptionError if not: they would wrap around."""
    if not are_within:
        raise OptionError(f"{call}; {dtype} does not have all these integers; draw in a wider dtype.")


def _native_dropout(key: Tensor, a: _Arguments) -> tuple[Tensor, Tensor]:
    keep = random.bernoulli(key, 1.0 - a["p"], a["input"].shape)
    return torch.where(keep, a["input"] * random.keep_scale(a["p"]), 0.0), keep


_OVERLOADS: dict[_Draw, str] = {
    _uniform: "rand.default rand.generator rand_like.default rand_like.generator uniform.default uniform_.default",
    _normal: """randn.default randn.generator randn_like.default randn_like.generator normal_functional.default
        normal_.default normal.float_float""",
    _normal_of_tensors: "normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor",
    _exponential: "exponential.default exponential_.default",
    _bernoulli: "bernoulli.default bernoulli.p bernoulli.Tensor bernoulli_.float bernoulli_.Tensor",
    _randint: """randint.default randint.generator randint.low randint.low_generator randint_like.default
        randint_like.low_dtype random_.to random_.from""",
    _randperm: "randperm.default randperm.generator",
    _native_dropout: "native_dropout.default",
}
_DRAWS = {attrgetter(name)(torch.ops.aten): draw for draw, names in _OVERLOADS.items() for name in names.split()}
