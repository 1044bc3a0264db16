"""A training step: what it consists of, how steps are composed, and what evaluates one."""
