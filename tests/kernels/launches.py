"""What Triton makes of the arguments of launches, without a GPU: they are bound and specialised as for one, and nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime import jit


def binder_of(kernel: Any) -> Callable[..., tuple[dict[str, Any], list[tuple[str, Any]], dict[str, Any]]]:
    """Takes a launch's arguments; gives them by name, (type, what is known of the value) of each, and the options."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder: Callable[..., Any] = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
    return binder


@contextmanager
def launches() -> Iterator[dict[Any, set[str]]]:
    """Within it launches only record, by kernel, for which arguments it would have been compiled."""
    found: dict[Any, set[str]] = {}
    binders: dict[Any, Any] = {}

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        if kernel not in binders:
            binders[kernel] = binder_of(kernel)
        _, specialised, options = binders[kernel](*arguments, **constants)
        found.setdefault(kernel, set()).add(f"{specialised} {options}")

    whole, jit.JITFunction.run = jit.JITFunction.run, run
    try:
        yield found
    finally:
        jit.JITFunction.run = whole
