"""Calls picked out by the modules that they are, or are made in."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from torch import nn

from lowtide.policy._matchers import Matcher
from lowtide.records import CallSite

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?:\.|$)")


@dataclass(frozen=True, repr=False)
class InModule(Matcher):
    """Calls of a module, or all calls inside one.

    Attributes:
        target: its class, or its path, where ``*`` stands for one name and ``**`` for any number of them.
        inside: all calls inside it; otherwise the calls of the module itself.
    """

    target: type | str
    inside: bool

    def matches(self, site: CallSite) -> bool:
        """Whether it is, or is in, such a module."""
        if not self.inside:
            return site.level == "module" and self.fits(site.module, type(site.function))
        if isinstance(self.target, str):
            return any(path_fits(self.target, path) for path in _with_ancestors(plain_path(site.module)))
        return any(issubclass(kind, self.target) for kind in site.module_types)

    def fits(self, path: str, kind: type) -> bool:
        """Whether a module of this path and class is meant."""
        return path_fits(self.target, plain_path(path)) if isinstance(self.target, str) else issubclass(kind, self.target)

    def is_in(self, model: nn.Module) -> bool:
        """Whether the model has such a module."""
        return any(self.fits(path, type(module)) for path, module in model.named_modules())

    def near(self, site: CallSite) -> Iterable[str]:
        """Paths and classes around the call."""
        if isinstance(self.target, str):
            return (plain_path(site.module),)
        return (kind.__name__ for kind in site.module_types)

    def __repr__(self) -> str:
        target = repr(self.target) if isinstance(self.target, str) else self.target.__qualname__
        return f"{'inside' if self.inside else 'module'}({target})"


def plain_path(path: str) -> str:
    """A module's path without the names that wrappers put into it.

    >>> plain_path("_orig_mod.blocks.0._checkpoint_wrapped_module.mlp")
    'blocks.0.mlp'
    """
    return _WRAPPERS.sub("", path).rstrip(".")


def path_fits(pattern: str, path: str) -> bool:
    """Whether a path fits a pattern.

    >>> path_fits("blocks.*.mlp", "blocks.3.mlp"), path_fits("**.mlp", "a.b.mlp"), path_fits("*.mlp", "a.b.mlp")
    (True, True, False)
    """
    return _compiled(pattern).fullmatch(path) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    text = re.escape(pattern).replace(r"\*\*\.", r"(?:.+\.)?").replace(r"\*\*", ".*").replace(r"\*", r"[^.]*")
    return re.compile(text)


def _with_ancestors(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
