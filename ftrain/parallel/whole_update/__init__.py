"""Updates by optimizers that need whole leaves, on ranks that have a part of each leaf."""
