"""The precision of float32 matrix products during a step; torch keeps one setting for the whole process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ftrain.errors import ComposeError
from ftrain.types import Loss


def set_matmul_precision(loss: Loss, text: str, precise: Callable[[], AbstractContextManager[None]]) -> Loss:
    """Return a loss whose step runs in a context that sets the precision of float32 products.

    Args:
        loss: the loss.
        text: the wrapper that sets it, as it prints.
        precise: makes the context.

    Raises:
        ComposeError: when another wrapper sets it already.
    """
    if loss.products:
        raise ComposeError(
            f"{text}: the precision of float32 products is set by {loss.products} already; leave one of them out:\n"
            f"{loss.text}"
        )

    @contextmanager
    def scope(training: bool) -> Iterator[None]:
        with loss.scope(training), precise():
            yield

    return dataclasses.replace(loss, scope=scope, wrapper_texts=(*loss.wrapper_texts, text), products=text)
