"""The rules of `hints`: functions that yield hints on how to make a step faster, from facts about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import torch

from ftrain.profiling.timing import Interval, Loading
from ftrain.tree import dtype_name

SLOWEST, MIDDLE, FASTEST = range(3)
"""Ranks of attention kernels: not fused, memory-efficient, and flash."""

WORTHWHILE_SHARE = 0.01
"""The smallest share of the FLOPs of all matmuls that is worth a hint."""

MOSTLY = 0.5
"""The smallest share of the matmuls in float32 for a hint to use TF32."""

FASTER = 1.1
"""The smallest speedup of a step that is worth a hint."""

LAUNCHING = 0.2
"""The smallest share of the time of a step for a hint about launches."""

WAITING = 0.05
"""The smallest share of the time for a hint about waiting for data."""

MOST_LISTED = 3
ADVICE = {
    "attn_mask": "Leave out the mask: is_causal=True replaces a causal one",
    "key_padding_mask": "Leave out the mask: use sequences of one length, or ft.data.pack, instead of padding",
    "dropout_p": "Apply dropout after attention, not within it",
    "need_weights": "Call it with need_weights=False",
}
"""Argument that forces a slow kernel of attention -> what to do."""


class Remedy(Enum):
    """Advice of a rule that `ftrain.ladder` measures, so that it is not given if it was measured not to help."""

    LARGER_BATCH = auto()
    BFLOAT16 = auto()
    COMPILE = auto()


@dataclass(frozen=True)
class Matmul:
    """A matrix multiplication, ``(rows, inner) @ (inner, columns)``, in the module of this dotted name."""

    module: str
    rows: int
    inner: int
    columns: int
    dtype: torch.dtype
    exact: bool
    """Whether it is computed in float32 or float64, and not in TF32."""
    flops: int


@dataclass(frozen=True)
class Attention:
    """A call of `scaled_dot_product_attention` or `multi_head_attention_forward` in the module of this dotted name."""

    module: str
    rank: int
    """The rank of its kernel, `SLOWEST` to `FASTEST`."""
    causes: Mapping[str, str]
    """Name -> value of the arguments that force a slower kernel."""


@dataclass(frozen=True)
class Facts:
    """All facts about a step, its batch and its device that the rules read."""

    matmuls: Sequence[Matmul]
    """The matmuls of the forward pass in all microbatches; `attentions` too."""
    attentions: Sequence[Attention]
    compiled: bool
    mixed: bool
    operations: int
    flops: int
    """Floating-point operations of all matmuls of the step."""
    multiple: Callable[[torch.dtype], int]
    """``dtype -> number`` of which lengths of axes should be multiples."""
    tf32: bool
    rate: float
    """Floating-point operations per second of a large matmul, in the dtype of the largest one of the step."""
    launch: float
    """Seconds to launch an operation."""
    seconds: float
    loading: Loading | None = None
    tried: Mapping[Remedy, Interval] = field(default_factory=dict)
    """Remedy that was measured -> examples per second with it, relative to the step."""
    emulated: Sequence[torch.dtype] = ()
    """The dtypes that the device emulates: it converts to float32 and back."""


class Hint(NamedTuple):
    """A cause that makes a step slow: the name of its rule, the measured evidence, and advice."""

    name: str
    evidence: str
    advice: str

    def __str__(self) -> str:
        return f"{self.name}: {self.evidence}. {self.advice}."


def run_rules(facts: Facts) -> list[Hint]:
    """Return the hints of all rules."""
    return [hint for rule in RULES for hint in rule(facts)]


def _dimensions(facts: Facts) -> Iterator[Hint]:
    total = sum(matmul.flops for matmul in facts.matmuls)
    shares = Counter[str]()
    for matmul in facts.matmuls:
        if matmul.exact or matmul.flops < WORTHWHILE_SHARE * total:
            continue
        multiple = facts.multiple(matmul.dtype)
        for axis, length in (("rows", matmul.rows), ("inputs", matmul.inner), ("outputs", matmul.columns)):
            if length % multiple:
                padded = -(-length // multiple) * multiple
                advice = f"{padded:,} would be, {padded / length - 1:+.1%}"
                shares[f"{length:,} {axis} of {matmul.module or 'a matmul'} ({advice})"] += matmul.flops
    if shares:
        dtype = next(matmul.dtype for matmul in facts.matmuls if not matmul.exact)
        listed = ", ".join(text for text, _ in shares.most_common(MOST_LISTED))
        more = f", and {len(shares) - MOST_LISTED} more" if len(shares) > MOST_LISTED else ""
        yield Hint(
            "dimensions",
            f"not multiples of {facts.multiple(dtype)}: {listed}{more}",
            "Pad the vocabulary, widths and batches; tensor cores work on whole tiles",
        )


def _tf32(facts: Facts) -> Iterator[Hint]:
    share = _share(facts, lambda matmul: matmul.exact and matmul.dtype == torch.float32)
    if facts.tf32 and share >= MOSTLY:
        yield Hint(
            "TF32 off",
            f"{share:.0%} of the matmuls are in float32, and the device has TF32",
            'Use ft.with_amp("tf32")',
        )


def _narrow(facts: Facts) -> Iterator[Hint]:
    narrow = facts.tried.get(Remedy.BFLOAT16)
    if not facts.mixed and narrow is not None and narrow.low > FASTER:
        yield Hint("float32", f"the step is {narrow.median:.2f} times as fast in bfloat16", 'Use ft.with_amp("bf16")')


def _emulated(facts: Facts) -> Iterator[Hint]:
    for dtype in facts.emulated:
        share = _share(facts, lambda matmul: matmul.dtype == dtype)  # noqa: B023
        if share >= WORTHWHILE_SHARE:
            yield Hint(
                "emulated dtype",
                f"{share:.0%} of the matmuls are in {dtype_name(dtype)}, which this device emulates: "
                "slower than float32",
                'Use ft.with_amp("auto"), or compute in float32',
            )


def _share(facts: Facts, condition: Callable[[Matmul], bool]) -> float:
    """Return the share of the matmuls that meet a condition, by FLOPs."""
    total = sum(matmul.flops for matmul in facts.matmuls)
    return sum(matmul.flops for matmul in facts.matmuls if condition(matmul)) / max(total, 1)


def _attention(facts: Facts) -> Iterator[Hint]:
    slow = [call for call in facts.attentions if call.causes]
    if slow:
        causes = ", ".join(f"{name}={value}" for name, value in slow[0].causes.items())
        kernel = "a slower kernel" if slow[0].rank else "no fused kernel"
        yield Hint(
            "attention",
            f"{len(slow)} of {len(facts.attentions)} calls run with {kernel} because of {causes}",
            ". ".join(ADVICE[name] for name in slow[0].causes),
        )


def _launches(facts: Facts) -> Iterator[Hint]:
    launching, computing = facts.operations * facts.launch, facts.flops / facts.rate
    is_launch_bound = launching > max(computing, LAUNCHING * facts.seconds)
    compiled = facts.tried.get(Remedy.COMPILE)
    helps = compiled is None or compiled.low > 1
    if not facts.compiled and is_launch_bound and helps:
        yield Hint(
            "launches",
            f"{facts.operations:,} operations take at least {launching * 1e3:.1f} ms to launch "
            f"({facts.launch * 1e6:.1f} µs each), and their matmuls {computing * 1e3:.1f} ms",
            "Use ft.compiled(), or a larger batch",
        )


def _batch(facts: Facts) -> Iterator[Hint]:
    doubled = facts.tried.get(Remedy.LARGER_BATCH)
    if doubled is not None and doubled.low > FASTER:
        yield Hint(
            "small batch",
            f"twice the batch makes {doubled.median:.2f} times the examples per second",
            "Use a larger batch, and adapt the learning rate, if there is memory",
        )


def _loader(facts: Facts) -> Iterator[Hint]:
    loading = facts.loading
    if loading is not None and loading.waiting > WAITING:
        yield Hint(
            "loader",
            f"a batch takes {loading.alone * 1e3:.1f} ms to load and {loading.ready * 1e3:.1f} ms to train on; the "
            f"device waits {loading.waiting:.0%} of the time",
            "Use more workers (num_workers=), ft.data.prefetch, or data that is prepared once",
        )


RULES = _loader, _launches, _batch, _emulated, _narrow, _tf32, _dimensions, _attention
