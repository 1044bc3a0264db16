"""Updates of optimizers that need whole leaves, on ranks with a part each: the plan, the exchange, the update."""
