"""The wrapper `lora`: train low-rank adapters of a frozen base."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from ftrain.step.wrapper import OnLoss, Wrapper, extend_scope, wrapper
from ftrain.transforms.lora.config import Config
from ftrain.transforms.lora.modules import ModuleAdapters
from ftrain.transforms.lora.trees import TreeAdapters
from ftrain.types import Loss

NAME = "lora"


@wrapper
def lora(
    rank: int,
    alpha: float | None = None,
    *,
    targets: Sequence[str],
    dropout: float = 0.0,
    dora: bool = False,
    rslora: bool = False,
) -> Wrapper:
    r"""Train low-rank adapters and freeze the rest (LoRA: Hu et al. 2021, arXiv:2106.09685).

    .. math:: y = W x + \frac{\alpha}{r}\, B A\, \mathrm{dropout}(x), \quad A\ (r, in), \quad B\ (out, r)

    `Step.init` adds A and B of every target to the parameters, drawn from the seed of the state; the first loss is that
    of the base, to the bit (`dropout` changes what dropout of the base draws). Only adapters are trained, and the
    parameters that ``train_step(..., trainable=)`` names; ``state.frozen`` has the others in their dtype. Adapters are
    float32, or float64 for a float64 base.

    In a module, targets are its `nn.Linear`, `nn.Embedding` and the Conv1D of transformers, and ``W + BA`` is never
    computed (except for the norms of its rows in DoRA). Names in the state are those of peft:
    ``layers.0.q_proj.lora_A.weight``. In a loss of a tree, targets are matrices, and the loss gets ``W + BA`` instead
    of W; the state then has the tree under ``base`` and A and B under ``adapters``. To evaluate, use
    ``ft.eval_step(step.loss)``. The position of this wrapper among others makes no difference.

    Args:
        rank: r, the number of rows of A and of columns of B.
        alpha: the scale of BA times the rank. Default: the rank, so that the scale is 1.
        targets: patterns of names of modules, or of leaves of a tree: ``["*.q_proj", "*.v_proj"]``.
        dropout: rate in [0, 1) of the dropout of the adapters' inputs in training; embeddings have none.
        dora: also train a magnitude for each output (Liu et al. 2024, arXiv:2402.09353).
        rslora: scale BA by alpha over the square root of the rank (Kalajdzievski 2023, arXiv:2312.03732).

    Raises:
        OptionError: for an option that is not in its range, or a pattern that matches nothing; for a tree, from
            `Step.init`.
    """
    options = Config(rank, rank if alpha is None else alpha, targets, dropout, dora, rslora)

    def wrap(loss: Loss) -> Loss:
        if loss.module is None:
            tree_adapters = TreeAdapters(options, loss.text)
            texts = (*loss.wrapper_texts, options.text())
            return dataclasses.replace(loss, fn=tree_adapters.around(loss), wrapper_texts=texts, adapters=tree_adapters)
        adapters = ModuleAdapters(options, loss.module)
        return dataclasses.replace(
            loss,
            fn=adapters.around(loss),
            scope=extend_scope(loss, lambda training: adapters.installed()),
            wrapper_texts=(*loss.wrapper_texts, options.text(f"targets={len(adapters.targets)}")),
            adapters=adapters,
            on_compiled=partial(adapters.on_compiled, loss),
        )

    return Wrapper(NAME, options.text(), loss=OnLoss(wrap))
