"""Parameters that a loss uses and that are not in the state: it would get no gradient for them, and old values."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from ftrain import tree
from ftrain.errors import LossError

log = logging.getLogger("ftrain")


def check_outside_params(total: Tensor, module_params: Mapping[str, nn.Parameter], name: str) -> None:
    """Look for parameters in the graph of a loss; those of the state are tensors, but no `nn.Parameter`.

    The logger ``ftrain`` says which are not in the state and so do not train, such as those of a second module.

    Args:
        total: the loss, with its graph.
        module_params: the parameters of its module, as they are outside of a step.
        name: of the loss.

    Raises:
        LossError: for one of the module itself, whose place in the module has the tensor of the state.
    """
    outside = [*_parameters(total)]
    for parameter in outside:
        if place := next((each for each, param in module_params.items() if param is parameter), None):
            raise LossError(
                f"{name}: uses the parameter {place} from elsewhere than its place in the module, where the one of the "
                "state is, so that it would keep its first value. Use model(...) or model.get_parameter(...) of the "
                "model that the criterion is given, and in a module keep no parameter in a list, a dict or a function"
            )
    if outside:
        log.warning(
            "%s: uses %d parameters that are not in the state, and do not train: %s%s. Make one module of both for "
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
        # Only the nodes of leaves have one.
        leaf = getattr(node, "variable", None) if not node.next_functions else None
        if isinstance(leaf, nn.Parameter):
            yield leaf
        nodes.extend(following for following, _ in node.next_functions)
