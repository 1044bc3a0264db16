"""The claims of ftrain about its speed and memory, and the check of each claim against the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench import registry
from bench.cases import c5, c6, c9, c10, c11, c12, c13, c14
from bench.rows import ADDED, MEMORY, RATIO, TIME, WITHIN, Row
from bench.tasks import Entrant

Selector = Callable[[Sequence[Row]], Iterable[Row]]
"""Selects the rows that a claim is about."""


@dataclass(frozen=True)
class Claim:
    """A claim: the median of each selected row is at most the limit, and if possible at most the target.

    Args:
        text: what is measured.
        unit: its unit; empty for a ratio.
        limit: no row may be above it.
        target: the value to reach.
        select: selects the rows.
        notes: why a limit is missed and what was tried; the report shows it only then.
    """

    text: str
    unit: str
    limit: float
    target: float
    select: Selector
    notes: str = ""


@dataclass(frozen=True)
class Verdict:
    """A claim with the rows that it is about."""

    claim: Claim
    rows: Sequence[Row]

    @property
    def worst(self) -> Row | None:
        """The row with the largest median, if there is one."""
        return max(self.rows, key=lambda row: row.median, default=None)

    @property
    def cases(self) -> str:
        """The cases of the rows, such as ``C1, C2``."""
        cases = {row.question.split()[0] for row in self.rows}
        return ", ".join(sorted(cases, key=lambda case: int(case[1:])))

    @property
    def result(self) -> str:
        """One of ``target met``, ``limit met``, ``limit missed`` and ``not measured``."""
        if self.worst is None:
            return "not measured"
        if self.worst.median <= self.claim.target:
            return "target met"
        return "limit met" if self.worst.median <= self.claim.limit else "limit missed"


def check_claims(rows: Sequence[Row], claims: Sequence[Claim] | None = None) -> list[Verdict]:
    """Return the verdict on each claim (default: all). Rows of all machines count."""
    return [
        Verdict(claim, [row for row in claim.select(rows) if not math.isnan(row.median)])
        for claim in (CLAIMS if claims is None else claims)
    ]


def ratios(variant: str, others: Iterable[str], cases: Iterable[str], prefix: str = "") -> Selector:
    """Return a selector of the ratios of one variant to others in some cases, such as ``C1``.

    With a `prefix` such as ``"peak memory, "``, it selects the ratios of that metric instead of those of the step time.
    """
    metrics = {f"{prefix}{RATIO}{other}" for other in others}
    starts = tuple(f"{case} " for case in cases)

    def select(rows: Sequence[Row]) -> list[Row]:
        return [
            row for row in rows if row.variant == variant and row.metric in metrics and row.question.startswith(starts)
        ]

    return select


def _exactly(*keys: tuple[str, str, str]) -> Selector:
    """Return a selector of rows by question, variant and metric."""

    def select(rows: Sequence[Row]) -> list[Row]:
        return [row for row in rows if (row.question, row.variant, row.metric) in keys]

    return select


def _trainers(best: bool) -> list[str]:
    return [entrant.name for entrant in registry.TRAINERS if entrant.best == best]


def _added_by_fit() -> Selector:
    """Return a selector of what `ft.fit` adds to a loop over the same step."""
    return _exactly(
        *((c6.QUESTION, fit.name, f"{ADDED}{c6.LOOPS[mode].name}") for mode, fit in c6.FITS.items()),
    )


def _added_by_leaf(rows: Sequence[Row]) -> list[Row]:
    """Select what one more leaf adds to a call of a compiled step."""
    return [row for row in rows if row.metric == "added a leaf" and row.variant == registry.OURS_CALLS.name]


def _remat_to_half(rows: Sequence[Row]) -> list[Row]:
    """Select the time of the fastest variant of remat that at least halves the memory within a step."""
    rows = [row for row in rows if row.question == c5.REMAT]
    memory_ratio = f"{WITHIN}, {RATIO}{c5.KEEPING_ALL.name}"
    time_ratio = f"{RATIO}{c5.KEEPING_ALL.name}"
    halved = {row.variant for row in rows if row.metric == memory_ratio and row.median <= 0.5}
    times = [row for row in rows if row.metric == time_ratio and row.variant in halved]
    return sorted(times, key=lambda row: row.median)[:1]


def _techniques_by_hand(prefix: str = "") -> Selector:
    """Return a selector of the ratios of techniques of C9 to the same techniques by hand."""
    pairs = [(question, hand, ours) for question, (_, hand, ours) in c9.PAIRS.items()]
    pairs += [(question, hand, ours) for question, _, hand, ours in (c9.ON_DEVICE, c9.COMPILED)]
    return _exactly(*((question, ours.name, f"{prefix}{RATIO}{hand.name}") for question, hand, ours in pairs))


def _sam(other: Entrant) -> Selector:
    """Return a selector of the ratio of a step with `sam` to another one."""
    question, *_, ours = c9.SAM
    return _exactly((question, ours.name, f"{RATIO}{other.name}"))


def _on_ranks(level: int, others: Iterable[Entrant], prefix: str = "") -> Selector:
    """Return a selector of the ratios of a level of `sharded` to others, on any number of ranks."""
    return ratios(c11.ours(level).name, [other.name for other in others], ("C11",), prefix)


EAGER, COMPILED = registry.OURS_EAGER.name, registry.OURS_COMPILED.name
HAND_COMPILED = [entrant.name for entrant in registry.HAND if entrant.category == "hand compile"]
JAX = [entrant.name for entrant in registry.JAX]
UPDATE, UPDATE_COMPILED = registry.OURS_UPDATE.name, registry.OURS_UPDATE_COMPILED.name
TORCH_OPTIM = [registry.TORCH.name, registry.TORCH_DEFAULT.name]
LAUNCH_BOUND, GEMM_BOUND = ("C0", "C1"), ("C2", "C3", "C14")
STEPS = LAUNCH_BOUND + GEMM_BOUND

LOADER_NOTES = (
    "The dataset does not say whether its samples draw random numbers. The loader must then check that nothing was "
    "drawn and restore Python's generator (625 words), which takes 5% of the time of a batch. With `draws = False` it "
    "takes 0.94 to 0.96 of the time of the `DataLoader`."
)
LEVEL_0_NOTES = (
    "It was 1.07 to 1.10 while autograd held back all gradients until the backward pass had ended. Now the all-reduce "
    "of a bucket starts when the bucket is complete, a plain loss needs no sum of weights, and loss and metrics are "
    "summed meanwhile: 1.00 to 1.07 of DDP, depending on the run. One autograd node per bucket instead of one hook per "
    "gradient made it 2% faster (timed in turns on 2 ranks: 1.17 instead of 1.19 times the loop without communication; "
    "DDP with its best options takes 1.13 to 1.18). What remains, in a trace of 2 ranks, of 105 ms: 0.4 ms for "
    "clipping out of place, 0.4 ms for the sum of loss and metrics, and the allocation of buffers. Buckets of at least "
    "1, 2, 4 and 8 MiB took 1.05, 1.02, 1.00 and 0.99 of DDP on 2 ranks, and 1.11, 1.04, 1.02 and 0.99 on 4: on a CPU, "
    "overlap costs more than it saves. While all entrants ran in the same processes, DDP, which keeps its buffers, "
    "gained 1 to 2% over those that allocate new ones. In processes of their own, on an AMD EPYC of family 26, "
    "compared with DDP's best options: clipping in place saved 0.5%, and keeping a buffer made no measurable "
    "difference."
)
LEVEL_1_NOTES = (
    "ftrain divides each tensor over the ranks, so gathered parameters and scattered gradients are copied between flat "
    "buffers and tensors; gloo has no reduce-scatter. ZeroRedundancyOptimizer sends whole tensors from their owners "
    "without copies, and with its best options it is nearly as fast as DDP alone. Gathering in buckets of 2 MB, to "
    "overlap copies with communication, gained nothing (1.13 of DDP, against 1.10 in one piece); buckets of 8 MiB cost "
    "4%. A loop that only computes and exchanges the same number of bytes, without copies and sums (the bound in C11), "
    "takes 0.78 of ZeroRedundancyOptimizer with its default options on 2 ranks and 0.82 on 4 (0.85 in another run), "
    "where two processes share a core: on 4 ranks, less than 0.80 is impossible there. ftrain takes 1.04 to 1.07 of "
    "that bound."
)
EAGER_NOTES = (
    "Besides the operations themselves, an eager step looks up the tensors of the module once, seeds torch's generator "
    "from the key, and makes the record that it returns: 12 to 26 us, depending on the machine, which show only in "
    "steps that are launch-bound."
)
PRODUCTS = (
    "Where both sides multiply with MKL, matrix products and attention alone take 41 of the 48.6 ms of C2; fused "
    "kernels take 7.6 ms. Adding biases in those kernels instead of within the products (1.00 in C2, 1.01 in C3) and "
    "Inductor's C++ wrapper (slower) did not help; norms leaf by leaf in the graph helped a little (428 us instead of "
    "468 us on 8 leaves). On AMD's CPUs the compiled step multiplies large matrices with oneDNN, which improved the "
    "worst ratio from 0.88 to its present value."
)
FIT_NOTES = (
    "`fit` reads metrics every 10 steps, all at once, updates the progress bar only when its text changes, and makes a "
    "record of each step."
)
UPDATE_NOTES = (
    "On ten leaves of 447 x 447, NAdam took 1.11 to 1.20 of torch's loop over leaves while it divided the second "
    "moment by its bias correction and while constants were tensors, also on the CPU; cut into windows that fit into "
    "the caches, it took 1.2 to 3 times as long. Muon took 1.03 on 1,000 leaves while it multiplied one matrix after "
    "another."
)
COMPILED_NOTES = (
    "On ten leaves, the time of Muon is that of its matrix products, which both sides call; matrices of one shape are "
    "multiplied in one call where there are more. The other optimizers take 0.1 to 0.5 of the time."
)
PEER_NOTES = (
    "schedulefree is faster: it writes into the gradients. torchao keeps leaves that do not consist of whole blocks of "
    "256 elements in float32; it is compared on ten leaves of 448 x 448."
)
REMAT_NOTES = (
    "A block that is computed twice costs its forward pass, a third of its time. Half of a block (its feed-forward "
    "part) comes closer to half of the memory than three whole blocks do (1.24 in an earlier run)."
)
JAX_NOTES = (
    "The null model shows what a call costs: 46 us, and 16 us with JAX. It is the Python code that checks and passes "
    "the leaves, which JAX does in C++. In C1 the ratio was 1.04 to 1.15, depending on run and machine; there "
    "Inductor's C++ wrapper was slower, and oneDNN is no faster than MKL for such small products. In C3 it was 1.20 on "
    "an AMD EPYC of family 26 with MKL; with oneDNN it is 0.69."
)
EVALUATION_NOTES = (
    "The worst case is the MLP, of which a batch takes 0.20 ms by hand. `evaluate` adds 0.14 ms: it puts the tensors "
    "of the state into the module, checks that the loss writes to none of them, seeds torch's generators, and sums in "
    "float64. On an AMD EPYC of family 26 it adds 0.06 ms to 0.15 ms, 1.41 of a loop under `torch.no_grad`, which "
    "is slower than `torch.inference_mode`. Compiled, a batch is one call of one graph."
)
TECHNIQUES_NOTES = (
    "Other runs, of 60 to 150 rounds, whose rows are not stored: `remat()` 1.00 (1.02 to 1.04 while "
    "`torch.utils.checkpoint` recomputed the blocks), "
    '`remat("dots")` 0.99 (1.00 to 1.04 before), `accumulate` 1.02 to 1.04 (1.09 while the gradients of a microbatch '
    "were added after all of them were computed), optimizer state in files 1.02 to 1.04, `update_in_backward` 0.98 to "
    "0.99 (1.03 to 1.08 while small gradients were collected to a quarter of a megabyte). Most of the cost of "
    "accumulation is in torch: the autograd engine is told which leaves to accumulate into, so that no other tensor "
    "gets a gradient, and it searches the paths to them in each backward pass."
)

ON_ONE_DEVICE = (
    Claim(
        "eager step / eager loop by hand", "", 1.02, 1.00, ratios(EAGER, [registry.HAND_EAGER.name], STEPS), EAGER_NOTES
    ),
    Claim(
        "compiled step / torch.compile loops, launch-bound",
        "",
        0.65,
        0.40,
        ratios(COMPILED, HAND_COMPILED, LAUNCH_BOUND),
    ),
    Claim(
        "compiled step / torch.compile loops, GEMM-bound",
        "",
        1.00,
        0.95,
        ratios(COMPILED, [*HAND_COMPILED, registry.HAND_MEDIUM.name], GEMM_BOUND),
        PRODUCTS,
    ),
    Claim(
        "compiled step / trainers at their default", "", 0.85, 0.70, ratios(COMPILED, _trainers(False), STEPS), PRODUCTS
    ),
    Claim("compiled step / trainers at their best", "", 0.97, 0.90, ratios(COMPILED, _trainers(True), STEPS), PRODUCTS),
    Claim("compiled step / JAX jit", "", 1.05, 0.95, ratios(COMPILED, JAX, STEPS), JAX_NOTES),
    Claim("fit: time added to a step, null model", "us", 20.0, 5.0, _added_by_fit(), FIT_NOTES),
    Claim("compiled step: time that one more leaf adds to a call", "us", 0.5, 0.05, _added_by_leaf),
    Claim(
        "peak memory, compiled and donated / torch.compile loop",
        "",
        1.02,
        0.90,
        ratios(COMPILED, [registry.HAND_COMPILED.name], STEPS, f"{MEMORY}, "),
    ),
    Claim("remat with at most half of the activations: time / no remat", "", 1.20, 1.08, _remat_to_half, REMAT_NOTES),
    Claim("optimizer update, eager / torch.optim", "", 1.02, 1.00, ratios(UPDATE, TORCH_OPTIM, ("C8",)), UPDATE_NOTES),
    Claim(
        "optimizer update, eager / lion-pytorch, schedulefree, torchao",
        "",
        1.02,
        1.00,
        ratios(UPDATE, [entrant.name for entrant in registry.OPTIMIZERS.values()], ("C8",)),
        PEER_NOTES,
    ),
    Claim(
        "optimizer update, compiled / torch.compile(step)",
        "",
        1.00,
        0.95,
        ratios(UPDATE_COMPILED, [registry.TORCH_COMPILED.name], ("C8",)),
        COMPILED_NOTES,
    ),
    Claim("loader / torch's DataLoader", "", 1.00, 0.95, ratios(c10.OURS, [c10.TORCH], ("C10",)), LOADER_NOTES),
    Claim(
        "evaluation / loop by hand", "", 1.02, 1.00, ratios(c12.OURS.name, [c12.HAND.name], ("C12",)), EVALUATION_NOTES
    ),
    Claim(
        "evaluation, compiled / loops over torch.compile(model) and torch.compile(loss)",
        "",
        1.00,
        0.85,
        ratios(c12.OURS_COMPILED.name, [entrant.name for entrant in c12.HAND_COMPILED], ("C12",)),
        EVALUATION_NOTES,
    ),
    Claim("adapters, eager / peft", "", 1.00, 0.95, ratios(c13.ADAPTED.name, [registry.PEFT.name], ("C13",))),
    Claim(
        "adapters, compiled / peft and torch.compile(loss)",
        "",
        1.00,
        0.95,
        ratios(c13.ADAPTED_COMPILED.name, [registry.PEFT_COMPILED.name], ("C13",)),
    ),
    Claim(
        "compiled by block / torch.compile of each block by hand",
        "",
        1.02,
        1.00,
        ratios(c14.OURS.name, [c14.HAND.name], ("C14",)),
    ),
    Claim("techniques that save memory: time / by hand", "", 1.03, 1.00, _techniques_by_hand(), TECHNIQUES_NOTES),
    Claim("techniques that save memory: peak memory / by hand", "", 1.02, 1.00, _techniques_by_hand(f"{MEMORY}, ")),
    Claim(
        "remat(budget=0.3) of 12 blocks: share of the activations that is kept",
        "",
        0.40,
        0.30,
        _exactly((c9.FULL, c9.BUDGETED.name, c9.SAVED)),
    ),
    Claim(
        "remat(budget=0.3) of 12 blocks: time / no remat",
        "",
        1.33,
        1.30,
        _exactly((c9.FULL, c9.BUDGETED.name, f"{RATIO}{c9.KEEPING_ALL.name}")),
    ),
    Claim("sam / by hand", "", 1.03, 1.00, _sam(c9.SAM[2])),
    Claim("sam / a step without sam", "", 2.05, 2.00, _sam(c9.ONE_PASS)),
)
"""The claims about one device."""

ON_RANKS = (
    Claim("many ranks: level 0 / DDP", "", 1.00, 0.95, _on_ranks(0, c11.DDP), LEVEL_0_NOTES),
    Claim("many ranks: level 0 / Accelerate", "", 1.00, 0.95, _on_ranks(0, [registry.ACCELERATE_FUSED]), LEVEL_0_NOTES),
    Claim("many ranks: level 1 / DDP + ZeroRedundancyOptimizer", "", 0.80, 0.70, _on_ranks(1, c11.ZERO), LEVEL_1_NOTES),
    Claim("many ranks: level 3 / FSDP2", "", 0.90, 0.75, _on_ranks(3, [c11.FSDP])),
    Claim(
        "many ranks: compiled step, level 3 / compiled FSDP2",
        "",
        0.95,
        0.85,
        ratios(c11.COMPILED.name, [entrant.name for entrant in c11.FSDP_COMPILED], ("C11",)),
    ),
    Claim(
        "many ranks: peak memory, level 3 / FSDP2",
        "",
        1.00,
        0.95,
        _on_ranks(3, [c11.FSDP], f"{MEMORY}, "),
        "It was 1.06 while the gather of the next block (the one before, in the model) began with the backward pass of "
        "a block, and while it used gloo's all-gather, which takes up to three times the memory of its result. The "
        "peak is in the first products of the backward pass. There a rank holds what FSDP2 holds, without the block "
        "that FSDP2 has gathered ahead. On 4 ranks it is 0.95 (3 of 5 runs) or 1.02: in some runs the rank that holds "
        "most has 2.4 MB more, in the median of its steps; the reason is not known.",
    ),
    Claim("one rank: level 0 / no mesh", "", 1.02, 1.00, _on_ranks(0, [c11.NO_MESH])),
)
"""The claims about many devices, which `docs/parallel.md` shows as well."""

CLAIMS = (*ON_ONE_DEVICE, *ON_RANKS)


def times(rows: Sequence[Row], question: str) -> list[Row]:
    """Return the rows of the step times of a question, fastest first."""
    return sorted((r for r in rows if r.question == question and r.metric == TIME), key=lambda row: row.median)
