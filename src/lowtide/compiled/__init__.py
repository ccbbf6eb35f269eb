"""Byte budgets for what ``torch.compile`` compiles: what forward saves is decided in the compiler's partitioner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.compiled._fit import CompiledFit, fit_compiled
    from lowtide.compiled._options import CompileOptions, compile_options

__all__ = ["CompileOptions", "CompiledFit", "compile_options", "fit_compiled"]

_FILES = {"CompileOptions": "_options", "compile_options": "_options", "CompiledFit": "_fit", "fit_compiled": "_fit"}


def __getattr__(name: str) -> Any:
    """The compiler's parts take long to import: they are imported when they are first used."""
    from importlib import import_module

    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
