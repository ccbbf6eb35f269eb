"""One call inside a region, as a policy sees it. No torch here: functions, overloads and dtypes are whatever torch says they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class CallSite:
    """One call of a torch function, or of a module, inside a region: a policy decides whether its results are kept.

    Attributes:
        function: what was called: ``F.linear``, ``torch.matmul``, ``torch.Tensor.softmax``; at module level the module itself.
        level: ``"function"`` or ``"module"``. A rule about ops is one about functions: the ops of a module are all that ran in it.
        ops: overloads that ran below autograd in the call, in order, those that only made views left out: ``(aten.addmm.default,)``.
        module: path of the innermost module around it, or of the module itself, from the model that the region was installed on.
            Where the region is a module that was not installed, from that module; empty in a plain function.
        module_types: classes of the modules around it, outermost first; at module level the module's own class is the last one.
        index: calls of the same function (or module) before it in this call of the region, as far as they are sites.
        position: ordinal among all sites of the region, in the order in which they were entered.
        name: what ``lowtide.name`` called its result; ``None`` if nothing did.
        shapes: of its tensor results.
        dtypes: of its tensor results.
        output_bytes: of its tensor results: what keeping them holds, unless something else keeps them alive anyway.
        random: it drew from a random generator.
        region: module path or name of the region.
        to_host: it was given tensors on an accelerator and returned tensors in host memory, for which the device has to wait.
        also_named: what else ``lowtide.name`` called its result, or a view of it.
    """

    function: Any
    level: Literal["function", "module"]
    ops: tuple[Any, ...] = ()
    module: str = ""
    module_types: tuple[type, ...] = ()
    index: int = 0
    position: int = 0
    name: str | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[Any, ...] = ()
    output_bytes: int = 0
    random: bool = False
    region: str = ""
    to_host: bool = False
    also_named: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All its names."""
        return () if self.name is None else (self.name, *self.also_named)

    @property
    def function_name(self) -> str:
        """Qualified name of the function, ``torch.nn.functional.softmax``; of a module its class."""
        if self.level == "module":
            return f"{type(self.function).__module__}.{type(self.function).__qualname__}"
        name = getattr(self.function, "__qualname__", None) or getattr(self.function, "__name__", repr(self.function))
        module = getattr(self.function, "__module__", None)
        return f"{module}.{name}" if module else str(name)
