"""Find parameters that a loss uses but that are not in the state: they get no gradient and keep their values."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from ftrain import tree
from ftrain.errors import LossError

log = logging.getLogger("ftrain")


def check_outside_params(total: Tensor, module_params: Mapping[str, nn.Parameter], name: str) -> None:
    """Find each `nn.Parameter` in the graph of a loss, in which the parameters of the state are plain tensors.

    The logger ``ftrain`` warns of those that are not in the state, such as those of a second module.

    Args:
        total: the loss, with its graph.
        module_params: the parameters of its module by name, as they are outside of a step.
        name: the name of the loss.

    Raises:
        LossError: when a parameter of the module itself is used instead of the tensor of the state.
    """
    outside = [*_parameters(total)]
    for parameter in outside:
        if param_name := next((each for each, param in module_params.items() if param is parameter), None):
            raise LossError(
                f"{name}: uses the parameter {param_name} by another reference than the attribute of the module, which "
                "holds the tensor of the state, so that it would keep its first value. Use model(...) or "
                "model.get_parameter(...) of the model that the criterion gets, and do not keep parameters of a module "
                "in a list, a dict or a closure"
            )
    if outside:
        log.warning(
            "%s: uses %d parameters that are not in the state, and do not train: %s%s. Pass one module with them to "
            "ft.from_module, or freeze them: parameter.requires_grad_(False)",
            name,
            len(outside),
            ", ".join(map(tree.describe, outside[: tree.MAX_LISTED])),
            ", ..." if len(outside) > tree.MAX_LISTED else "",
        )


def _parameters(total: Tensor) -> Iterator[nn.Parameter]:
    nodes, seen = [total.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # Only the nodes of leaves have the attribute.
        leaf = getattr(node, "variable", None) if not node.next_functions else None
        if isinstance(leaf, nn.Parameter):
            yield leaf
        nodes.extend(following for following, _ in node.next_functions)
