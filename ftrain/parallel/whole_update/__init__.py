"""Updates of optimizers that need a leaf whole, on ranks that have a part each: the plan, the exchange, the update."""

from ftrain.parallel.whole_update.update import whole_update as whole_update

__all__ = ["whole_update"]
