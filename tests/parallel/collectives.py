"""Record the collectives of a rank, and check that those of the ranks of each group match."""

import hashlib
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ftrain import tree


class Collective(NamedTuple):
    """The operation, the axis of the mesh along which it communicates, and its other arguments.

    A tensor is described by its shape and dtype.
    """

    operation: str
    axis: str
    arguments: tuple


class Recorder(TorchDispatchMode):
    """Context that records the functional collectives of this thread; a step issues no others.

    Args:
        groups: the groups of this rank by axis, as `ftrain.parallel.mesh.groups` returns them. Their names differ
            between ranks.
    """

    def __init__(self, groups):
        super().__init__()
        self._axes = {group.name: axis for axis, group in groups.items()}
        self.collectives = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "_c10d_functional":
            name = function.overloadpacket.__name__
            arguments = [_described(leaf) for leaf in tree.leaves([args, kwargs])]
            # The last argument is the name of the group; operations without one, such as `wait_tensor`, send nothing.
            if arguments[-1] in self._axes:
                self.collectives.append(Collective(name, self._axes[arguments[-1]], tuple(arguments[:-1])))
        return function(*args, **(kwargs or {}))


def _described(argument):
    return (*argument.shape, str(argument.dtype)) if isinstance(argument, torch.Tensor) else argument


EXCHANGE = "all_to_all_single"


def digests(collectives):
    """Return digests of the collectives of a rank: of their order with their axes, and of those along each axis.

    Of an exchange only the dtype counts: ranks send and receive different numbers of elements (`_require_paired`).
    """
    comparable = [
        collective._replace(arguments=collective.arguments[0][-1:]) if collective.operation == EXCHANGE else collective
        for collective in collectives
    ]
    order = [(collective.operation, collective.axis) for collective in comparable]
    by_axis = {axis: [collective for collective in comparable if collective.axis == axis] for _, axis in order}
    return {"order": _digest(order), **{axis: _digest(along) for axis, along in by_axis.items()}}


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
    """Check that all ranks issue collectives in one order, and the ranks of each group the same collectives.

    Different groups may issue different ones: blocks may have other lengths on other ranks.
    """
    digests_of_ranks = [digests(collectives) for collectives in collectives_of_ranks]
    for name in digests_of_ranks[0]:
        for ranks in _members(name, replicate, shard):
            by_rank = {rank: digests_of_ranks[rank][name] for rank in ranks}
            assert len(set(by_rank.values())) == 1, f"ranks differ in what they issue ({name}): {by_rank}"
    for axis in ("shard", "replicate", "all"):
        for ranks in _members(axis, replicate, shard):
            _require_paired(
                [[collective for collective in collectives_of_ranks[rank] if collective.axis == axis] for rank in ranks]
            )


def _require_paired(collectives_of_ranks):
    """Check that each rank of a group receives in each exchange what the others send to it."""
    size = len(collectives_of_ranks)
    exchanges = [
        [collective.arguments[1:] for collective in collectives if collective.operation == EXCHANGE]
        for collectives in collectives_of_ranks
    ]
    for counts_by_rank in zip(*exchanges, strict=True):
        received = [counts[:size] for counts in counts_by_rank]
        sent = [counts[size:] for counts in counts_by_rank]
        assert received == [*zip(*sent, strict=True)], f"ranks differ in what they issue: {received} of {sent}"
