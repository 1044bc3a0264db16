"""Find tensors that a loss uses with a gradient, but that do not train because they are not in the state."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ftrain import _torch, tree
from ftrain.errors import LossError, listed

log = logging.getLogger("ftrain")


class OutsideParams:
    """Looks for tensors outside of the state in the graphs of the first two runs of a loss.

    One of the module itself is an error; the logger ``ftrain`` warns of others, such as those of a second module.
    `module_params` are the parameters of the module by name, as they are outside of a step.
    """

    def __init__(self, name: str, module_params: Mapping[str, nn.Parameter]) -> None:
        self._name, self._module_params = name, module_params
        self.suspects: list[weakref.ref[Tensor]] = []
        """Leaves of the graph of the first run that may be new in each run: the loss may create them itself, for the
        gradient of an input. Those that the second run uses too do not train."""

    def check(self, total: Tensor, inputs: Sequence[Any], *, captured: bool) -> None:
        """Check the first run of a loss. Raises a LossError for a parameter of the module."""
        outside = _outside(total, inputs)
        for leaf in outside:
            if name := next((each for each, param in self._module_params.items() if param is leaf), None):
                raise LossError(
                    f"{self._name}: uses the parameter {name} by another reference than the attribute of the module, "
                    "which holds the tensor of the state, so that it would keep its first value. Use model(...) or "
                    "model.get_parameter(...) of the model that the criterion gets, and do not keep parameters of a "
                    "module in a list, a dict or a closure"
                )
        # A captured loss runs once, so there is no second run to compare; but tensors that it creates are fake.
        certain = [
            leaf for leaf in outside if isinstance(leaf, nn.Parameter) or (captured and not _torch.is_fake(leaf))
        ]
        self._log(certain)
        if not captured:
            self.suspects = [weakref.ref(leaf) for leaf in outside if not isinstance(leaf, nn.Parameter)]

    def check_again(self, total: Tensor, inputs: Sequence[Any]) -> None:
        """Check the second run, if there are suspects. A leaf that the loss creates is a new tensor in each run."""
        used = {*map(id, _outside(total, inputs))}
        self._log([leaf for suspect in self.suspects if (leaf := suspect()) is not None and id(leaf) in used])
        self.suspects = []

    def _log(self, outside: Sequence[Tensor]) -> None:
        if outside:
            log.warning(
                "%s: uses %d parameters that are not in the state, and do not train: %s. Pass one module with them to "
                "ft.from_module, or a tree with them to step.init(params); if they should not train, freeze them: "
                "requires_grad_(False). Points at which the loss takes a derivative belong in the batch",
                self._name,
                len(outside),
                listed([*map(tree.describe, outside)]),
            )


def _outside(total: Tensor, inputs: Sequence[Any]) -> list[Tensor]:
    """Return the leaves of the graph of a loss that are not among its inputs."""
    # Only the nodes of leaves have the attribute.
    leaves = [getattr(node, "variable", None) for node in _torch.nodes_of(total) if not node.next_functions]
    known = {*map(id, inputs)}
    return [leaf for leaf in leaves if leaf is not None and id(leaf) not in known]
