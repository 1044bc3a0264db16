"""Transformations of the gradients before an optimizer.

The `mask` of a transformation selects the parameters that it applies to: a function ``(name, leaf) -> bool``, or
patterns of names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import optree
import torch
from torch import Tensor

from ftrain import _torch, random, tree
from ftrain.errors import ComposeError, require_range
from ftrain.optim.partial_update import require_optimizer, require_splittable
from ftrain.optim.schedules.call import describe
from ftrain.optim.schedules.combine import schedule_of
from ftrain.optim.structure_cache import StructureCache, common_spec
from ftrain.tree import sharding
from ftrain.tree.name_patterns import Mask, Select, as_select, everything, matrices, require_matches
from ftrain.types import RNG, Hyper, Optimizer, PyTree, Schedule


@dataclass(frozen=True, repr=False)
class GradientTransform:
    """A pure function of a gradient, to use in `chain`.

    Args:
        apply: ``(gradient, parameter, value, key) -> gradient`` for one leaf. It must not write to its arguments. The
            value is the scheduled one, and None without a schedule. The key is None unless `needs_rng` is true.
        select: mask of the leaves that it applies to, a function or patterns.
        text: its text in the text of the optimizer.
        schedules: name -> schedule of the value; at most one.
        needs_rng: whether it draws random numbers.
        by_element: whether it transforms each element by itself, so that ranks can transform parts of a leaf.
    """

    apply: Callable[..., Tensor]
    select: Mask
    text: str
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    needs_rng: bool = False
    by_element: bool = False

    def __repr__(self) -> str:
        return self.text


def centralize(mask: Mask = matrices) -> GradientTransform:
    r"""Subtract the mean from the gradient of each output (Yong et al. 2020, arXiv:2004.01461).

    .. math:: g_i \leftarrow g_i - \operatorname{mean}(g_i)

    for each index :math:`i` of the first axis: rows of a linear layer, filters of a convolution.
    """

    def apply(grad: Tensor, leaf: Tensor, value: None, key: None) -> Tensor:
        return grad - grad.mean(_inner_axes(grad), keepdim=True) if grad.numel() else grad

    return GradientTransform(apply, as_select("centralize: mask", mask), "centralize()")


def sign(mask: Mask = everything) -> GradientTransform:
    r"""Replace gradients by their signs; before `sgd` this is signSGD (Bernstein et al. 2018, arXiv:1802.04434).

    .. math:: g \leftarrow \operatorname{sign}(g)

    NaN stays NaN.
    """

    def apply(grad: Tensor, leaf: Tensor, value: None, key: None) -> Tensor:
        # In torch the sign of NaN is 0, which would hide a NaN.
        return torch.where(grad.isnan(), grad, grad.sign())

    return GradientTransform(apply, as_select("sign: mask", mask), "sign()", by_element=True)


def noise(stddev: float | Schedule, mask: Mask = everything) -> GradientTransform:
    r"""Add Gaussian noise, drawn from the key of the step (Neelakantan et al. 2015, arXiv:1511.06807).

    .. math:: g \leftarrow g + \sigma_t\,\epsilon \quad\text{with } \epsilon \sim \mathcal N(0, 1)

    The paper's :math:`\sigma_t^2 = \eta / (1 + t)^\gamma` is ``noise(lambda t: (0.3 / (1 + t) ** 0.55) ** 0.5)``.

    `stddev` is :math:`\sigma_t`, a number or a schedule. The metric ``noise`` is its value. Raises an OptionError if
    the number is negative.
    """

    def apply(grad: Tensor, leaf: Tensor, value: Tensor | float, key: Tensor) -> Tensor:
        epsilon = random.normal(random.to_device(key, grad.device), grad.shape, dtype=grad.dtype)
        sigma = value.to(grad.dtype) if isinstance(value, Tensor) else value
        return grad + epsilon * sigma

    schedule = schedule_of("noise", "stddev", stddev)
    if not callable(stddev):
        require_range("noise", "stddev", stddev, 0.0)
    select, text = as_select("noise: mask", mask), f"noise({describe(stddev)})"
    return GradientTransform(apply, select, text, {"noise": schedule}, needs_rng=True)


def project(mask: Mask = matrices) -> GradientTransform:
    r"""Keep the part of the gradient that is orthogonal to the parameter. Use it for weights before a normalization.

    .. math:: g_i \leftarrow g_i - \frac{\langle g_i, p_i \rangle}{\langle p_i, p_i \rangle} p_i

    for each index :math:`i` of the first axis (Heo et al. 2021, arXiv:2006.08217, of every channel); where
    :math:`p_i = 0` the gradient stays. A normalization removes the norm of such weights, so the norm only lowers their
    effective learning rate. Projected gradients keep it from growing.
    """

    def apply(grad: Tensor, leaf: Tensor, value: None, key: None) -> Tensor:
        inner = _inner_axes(leaf)
        product = (grad * leaf).sum(inner, keepdim=True)
        square = (leaf * leaf).sum(inner, keepdim=True)
        return grad - leaf * torch.where(square > 0, product / square, 0.0)

    return GradientTransform(apply, as_select("project: mask", mask), "project()")


def _inner_axes(leaf: Tensor) -> list[int]:
    """Return all axes but the first; of a vector, the only one."""
    return list(range(1, leaf.ndim)) or list(range(leaf.ndim))


def _merged_schedules(parts: Sequence[GradientTransform | Optimizer]) -> dict[str, Schedule]:
    """Return the scheduled values of all parts by name.

    Raises a ComposeError if two have one name, or a transformation has two: it gets one value.
    """
    schedules: dict[str, Schedule] = {}
    for part in parts:
        if isinstance(part, GradientTransform) and len(part.schedules) > 1:
            raise ComposeError(f"chain: {part.text} has the schedules {', '.join(part.schedules)}; needs at most one")
        repeated = sorted(schedules.keys() & part.schedules)
        if repeated:
            raise ComposeError(f"chain: two parts have a scheduled value called {repeated[0]}; merge them into one")
        schedules.update(part.schedules)
    return schedules


def chain(*parts: GradientTransform | Optimizer) -> Optimizer:
    """Return an optimizer that transforms its gradients first, in the order of `parts`.

    Args:
        parts: results of `centralize`, `sign`, `noise` and `project`, or other `GradientTransform`; last, an optimizer.

    Raises:
        ComposeError: a part is neither, two parts have a scheduled value of the same name, or one has two; at an
            update, a transformation returns None, or writes to its gradient or parameter.
        OptionError: at `init`, a pattern matches no parameter.

    >>> import ftrain as ft
    >>> ft.optim.chain(ft.optim.centralize(), ft.optim.adamw(1e-3)).text
    'chain(centralize(), adamw(constant(1e-3)))'
    """
    optimizer = require_optimizer("chain", "the last part", parts[-1] if parts else None)
    transforms = [part for part in parts if isinstance(part, GradientTransform)]
    if len(transforms) < len(parts) - 1:
        other = next(part for part in parts if not isinstance(part, GradientTransform))
        raise ComposeError(
            f"chain: found {other!r} before the optimizer; needs a GradientTransform, as centralize(). "
            "A wrapper, as ft.clip(1.0), goes around the step: ft.compose(step, ft.clip(1.0))"
        )
    selects = [as_select(f"{transform.text}: select", transform.select) for transform in transforms]
    schedules = _merged_schedules([optimizer, *transforms])

    def init(params: PyTree) -> PyTree:
        for select in selects:
            require_matches(select, params)
        return optimizer.init(params)

    def chained(optimizer: Optimizer, index_of: Mapping[str, int] | None = None) -> Optimizer:
        apply = _make_apply(transforms, selects, index_of)

        def update(
            grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
        ) -> tuple[PyTree, PyTree]:
            transformed = apply(grads, params, hyper)
            return optimizer.update(transformed, opt_state, params, hyper, donate=donate)

        return replace(
            optimizer,
            update=update,
            schedules=schedules,
            text=f"chain({', '.join([*(transform.text for transform in transforms), optimizer.text])})",
            name="",
            split=None,
            needs_rng=optimizer.needs_rng or any(transform.needs_rng for transform in transforms),
            by_element=optimizer.by_element and all(transform.by_element for transform in transforms),
        )

    def split(params: PyTree, parts: Sequence[Sequence[int]]) -> list[Optimizer]:
        index_of = {name: index for index, name in enumerate(tree.leaf_names(params))}
        return [chained(part, index_of) for part in require_splittable("chain", optimizer)(params, parts)]

    return replace(chained(optimizer), init=init, split=split if optimizer.split else None)


def _make_apply(
    transforms: Sequence[GradientTransform], selects: Sequence[Select], index_of: Mapping[str, int] | None
) -> Callable[[PyTree, PyTree, Hyper], PyTree]:
    """Return the function that applies transformations to gradients, in their order.

    Random numbers depend on the index of a parameter among all parameters. If the function gets only some of them,
    `index_of` maps their names to these indices.
    """

    def select_leaves(
        specs: Sequence[optree.PyTreeSpec], columns: list[list[Tensor]]
    ) -> tuple[optree.PyTreeSpec, list[list[int]], Sequence[int]]:
        spec = common_spec(specs)
        names = tree.leaf_names(tree.unflatten(spec, columns[1]))
        named = list(zip(names, sharding.wholes(names, columns[1]), strict=True))
        selected = [[i for i, (name, leaf) in enumerate(named) if select(name, leaf)] for select in selects]
        return spec, selected, range(len(names)) if index_of is None else [index_of[name] for name in names]

    cache = StructureCache(select_leaves)

    def apply(grads: PyTree, params: PyTree, hyper: Hyper) -> PyTree:
        (spec, selected, random_indices), (gradients, leaves) = cache(grads, params)
        for number, (transform, indices) in enumerate(zip(transforms, selected, strict=True)):
            value = next((hyper[name] for name in transform.schedules), None)
            key = random.fold_in(hyper[RNG], number) if transform.needs_rng else None
            for i in indices:
                leaf_key = random.fold_in(key, random_indices[i]) if key is not None else None
                gradients[i] = _transformed(transform, gradients[i], leaves[i], value, leaf_key)
        return tree.unflatten(spec, gradients)

    return apply


def _transformed(
    transform: GradientTransform, gradient: Tensor, leaf: Tensor, value: Any, leaf_key: Tensor | None
) -> Tensor:
    """Return the result of a transformation of one leaf.

    Raises a ComposeError if it is None, or if the transformation writes to its gradient, which may be that of another
    parameter too, or to the parameter, which belongs to the old state.
    """
    versions = _torch.version_of(gradient), _torch.version_of(leaf)
    result = transform.apply(gradient, leaf, value, leaf_key)
    if result is None:
        raise ComposeError(f"chain: {transform.text} returns None; needs the new gradient")
    if (_torch.version_of(gradient), _torch.version_of(leaf)) != versions:
        raise ComposeError(
            f"chain: {transform.text} writes to its gradient or parameter, which another parameter or state may have "
            "too; return another tensor, as gradient * 2 in place of gradient.mul_(2)"
        )
    return result
