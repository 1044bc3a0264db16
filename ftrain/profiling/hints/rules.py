"""The rules of hints: each reads the facts, and yields hints where something makes the step slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ftrain.profiling.hints.facts import Facts, Product, Remedy
from ftrain.tree import dtype_name

WORTHWHILE_SHARE = 0.01
"""The smallest share of the work of all products for which there is a hint."""

MOSTLY = 0.5
"""The smallest share of the products in float32 for a hint at another dtype."""

FASTER_PRODUCTS, FASTER_STEP = 1.5, 1.1
"""How many times as fast products, or a step, must become to be worth a change."""

LAUNCHING = 0.2
"""The smallest share of the time of a step that launches must take for a hint."""

WAITING = 0.05
"""The smallest share of the time that the device waits for data for a hint."""

MOST_LISTED = 3
ADVICE = {
    "attn_mask": "Leave out the mask: is_causal=True takes the place of a causal one",
    "key_padding_mask": "Leave out the mask: lengths that fit, or ft.data.pack, take the place of padding",
    "dropout_p": "Drop out after attention and not within it",
    "need_weights": "Call it with need_weights=False",
}
"""What to do about the arguments that force a slow kernel of attention."""


class Hint(NamedTuple):
    """Something that makes a step slow.

    Args:
        name: of the rule.
        evidence: the facts, with numbers.
        advice: what to do.
    """

    name: str
    evidence: str
    advice: str

    def __str__(self) -> str:
        return f"{self.name}: {self.evidence}. {self.advice}."


def run_rules(facts: Facts) -> list[Hint]:
    """Return the hints of all rules."""
    return [hint for rule in RULES for hint in rule(facts)]


def _dimensions(facts: Facts) -> Iterator[Hint]:
    total = sum(product.flops for product in facts.products)
    shares = Counter[str]()
    for product in facts.products:
        if product.exact or product.flops < WORTHWHILE_SHARE * total:
            continue
        multiple = facts.multiple(product.dtype)
        for axis, length in (("rows", product.rows), ("inputs", product.inner), ("outputs", product.columns)):
            if length % multiple:
                padded = -(-length // multiple) * multiple
                advice = f"{padded:,} would be, {padded / length - 1:+.1%}"
                shares[f"{length:,} {axis} of {product.module or 'a product'} ({advice})"] += product.flops
    if shares:
        dtype = next(product.dtype for product in facts.products if not product.exact)
        listed = ", ".join(text for text, _ in shares.most_common(MOST_LISTED))
        more = f", and {len(shares) - MOST_LISTED} more" if len(shares) > MOST_LISTED else ""
        yield Hint(
            "dimensions",
            f"no multiples of {facts.multiple(dtype)}: {listed}{more}",
            "Pad the vocabulary, widths and batches; tensor cores work on whole tiles",
        )


def _tf32(facts: Facts) -> Iterator[Hint]:
    share = _share(facts, lambda product: product.exact)
    if facts.tf32 and share >= MOSTLY:
        yield Hint(
            "TF32 off",
            f"{share:.0%} of the products are in float32, and the device has TF32",
            'Use ft.with_amp("tf32")',
        )


def _narrow(facts: Facts) -> Iterator[Hint]:
    share = _share(facts, lambda product: product.exact)
    if (
        not facts.mixed
        and share >= MOSTLY
        and facts.gain >= FASTER_PRODUCTS
        and _speedup(facts) >= FASTER_STEP
        and not _does_not_help(facts, Remedy.BFLOAT16)
    ):
        yield Hint(
            "float32",
            f"{share:.0%} of the products are in float32, the largest {facts.gain:.1f} times as fast in bfloat16",
            'Use ft.with_amp("bf16")',
        )


def _emulated(facts: Facts) -> Iterator[Hint]:
    for dtype in facts.emulated:
        share = _share(facts, lambda product: product.dtype == dtype)  # noqa: B023
        if share >= WORTHWHILE_SHARE:
            yield Hint(
                "emulated dtype",
                f"{share:.0%} of the products are in {dtype_name(dtype)}, which this device emulates: "
                "slower than float32",
                'Use ft.with_amp("auto"), or compute in float32',
            )


def _speedup(facts: Facts) -> float:
    """Return how many times as fast a step would be if its products alone were faster (Amdahl 1967)."""
    products = min(facts.flops / facts.rates.get(torch.float32, float("inf")) / facts.seconds, 1.0)
    return 1 / (1 - products + products / facts.gain)


def _does_not_help(facts: Facts, remedy: Remedy) -> bool:
    """Return whether a remedy was measured, and its interval does not show that it is faster."""
    return remedy in facts.tried and facts.tried[remedy].low <= 1


def _share(facts: Facts, condition: Callable[[Product], bool]) -> float:
    """Return the share of the work of all products that is in those of a condition."""
    total = sum(product.flops for product in facts.products)
    return sum(product.flops for product in facts.products if condition(product)) / max(total, 1)


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
    starting, computing = facts.operations * facts.launch, facts.flops / max(facts.rates.values(), default=1.0)
    matters = starting > max(computing, LAUNCHING * facts.seconds)
    if not facts.compiled and matters and not _does_not_help(facts, Remedy.COMPILE):
        yield Hint(
            "launches",
            f"{facts.operations:,} operations take {starting * 1e3:.1f} ms to start at least "
            f"({facts.launch * 1e6:.1f} µs each), and their products {computing * 1e3:.1f} ms",
            "Use ft.compiled(), or a larger batch",
        )


def _batch(facts: Facts) -> Iterator[Hint]:
    if facts.doubled is not None and facts.doubled.low > FASTER_STEP:
        yield Hint(
            "small batch",
            f"twice the batch makes {facts.doubled.median:.2f} times the examples a second",
            "Use a larger batch, with the learning rate that suits it, if there is memory",
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
