"""The rules of hints: each reads the facts, and yields hints where something makes the step slow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ftrain.profiling.hints.facts import Facts

SHARE = 0.01
"""The smallest share of the work of all products for which there is a hint."""

MANY = 0.5
GAIN = 1.5
"""How many times as fast narrow products must be, to be worth their rounding."""

LAUNCHING = 0.2
"""The smallest share of the time of a step that launches must take for a hint."""

MORE = 1.1
IDLE = 0.05
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
    total = sum(each.flops for each in facts.products)
    shares: dict[str, float] = {}
    for each in facts.products:
        multiple = 1 if each.exact else facts.multiple(each.dtype)
        for axis, length in (("rows", each.rows), ("inputs", each.inner), ("outputs", each.columns)):
            if length % multiple and each.flops >= SHARE * total:
                padded = -(-length // multiple) * multiple
                more = f"{padded:,} would be, {padded / length - 1:+.1%}"
                text = f"{length:,} {axis} of {each.module or 'a product'} ({more})"
                shares[text] = shares.get(text, 0.0) + each.flops / total
    if shares:
        dtype = next(each.dtype for each in facts.products if not each.exact)
        listed = sorted(shares, key=lambda text: -shares[text])
        more = f", and {len(listed) - MOST_LISTED} more" if len(listed) > MOST_LISTED else ""
        yield Hint(
            "dimensions",
            f"no multiples of {facts.multiple(dtype)}: {', '.join(listed[:MOST_LISTED])}{more}",
            "Pad the vocabulary, widths and batches; tensor cores work on whole tiles",
        )


def _tf32(facts: Facts) -> Iterator[Hint]:
    share = _exact(facts)
    if facts.tf32 and share >= MANY:
        yield Hint(
            "TF32 off",
            f"{share:.0%} of the products are in float32, and the device has TF32",
            'Use ft.with_amp("tf32")',
        )


def _narrow(facts: Facts) -> Iterator[Hint]:
    share = _exact(facts)
    if (
        not facts.mixed
        and share >= MANY
        and facts.gain >= GAIN
        and _speedup(facts) >= MORE
        and not _does_not_help(facts, 'with_amp("bf16")')
    ):
        yield Hint(
            "float32",
            f"{share:.0%} of the products are in float32, the largest {facts.gain:.1f} times as fast in bfloat16",
            'Use ft.with_amp("bf16")',
        )


def _emulated(facts: Facts) -> Iterator[Hint]:
    """Hint at products in a narrow dtype that the device converts to float32 and back."""
    total = sum(each.flops for each in facts.products)
    for dtype in facts.emulated:
        share = sum(each.flops for each in facts.products if each.dtype == dtype) / max(total, 1)
        if share >= SHARE:
            name = str(dtype).removeprefix("torch.")
            yield Hint(
                "emulated dtype",
                f"{share:.0%} of the products are in {name}, which this device emulates: slower than float32",
                'Use ft.with_amp("auto"), or compute in float32',
            )


def _speedup(facts: Facts) -> float:
    """Return how many times as fast a step would be if its products alone were faster (Amdahl 1967)."""
    products = min(facts.flops / facts.rates.get(torch.float32, float("inf")) / facts.seconds, 1.0)
    return 1 / (1 - products + products / facts.gain)


def _does_not_help(facts: Facts, technique: str) -> bool:
    """Return whether a technique was measured, and its interval does not show that it is faster."""
    return technique in facts.tried and facts.tried[technique].low <= 1


def _exact(facts: Facts) -> float:
    """Return the share of the products that is computed in float32."""
    total = sum(each.flops for each in facts.products)
    return sum(each.flops for each in facts.products if each.exact) / max(total, 1)


def _attention(facts: Facts) -> Iterator[Hint]:
    slow = [each for each in facts.attentions if each.causes]
    if slow:
        causes = ", ".join(f"{name}={what}" for name, what in slow[0].causes.items())
        kernel = "a slower kernel" if slow[0].rank else "no fused kernel"
        yield Hint(
            "attention",
            f"{len(slow)} of {len(facts.attentions)} calls run with {kernel} because of {causes}",
            ". ".join(ADVICE[name] for name in slow[0].causes),
        )


def _launches(facts: Facts) -> Iterator[Hint]:
    starting, computing = facts.operations * facts.launch, facts.flops / max(facts.rates.values(), default=1.0)
    matters = starting > max(computing, LAUNCHING * facts.seconds)
    if not facts.compiled and matters and not _does_not_help(facts, "compiled()"):
        yield Hint(
            "launches",
            f"{facts.operations:,} operations take {starting * 1e3:.1f} ms to start at least "
            f"({facts.launch * 1e6:.1f} µs each), and their products {computing * 1e3:.1f} ms",
            "Use ft.compiled(), or a larger batch",
        )


def _batch(facts: Facts) -> Iterator[Hint]:
    if facts.doubled is not None and facts.doubled.low > MORE:
        yield Hint(
            "small batch",
            f"twice the batch makes {facts.doubled.median:.2f} times the examples a second",
            "Use a larger batch, with the learning rate that suits it, if there is memory",
        )


def _loader(facts: Facts) -> Iterator[Hint]:
    loading = facts.loading
    if loading is not None and loading.waiting > IDLE:
        yield Hint(
            "loader",
            f"a batch takes {loading.alone * 1e3:.1f} ms to load and {loading.ready * 1e3:.1f} ms to train on; the "
            f"device waits {loading.waiting:.0%} of the time",
            "Use more workers (num_workers=), ft.data.prefetch, or data that is prepared once",
        )


RULES = _loader, _launches, _batch, _emulated, _narrow, _tf32, _dimensions, _attention
