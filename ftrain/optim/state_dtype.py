"""Parameters and moments that are stored in fewer bits than they are computed in.

A formula gets them in float32 (float64 if a parameter is), joined into vectors. The values that it writes are rounded
to the stored dtype. In eager mode vectors have a limited size, so there is never a float32 copy of the whole state. In
graphs each leaf is one vector, and the compiler fuses the conversion with the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ftrain import random, tree
from ftrain.errors import OptionError, require_switches
from ftrain.optim.column import Part, Tensors
from ftrain.optim.formats import Floats, Format, window
from ftrain.optim.grouping import Plan
from ftrain.optim.rounding import noise, rounded
from ftrain.types import PyTree

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Storage:
    """How an optimizer stores its parameters and moments.

    `formats` are the formats of the moments, by name. If `stochastic`, values stored in bfloat16 are rounded up or
    down at random. `shown` are the texts of its options in the text of the optimizer.
    """

    formats: Mapping[str, Format]
    stochastic: bool = False
    shown: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The names of the trees in the state."""
        return [key + suffix for key, form in self.formats.items() for suffix in form.suffixes]

    @property
    def align(self) -> int:
        """Number of elements that must stay together."""
        return max([form.block for form in self.formats.values()], default=1)

    @property
    def by_element(self) -> bool:
        """Whether an element is stored independently of the others: without scales of blocks or random draws."""
        return not self.stochastic and all(isinstance(form, Floats) for form in self.formats.values())

    def begin(self, state: Mapping[str, Callable[[Tensor], Tensor]], params: PyTree) -> dict[str, PyTree]:
        """Return the trees of the state. `state` are functions ``leaf -> initial value`` by name of the moment."""
        leaves, spec = tree.flatten(params)
        columns: dict[str, list[Tensor]] = {name: [] for name in self.names}
        for key, form in self.formats.items():
            for leaf in leaves:
                for suffix, stored in zip(form.suffixes, form.begin(state[key](leaf)), strict=True):
                    columns[key + suffix].append(stored)
        return {name: tree.unflatten(spec, column) for name, column in columns.items()}

    def parts(
        self,
        plan: Plan,
        columns: list[list[Tensor]],
        key: Tensor | None,
        *,
        wrap: Callable[[list[Tensor]], Tensors],
        weight_decay: Tensor | float,
        eager: bool,
    ) -> Iterator[Part]:
        """Yield parts in the dtype to compute in, and store the new values of each when the next one is requested.

        `columns` are the gradients, the parameters and the leaves of each of `names`. All but the gradients are written
        to. Gradients must have the strides of the parameters. `key` is the key of stochastic rounding. In eager mode,
        small leaves are joined and long ones cut. Within a part each leaf is a vector, because kernels may round the
        last elements of a vector differently.
        """
        formats: list[Format] = [Floats(), Floats(), *self.formats.values()]
        remaining = iter(columns)
        stored = [(form, [next(remaining) for _ in form.suffixes]) for form in formats]
        for layout in plan.vectors if eager else plan.leaf_vectors:
            dtype = torch.promote_types(columns[1][layout.windows[0][0]].dtype, torch.float32)
            sizes = [stop - start for _, start, stop in layout.windows]
            windows = [
                [
                    window(tuple(column[index] for column in form_columns), form.block, start, stop)
                    for index, start, stop in layout.windows
                ]
                for form, form_columns in stored
            ]
            vectors = [form.read(form_windows, dtype) for form, form_windows in zip(formats, windows, strict=True)]
            grad, leaf, *state = [wrap(list(vector.split_with_sizes(sizes))) for vector in vectors]
            decay = weight_decay if layout.decay else 0.0
            yield Part(leaf, grad, dict(zip(self.formats, state, strict=True)), decay, vectors[1])
            for number, form in enumerate(formats[1:]):
                offset = number * plan.size + layout.offset
                rounding = None if key is None else partial(_rounded, key, offset, eager)
                form.write(windows[number + 1], vectors[number + 1], rounding)


def _rounded(key: Tensor, offset: int, eager: bool, values: Tensor) -> Tensor:
    return rounded(values, noise(random.to_device(key, values.device), offset, len(values), eager=eager))


def low_precision(
    function: str, state_dtype: Literal["bf16", "fp32"] | None, stochastic_rounding: bool | None, moments: Sequence[str]
) -> Storage | None:
    """Return how to store moments; None for the dtypes of the parameters without stochastic rounding.

    Raises an OptionError for another `state_dtype`.
    """
    if state_dtype is not None and state_dtype not in DTYPES:
        raise OptionError(
            f"{function}: state_dtype is {state_dtype!r}; choices are None, {', '.join(map(repr, DTYPES))}"
        )
    stochastic = state_dtype == "bf16" if stochastic_rounding is None else stochastic_rounding
    require_switches(function, stochastic_rounding=stochastic)
    if state_dtype is None and not stochastic:
        return None
    shown = {"state_dtype": state_dtype, "stochastic_rounding": stochastic_rounding}
    form = Floats(DTYPES[state_dtype] if state_dtype else None)
    texts = tuple(f"{name}={value}" for name, value in shown.items() if value is not None)
    return Storage(dict.fromkeys(moments, form), stochastic, texts)
