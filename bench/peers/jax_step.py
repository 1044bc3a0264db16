"""JAX with optax: one jitted step, from the same weights; with `best` it donates parameters and moments."""

from __future__ import annotations

from typing import Any

from bench.gate import Gate
from bench.tasks import MissingError, Task


def drive(task: Task, gate: Gate) -> None:
    """Train until the gate closes."""
    import jax
    import jax.numpy as jnp
    import optax

    from bench.peers import jax_models

    if task.spec.jax is None:
        raise MissingError(f"{task.spec.text} has no JAX version")
    forward = getattr(jax_models, task.spec.jax)
    options = {
        "dtype": jnp.bfloat16 if task.precision == "bf16" else jnp.float32,
        "heads": task.sizes.model.get("heads", 1),
    }
    params = {name: jnp.asarray(value.detach().numpy()) for name, value in task.model().named_parameters()}
    batch = {name: jnp.asarray(value.numpy()) for name, value in task.batch().items()}
    optimizer = optax.chain(optax.clip_by_global_norm(task.max_norm), optax.adamw(task.rate, weight_decay=0.0))

    def step(params: Any, moments: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jax_models.loss(forward, p, batch, **options))(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    jitted = jax.jit(step, donate_argnums=(0, 1) if task.best else ())
    moments, loss = optimizer.init(params), None
    # JAX computes asynchronously, so the end of a turn must wait for the last step.
    gate.synchronize_with(lambda: jax.block_until_ready((params, moments)))
    for _ in gate:
        params, moments, loss = jitted(params, moments, batch)
        gate.record(loss)
