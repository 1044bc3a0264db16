"""What ftrain claims of its speed, and how the rows bear it out. A claim that falls short is printed as it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from bench import field
from bench.cases import c5, c6, c9, c10, c11, c12, c13
from bench.rows import ADDED, MEMORY, RATIO, TIME, WITHIN, Row
from bench.tasks import Entrant

Find = Callable[[Sequence[Row]], Iterable[Row]]


@dataclass(frozen=True)
class Claim:
    """A number that must not be larger than one bound, and aims at another; of all rows the worst one counts."""

    text: str
    unit: str
    must: float
    aim: float
    find: Find
    tried: str = ""
    """What was done about it, which the report says where it falls short."""


@dataclass(frozen=True)
class Verdict:
    """The worst row for a claim, if there is one, how many rows there are, and what that means."""

    claim: Claim
    worst: Row | None
    count: int

    @property
    def word(self) -> str:
        """One of ``aim``, ``must``, ``short`` and ``not measured``."""
        if self.worst is None:
            return "not measured"
        if self.worst.median <= self.claim.aim:
            return "aim"
        return "must" if self.worst.median <= self.claim.must else "short"


def judge(rows: Sequence[Row], claims: Sequence[Claim] | None = None) -> list[Verdict]:
    """Hold claims against rows; the machine a row is from does not matter, and is shown."""
    verdicts = []
    for claim in CLAIMS if claims is None else claims:
        measured = [row for row in claim.find(rows) if not math.isnan(row.median)]
        verdicts.append(Verdict(claim, max(measured, key=lambda row: row.median, default=None), len(measured)))
    return verdicts


def ratios(variant: str, others: Iterable[str], questions: Iterable[str], prefix: str = "") -> Find:
    """Find the ratios of one variant to others, in questions whose names begin in one of these ways."""
    metrics, starts = {f"{prefix}{RATIO}{other}" for other in others}, tuple(f"{name} " for name in questions)

    def find(rows: Sequence[Row]) -> Iterator[Row]:
        return (r for r in rows if r.variant == variant and r.metric in metrics and r.question.startswith(starts))

    return find


def _trainers(best: bool) -> list[str]:
    return [entrant.name for entrant in field.TRAINERS if entrant.best == best]


def _added_by_fit(rows: Sequence[Row]) -> Iterator[Row]:
    pairs = {(fit.name, f"{ADDED}{c6.LOOPS[way].name}") for way, fit in c6.FITS.items()}
    return (row for row in rows if row.question == c6.QUESTION and (row.variant, row.metric) in pairs)


def _added_by_leaf(rows: Sequence[Row]) -> Iterator[Row]:
    return (row for row in rows if row.metric == "added a leaf" and row.variant == field.OURS_CALLS.name)


def _remat(rows: Sequence[Row]) -> list[Row]:
    """The cheapest kind of remat of those that at least halve what is held within a step."""
    of = [row for row in rows if row.question == c5.REMAT]
    held = f"{WITHIN}, {RATIO}{c5.KEEPING_ALL.name}"
    halved = {row.variant for row in of if row.metric == held and row.median <= 0.5}
    times = [row for row in of if row.metric == f"{RATIO}{c5.KEEPING_ALL.name}" and row.variant in halved]
    return sorted(times, key=lambda row: row.median)[:1]


def _by_hand(prefix: str = "") -> Find:
    """The ratios of techniques to the same by hand."""
    pairs = [(name, hand.name, ours.name) for name, (_, hand, ours) in c9.PAIRS.items()]
    pairs += [(name, hand.name, ours.name) for name, _, hand, ours in (c9.ON_DEVICE, c9.COMPILED)]
    wanted = {(name, ours, f"{prefix}{RATIO}{hand}") for name, hand, ours in pairs}

    def find(rows: Sequence[Row]) -> Iterator[Row]:
        return (row for row in rows if (row.question, row.variant, row.metric) in wanted)

    return find


def _of_sam(other: Entrant) -> Find:
    """The ratio of a step with `sam` to another one."""
    wanted = (c9.SAM[0], c9.SAM[-1].name, f"{RATIO}{other.name}")
    return lambda rows: (row for row in rows if (row.question, row.variant, row.metric) == wanted)


def _of_budget(metric: str) -> Find:
    """A row of rematerialisation by a budget, which computes no more again than it must."""

    def find(rows: Sequence[Row]) -> Iterator[Row]:
        return (row for row in rows if (row.question, row.variant, row.metric) == (c9.FULL, c9.BUDGETED.name, metric))

    return find


def _on_ranks(level: int, others: Iterable[Entrant], prefix: str = "") -> Find:
    """The ratios of a level to others, on any number of ranks."""
    return ratios(c11.ours(level).name, [other.name for other in others], ("C11",), prefix)


EAGER, COMPILED = field.OURS_EAGER.name, field.OURS_COMPILED.name
HAND_COMPILED = [entrant.name for entrant in field.HAND if entrant.kind == "hand compile"]
JAX = [entrant.name for entrant in field.JAX]
UPDATE, UPDATE_COMPILED = field.OURS_UPDATE.name, field.OURS_UPDATE_COMPILED.name
TORCHS = [field.TORCH.name, field.TORCH_DEFAULT.name]
ALL = ("C1", "C2", "C3")

LOADER_TRIED = (
    "The worst is one batch after another in this process, of a dataset that does not say whether its samples draw: to "
    "see that nothing was drawn, and to put Python's 625 words back, takes 5% of the time of a batch (1.018 before). "
    "With a training step between the batches it is 0.97 to 0.99, with `draws = False` 0.94 to 0.96, by machine. The "
    "rest was brought down: a number of torch's generator in place of its state, indices of many batches at a time, "
    "dicts of tensors stacked without a search through types."
)
LEVEL_0_TRIED = (
    "It was 1.07 to 1.10 while autograd held all gradients back until the backward pass was over. Now buckets start "
    "when complete, a plain loss needs no sum of weights, and loss and metrics are summed meanwhile: 1.00 to 1.07 of "
    "DDP from run to run. A node of autograd for each bucket in place of a hook for each gradient took 2% off (in "
    "turns, 2 ranks: 1.17 of the loop without communication for 1.19, and DDP at its best 1.13 to 1.18). What remains, "
    "by a trace of 2 ranks, of 105 ms: clipping out of place 0.4, the sum of loss and metrics 0.4, and buffers in new "
    "memory. Buckets of at least 1, 2, 4 and 8 MiB took 1.05, 1.02, 1.00 and 0.99 of DDP on 2 ranks, and 1.11, 1.04, "
    "1.02 and 0.99 on 4: to overlap costs a CPU more than it saves. While all entrants shared processes, DDP, which "
    "keeps its buffers, gained 1 to 2% on what allocates them anew. In processes of their own, of DDP at its best: "
    "clipping in place took 0.5% off, and a buffer that is kept nothing that was seen, on an AMD EPYC of family 26."
)
LEVEL_1_TRIED = (
    "Each tensor is divided, so that gathered parameters and scattered gradients are copied between flat buffers and "
    "tensors, and gloo has no reduce-scatter; ZeroRedundancyOptimizer sends whole tensors from their owners without "
    "copies, and its best form is nearly as fast as DDP alone. Gathers in buckets of 2 MB, so that copies overlap with "
    "what travels, gained nothing (1.13 of DDP, and 1.10 in one piece); buckets of 8 MiB cost 4%. A loop that computes "
    "and exchanges as many bytes, without a copy of them and without a sum (the bound in C11), takes 0.78 of "
    "ZeroRedundancyOptimizer at its default on 2 ranks and 0.82 on 4 (0.85 in another run), where two processes share "
    "a core: on 4 ranks less than 0.80 cannot be had there. Ours takes 1.04 to 1.07 of that bound."
)
EAGER_TRIED = (
    "Above the operations themselves remain the places of the module (bound once a step), the seeding of torch's "
    "generator from the key and the record that a step returns: some 10 us, which only launch-bound steps show."
)
PRODUCTS = (
    "Where both sides multiply with MKL, products and attention alone take 41 of the 48.6 ms of C2; fused kernels take "
    "7.6. Adding biases in those kernels instead of within the products (1.00 in C2, 1.01 in C3) and a wrapper in C++ "
    "(slower) changed nothing; norms leaf by leaf in the graph gained a little (428 for 468 us on 8 leaves). On AMD's "
    "CPUs the compiled step multiplies large matrices with oneDNN, which took the worst from 0.88 to what it is now."
)
FIT_TRIED = (
    "Metrics are read together every 10 steps, and the bar is told when there is something to see; a record is made of "
    "each step."
)
UPDATE_TRIED = (
    "On ten leaves of 447 x 447, NAdam took 1.11 to 1.20 of torch's loop over leaves while it divided the second "
    "moment by its bias, and while constants were tensors on the CPU, too; cut into windows that fit the caches it "
    "took 1.2 to 3 times as long. Muon took 1.03 on 1,000 leaves while matrices went through the products one by "
    "one. torchao keeps leaves that are no whole blocks of 256 in float32; ten leaves of 448 x 448 are compared with"
    " it. schedulefree is faster on ten leaves, by a third: it writes into the gradients."
)
COMPILED_TRIED = (
    "Muon on ten leaves is its matrix products, which both sides call; matrices of one shape are multiplied together "
    "where there are more. The others take 0.1 to 0.5 of the time."
)
REMAT_TRIED = (
    "Blocks computed twice cost their forward pass, a third of their time; with half of a block, its feed-forward, the "
    "half of the memory is met more closely than with three whole blocks (1.24 in an earlier run)."
)

JAX_TRIED = (
    "1.04 to 1.15 from run to run and by machine, in the case that is bound by launches: what a call costs there is "
    "Python that checks and hands over the leaves, and JAX does that in C++; Inductor's wrapper in C++ was slower, and "
    "oneDNN is no faster than MKL for products as small as these. In C3 it was 1.20 on an AMD EPYC of family 26 while "
    "MKL multiplied; with oneDNN it is 0.68."
)
EVALUATION_TRIED = (
    "The worst is the MLP, of which a batch takes 0.12 ms by hand. `evaluate` adds 0.06 ms: the tensors of the state "
    "are put into the module, the loss is checked to write to none of them, torch's generators are seeded, and sums "
    "are in float64. It was 1.66 while structures were read anew for each batch. Compiled, a batch is one call of one "
    "graph; it was 1.88 while the loss alone was compiled, and Dynamo checked it at each call."
)
TECHNIQUES_TRIED = (
    "From run to run of 60 to 150 turns: remat() 1.00 (1.02 to 1.04 while `torch.utils.checkpoint` ran the blocks "
    "again), all but products 0.99 (1.00 to 1.04 before), accumulate 1.02 to 1.04 (1.09 while gradients were added up "
    "when all of a microbatch were there), files 1.02 to 1.04, update in the backward pass 0.98 to 0.99 (1.03 to 1.08 "
    "while small gradients waited for a quarter of a megabyte of each other). What accumulation adds is most of it "
    "torch's: its engine is told which leaves to add to, so that no other tensor is given a gradient, and finds the "
    "way to them each time."
)

ON_ONE_DEVICE = (
    Claim("eager step / eager loop by hand", "", 1.02, 1.00, ratios(EAGER, [field.HAND_EAGER.name], ALL), EAGER_TRIED),
    Claim(
        "compiled step / torch.compile loops, launch-bound",
        "",
        0.65,
        0.40,
        ratios(COMPILED, HAND_COMPILED, ("C0", "C1")),
    ),
    Claim(
        "compiled step / torch.compile loops, GEMM-bound",
        "",
        1.00,
        0.95,
        ratios(COMPILED, HAND_COMPILED, ("C2", "C3")),
        PRODUCTS,
    ),
    Claim(
        "compiled step / trainers at their default", "", 0.85, 0.70, ratios(COMPILED, _trainers(False), ALL), PRODUCTS
    ),
    Claim("compiled step / trainers at their best", "", 0.97, 0.90, ratios(COMPILED, _trainers(True), ALL), PRODUCTS),
    Claim("compiled step / JAX jit", "", 1.05, 0.95, ratios(COMPILED, JAX, ALL), JAX_TRIED),
    Claim("fit: added to the loop over the same step, null model", "us", 20.0, 5.0, _added_by_fit, FIT_TRIED),
    Claim("compiled step: added to a call by a leaf", "us", 0.5, 0.05, _added_by_leaf),
    Claim(
        "peak memory, compiled and donated / torch.compile loop",
        "",
        1.02,
        0.90,
        ratios(COMPILED, [field.HAND_COMPILED.name], ALL, f"{MEMORY}, "),
    ),
    Claim("remat: time for half the activations", "", 1.20, 1.08, _remat, REMAT_TRIED),
    Claim("optimizer update, eager / torch.optim", "", 1.02, 1.00, ratios(UPDATE, TORCHS, ("C8",)), UPDATE_TRIED),
    Claim(
        "optimizer update, compiled / torch.compile(step)",
        "",
        1.00,
        0.95,
        ratios(UPDATE_COMPILED, [field.TORCH_COMPILED.name], ("C8",)),
        COMPILED_TRIED,
    ),
    Claim("loader / torch's DataLoader", "", 1.00, 0.95, ratios(c10.OURS, [c10.TORCHS], ("C10",)), LOADER_TRIED),
    Claim(
        "evaluation / loop by hand", "", 1.02, 1.00, ratios(c12.OURS.name, [c12.HAND.name], ("C12",)), EVALUATION_TRIED
    ),
    Claim(
        "evaluation, compiled / loop over torch.compile(model)",
        "",
        1.00,
        0.85,
        ratios(c12.OURS_COMPILED.name, [c12.HAND_COMPILED.name], ("C12",)),
        EVALUATION_TRIED,
    ),
    Claim("adapters, eager / peft", "", 1.00, 0.95, ratios(c13.ADAPTED.name, [field.PEFT.name], ("C13",))),
    Claim(
        "adapters, compiled / peft and torch.compile(loss)",
        "",
        1.00,
        0.95,
        ratios(c13.ADAPTED_COMPILED.name, [field.PEFT_COMPILED.name], ("C13",)),
    ),
    Claim("techniques that spend less memory: time / by hand", "", 1.03, 1.00, _by_hand(), TECHNIQUES_TRIED),
    Claim("techniques that spend less memory: peak memory / by hand", "", 1.02, 1.00, _by_hand(f"{MEMORY}, ")),
    Claim("remat(budget=0.3) of 12 blocks: activations that are left", "", 0.40, 0.30, _of_budget(c9.SAVED)),
    Claim(
        "remat(budget=0.3) of 12 blocks: time",
        "",
        1.33,
        1.30,
        _of_budget(f"{RATIO}{c9.KEEPING_ALL.name}"),
    ),
    Claim("sam / by hand", "", 1.03, 1.00, _of_sam(c9.SAM[2])),
    Claim("sam / a step with one pass", "", 2.05, 2.00, _of_sam(c9.ONE_PASS)),
)
"""The worst of all cases and peers counts, not a mean. For the leaves the aim is flat: a tenth of the bound."""

ON_RANKS = (
    Claim("many ranks: level 0 / DDP", "", 1.00, 0.95, _on_ranks(0, c11.DDP), LEVEL_0_TRIED),
    Claim("many ranks: level 0 / Accelerate", "", 1.00, 0.95, _on_ranks(0, [field.ACCELERATE_FUSED]), LEVEL_0_TRIED),
    Claim("many ranks: level 1 / DDP + ZeroRedundancyOptimizer", "", 0.80, 0.70, _on_ranks(1, c11.ZERO), LEVEL_1_TRIED),
    Claim("many ranks: level 3 / FSDP2", "", 0.90, 0.75, _on_ranks(3, [c11.FSDP])),
    Claim(
        "many ranks: compiled step, level 3 / compiled FSDP2",
        "",
        0.95,
        0.85,
        ratios(c11.COMPILED.name, [each.name for each in c11.FSDP_COMPILED], ("C11",)),
    ),
    Claim(
        "many ranks: peak memory, level 3 / FSDP2",
        "",
        1.00,
        0.95,
        _on_ranks(3, [c11.FSDP], f"{MEMORY}, "),
        "It was 1.06 while the block before was gathered from the start of a block's backward pass, and by gloo's "
        "all-gather, which takes up to three times the memory of its result. At the peak, in the first products of the "
        "backward pass, a rank now holds what FSDP2 holds there, without the block that FSDP2 has gathered ahead. "
        "On 4 ranks it is 0.95 (3 of 5 runs) or 1.02: the rank that holds most has 2.4 MB more, by the median "
        "of its steps, in some runs; why is not known.",
    ),
    Claim("one rank: level 0 / no mesh", "", 1.02, 1.00, _on_ranks(0, [c11.NO_MESH])),
)
"""Of many devices, which `docs/parallel.md` shows too."""

CLAIMS = (*ON_ONE_DEVICE, *ON_RANKS)


def times(rows: Sequence[Row], question: str) -> list[Row]:
    """The step times of a question, fastest first."""
    return sorted((r for r in rows if r.question == question and r.metric == TIME), key=lambda row: row.median)
