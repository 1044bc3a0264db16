"""The arguments of `fit`, and their checks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftrain._torch.store import rank_and_size
from ftrain.checkpoint import Checkpoints
from ftrain.errors import (
    ComposeError,
    OptionError,
    log_on_first_rank,
    require_callable,
    require_choice,
    require_positive,
    require_switches,
    warn,
)
from ftrain.step.across_ranks import combines_ranks
from ftrain.step.eval_step import EvalStep
from ftrain.step.microbatch import ON_OOM, SPLIT
from ftrain.step.step import Step
from ftrain.training.early_stopping import Adapt, Stop
from ftrain.training.ended_schedules import log_ended_schedules
from ftrain.training.loggers import Logger
from ftrain.training.metrics import Evaluate
from ftrain.training.progress import Count
from ftrain.transforms.averages import SWA


@dataclass(frozen=True)
class Options:
    """The arguments of `fit` from `steps` on, without `progress`."""

    steps: int | None
    epochs: int | None
    evaluate: Evaluate | None
    evaluate_every: int | None
    stop: Stop | None
    adapt: Adapt | None
    checkpoints: Checkpoints | None
    resume: str
    loggers: Sequence[Logger]
    log_every: int
    throughput: Mapping[str, Count]
    donate: bool
    on_oom: str
    on_nonfinite: str

    def evaluates_after(self, step: int) -> bool:
        """Return whether to evaluate after this step."""
        if self.evaluate is None:
            return False
        return step == self.steps or (self.evaluate_every is not None and step % self.evaluate_every == 0)

    def comparable(self) -> dict[str, Any]:
        """Return the arguments that must be the same on all ranks, by name; of a function, whether there is one."""
        compared = "resume", "on_nonfinite", "donate", "steps", "epochs", "evaluate_every", "log_every", "on_oom"
        functions = {name: getattr(self, name) for name in ("evaluate", "stop", "adapt")}
        # Not its path, which may differ between machines for one directory: `Checkpoints` compares the directory.
        checkpoint_options = {name: getattr(self.checkpoints, name, None) for name in ("every", "keep", "best", "mode")}
        return {
            "checkpoints": self.checkpoints and checkpoint_options,
            **{name: getattr(self, name) for name in compared},
            **{name: function if function is None else "a function" for name, function in functions.items()},
            "throughput": [*self.throughput],
        }

    def require_valid(self, step: Any, state: Any, ranks: int) -> None:
        """Check the arguments; raises as `fit` documents."""
        require_callable("fit", step, state, "fit(step, state, data)")
        self._require_splittable(step, ranks)
        require_positive("fit", "log_every", self.log_every)
        require_switches("fit", donate=self.donate)
        if isinstance(self.evaluate_every, str):
            raise OptionError(
                f"fit: evaluate_every is {self.evaluate_every!r}, needs a number of steps: len(loader) is once an epoch"
            )
        for name in ("steps", "epochs", "evaluate_every"):
            if getattr(self, name) is not None:
                require_positive("fit", name, getattr(self, name))
        self._require_functions()
        if self.checkpoints is not None and not isinstance(self.checkpoints, Checkpoints):
            raise OptionError(f"fit: checkpoints is {self.checkpoints!r}; needs ft.Checkpoints(directory, every=...)")
        loggers: Any = self.loggers
        if not isinstance(loggers, Sequence) or isinstance(loggers, str) or not all(map(callable, loggers)):
            raise OptionError(
                f"fit: loggers is {loggers!r}; needs a list of functions of a record, such as [ft.loggers.jsonl(path)]"
            )
        throughput: Any = self.throughput
        if not isinstance(throughput, Mapping) or not all(map(callable, throughput.values())):
            raise OptionError(
                f"fit: throughput is {throughput!r}; needs functions of a batch by name, such as "
                '{"tokens": lambda batch: batch["tokens"].numel()}'
            )

    def _require_splittable(self, step: Any, ranks: int) -> None:
        require_choice("fit", "on_oom", self.on_oom, ON_OOM)
        if self.on_oom != SPLIT:
            return
        if not isinstance(step, Step):
            raise ComposeError(f"fit: on_oom='split' needs a Step, whose gradient can be split; found {step!r}")
        if ranks > 1 and (step.updates_in_backward or (step.is_compiled and step.optimizer.offloaded)):
            excess = "update_in_backward" if step.updates_in_backward else "compiled beside offload('opt_state')"
            raise ComposeError(
                f"fit: on_oom='split' on {ranks} ranks needs a step without {excess}: all ranks must know that one has "
                "run out of memory before they update; use ft.accumulate(n)"
            )

    def _require_functions(self) -> None:
        signatures = {
            "evaluate": "state -> {name: number}, such as lambda state: ft.evaluate(eval_step, state, batches)",
            "stop": "history -> reason, such as ft.patience('eval_loss')",
            "adapt": "(state, history) -> state, such as ft.plateau('eval_loss', rule)",
        }
        for name, signature in signatures.items():
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise OptionError(f"fit: {name} is {type(value).__name__}; needs a function {signature}")
        if isinstance(self.evaluate, EvalStep):
            raise OptionError(f"fit: evaluate is an eval_step, of one batch; needs a function {signatures['evaluate']}")
        if self.evaluate_every is not None and self.evaluate is None:
            raise OptionError(
                f"fit: evaluate_every={self.evaluate_every} needs evaluate=, a function {signatures['evaluate']}"
            )
        if self.evaluate is not None and self.evaluate_every is None:
            for name in ("stop", "adapt"):
                if getattr(self, name) is not None:
                    raise OptionError(
                        f"fit: {name} is called after evaluations, and there is only one, at the end; pass "
                        "evaluate_every=, the number of steps between them"
                    )

    def log_limits(self, step: Any, done_steps: int, done_epochs: int, total: int | None) -> None:
        """Log a warning if no step follows, because the run has made all its steps or passes already.

        If the `total` number of steps is known, also log if the last ones have a rate of 0, unless `stop` may end the
        run before, and if the run ends before the first average of `swa`.
        """
        if self.stop is None:
            log_ended_schedules(step, done_steps, total)
        _log_if_never_averaged(step, total)
        epochs = 1 if self.steps is None and self.epochs is None else self.epochs
        for name, limit, done in (("steps", self.steps, done_steps), ("epochs", epochs, done_epochs)):
            if limit is not None and done >= limit:
                log_on_first_rank(
                    "fit: no step is made, for %s=%d, and %d were made before; %s= counts from the beginning of the "
                    "run, so pass a larger number to train on",
                    *(name, limit, done, name),
                )

    def warn_of_surprises(self, step: Any) -> None:
        """Warn if each of several ranks makes a run of its own, or if the best evaluation may not be saved."""
        _warn_if_one_of_many(step)
        checkpoints, every = self.checkpoints, self.evaluate_every
        best = "" if checkpoints is None else checkpoints.best or ""
        if checkpoints and every and best.startswith("eval_") and every % checkpoints.every:
            warn(
                f"fit: evaluate_every={every} is not a multiple of Checkpoints(every={checkpoints.every}): some "
                f"evaluations are of steps that are not saved and cannot become the best by {best!r}. Evaluate at "
                "steps that are saved, or save more often"
            )


def _log_if_never_averaged(step: Any, total: int | None) -> None:
    """Log a warning if a run ends before the first average of `swa`, whose arguments count updates and not passes."""
    if not isinstance(step, Step) or not total:
        return
    options = next((wrapper.options for wrapper in step.wrappers if wrapper.name == SWA), None)
    if not options:
        return
    start, every = options["start"], options["every"]
    if total < start + every:
        log_on_first_rank(
            "fit: swa(%d, %d) averages first after %d updates, and the run ends at step %d: ft.averaged(state) will be "
            "the parameters of the last step",
            *(start, every, start + every, total),
        )


def _warn_if_one_of_many(step: Any) -> None:
    """Warn if a launcher has started several processes, and the step does not combine them."""
    if not isinstance(step, Step) or combines_ranks(step.wrappers):
        return
    launched = os.environ.get("WORLD_SIZE", "")
    size = max(rank_and_size()[1], int(launched) if launched.isdigit() else 1)
    if size > 1:
        warn(
            f"fit: this process is one of {size} ranks, but the step is not sharded, so each rank makes a run of its "
            "own; add ft.sharded(ft.parallel.mesh()) to the wrappers of the step, or start one process"
        )
