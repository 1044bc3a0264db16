"""What a rank asks of others: the sequence of its collectives, on which the ranks of each group must agree."""

import hashlib
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ftrain import tree


class Collective(NamedTuple):
    """The operation, the axis of the mesh along which it communicates, and its other arguments.

    Of a tensor these are shape and dtype.
    """

    operation: str
    axis: str
    arguments: tuple


class Recorder(TorchDispatchMode):
    """Context that keeps the functional collectives of this thread, which are all that a step issues.

    Args:
        groups: of this rank by axis, as `ftrain.parallel.mesh.groups` returns them. Their names differ between ranks.
    """

    def __init__(self, groups):
        super().__init__()
        self._axes = {group.name: axis for axis, group in groups.items()}
        self.collectives = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "_c10d_functional":
            name, arguments = (
                function.overloadpacket.__name__,
                [_described(leaf) for leaf in tree.leaves([args, kwargs])],
            )
            # The name of the group stands last; operations without one, such as `wait_tensor`, send nothing.
            if arguments[-1] in self._axes:
                self.collectives.append(Collective(name, self._axes[arguments[-1]], tuple(arguments[:-1])))
        return function(*args, **(kwargs or {}))


def _described(argument):
    return (*argument.shape, str(argument.dtype)) if isinstance(argument, torch.Tensor) else argument


EXCHANGE = "all_to_all_single"


def digests(collectives):
    """Return digests of what a rank issues: in which order along which axis, and what along each axis.

    Of an exchange only the dtype: ranks send and receive different numbers of elements (`require_paired`).
    """
    collectives = [
        each._replace(arguments=each.arguments[0][-1:]) if each.operation == EXCHANGE else each for each in collectives
    ]
    order = [(each.operation, each.axis) for each in collectives]
    along = {axis: [each for each in collectives if each.axis == axis] for _, axis in order}
    return {"order": _digest(order), **{axis: _digest(issued) for axis, issued in along.items()}}


def _digest(value):
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _members(axis, replicate, shard):
    """Return the ranks of each group along an axis."""
    if axis == "shard":
        return [range(row * shard, (row + 1) * shard) for row in range(replicate)]
    if axis == "replicate":
        return [range(column, replicate * shard, shard) for column in range(shard)]
    return [range(replicate * shard)]


def require_matched(collectives_of_ranks, replicate, shard):
    """Check that all ranks issue in one order, and the ranks of each group the same.

    Blocks may have other lengths on other ranks: what the ranks of one group add up is not what those of another do.
    """
    digests_of_ranks = [*map(digests, collectives_of_ranks)]
    for name in digests_of_ranks[0]:
        for ranks in _members(name, replicate, shard):
            actual = {rank: digests_of_ranks[rank][name] for rank in ranks}
            assert len(set(actual.values())) == 1, f"ranks differ in what they issue ({name}): {actual}"
    for axis in ("shard", "replicate", "all"):
        for ranks in _members(axis, replicate, shard):
            _require_paired([[each for each in collectives_of_ranks[rank] if each.axis == axis] for rank in ranks])


def _require_paired(collectives_of_ranks):
    """Check that each rank of a group receives in each exchange what the others send to it."""
    size = len(collectives_of_ranks)
    exchanges = [
        [each.arguments[1:] for each in issued if each.operation == EXCHANGE] for issued in collectives_of_ranks
    ]
    for counts in zip(*exchanges, strict=True):
        received, sent = [each[:size] for each in counts], [each[size:] for each in counts]
        assert received == [*zip(*sent, strict=True)], f"ranks differ in what they issue: {received} of {sent}"
