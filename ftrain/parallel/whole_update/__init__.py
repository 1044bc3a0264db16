"""Updates of optimizers that need whole leaves, on ranks with a part each: the plan, the exchange, the update."""

from ftrain.parallel.whole_update.update import whole_update as whole_update

__all__ = ["whole_update"]
