"""Which names a piece of code reads from outside: chains such as ``CONFIG.scale`` or ``self.options["depth"]``, from its bytecode."""

from __future__ import annotations

import dis
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any


@dataclass(frozen=True, slots=True)
class Item:
    """An entry of a container, by a key that stands in the code."""

    key: Any


@dataclass(frozen=True, slots=True)
class Chain:
    """A name that is looked up, and what is read from what it stands for, one after the other.

    Attributes:
        is_global: the name is one of the module's; else a local one or one of a function around.
        root: the name.
        steps: names of attributes, and entries of containers.
        whole: at its end an attribute is read by a name that is only known when it is.
        guess: so it is if there is no attribute of the last name: that was but a part of one.
    """

    is_global: bool
    root: str
    steps: tuple[str | Item, ...] = ()
    whole: bool = False
    guess: bool = False

    def then(self, step: str | Item) -> Chain:
        """The chain that goes one step further."""
        if self.whole or step == "__dict__":
            return replace(self, whole=True)
        return replace(self, steps=(*self.steps, step))


_KNOWN: weakref.WeakKeyDictionary[CodeType, tuple[Chain, ...]] = weakref.WeakKeyDictionary()
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_LOCAL = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE")
_BY_NAME = frozenset({"getattr", "setattr", "hasattr", "delattr"})
_READERS = _BY_NAME | {"vars", "type"}
_PASSED_OVER = ("PUSH_NULL", "PRECALL", "CACHE", "RESUME", "NOP", "KW_NAMES", "NOT_TAKEN", "EXTENDED_ARG", "COPY", "DUP_TOP")


def chains_of(code: CodeType) -> tuple[Chain, ...]:
    """The chains of one function, those of functions inside it left out."""
    known = _KNOWN.get(code)
    if known is None:
        known = _KNOWN[code] = tuple(dict.fromkeys(_Reading().chains(code)))
    return known


class _Reading:
    """Goes through the instructions of a function.

    Attributes:
        chain: the one that is being read.
        reader: ``getattr`` or the like, of which this is the first argument.
        constant: what was loaded since: a key, or a default.
    """

    def __init__(self) -> None:
        self.chain: Chain | None = None
        self.reader = ""
        self.constant: Item | None = None

    def chains(self, code: CodeType) -> Iterator[Chain]:
        """Every chain, when its end is reached."""
        for instruction in dis.get_instructions(code):
            operation = instruction.opname
            if operation.startswith(_PASSED_OVER) or (self.chain is not None and self._goes_on(operation, instruction)):
                continue
            if self.chain is not None:
                yield self._ended(self.chain)
            self._begin(operation, instruction.argval)
        if self.chain is not None:
            yield self._ended(self.chain)

    def _goes_on(self, operation: str, instruction: dis.Instruction) -> bool:
        """Whether an instruction belongs to the chain."""
        assert self.chain is not None
        if operation in _ATTRIBUTE and self.constant is None and self.reader != "called":
            self.chain, self.constant = self.chain.then(str(instruction.argval)), None
        elif operation.startswith(("LOAD_CONST", "LOAD_SMALL_INT")):
            return self._constant(instruction.argval)
        elif self.constant is not None and (operation == "BINARY_SUBSCR" or instruction.argrepr == "[]"):
            self.chain, self.constant = self.chain.then(self.constant), None
        elif operation.startswith("CALL") and self.reader:
            self._called()
        else:
            return False
        return True

    def _constant(self, value: Any) -> bool:
        assert self.chain is not None
        if self.reader in _BY_NAME and isinstance(value, str):
            self.chain, self.reader = self.chain.then(value), "called"
            return True
        self.constant = Item(value) if type(value) in (int, str) else None
        return self.constant is not None or self.reader == "called"

    def _called(self) -> None:
        """The function of which the chain was an argument is called."""
        assert self.chain is not None
        if self.reader == "type":
            self.chain = self.chain.then("__class__")
        elif self.reader != "called":
            self.chain = replace(self.chain, whole=True)
        self.reader, self.constant = "", None

    def _ended(self, chain: Chain) -> Chain:
        if self.reader == "called":  # the constant may be but a part of the name
            chain = replace(chain, guess=True)
        elif self.reader in _BY_NAME or self.reader == "vars":
            chain = replace(chain, whole=True)
        self.chain, self.constant, self.reader = None, None, ""
        return chain

    def _begin(self, operation: str, name: object) -> None:
        """The chain that an instruction begins. Some load two names at once: the second one is read from, or names an attribute."""
        if operation in _GLOBAL and name in _READERS:
            self.reader = str(name)
            return
        names = name if isinstance(name, tuple) else (name,)
        last = names[0] if self.reader in _BY_NAME else names[-1] if names else None
        if isinstance(last, str) and operation in _GLOBAL:
            self.chain = Chain(True, last)
        elif isinstance(last, str) and operation.startswith(_LOCAL):
            self.chain = Chain(False, last)
        else:
            self.reader = ""
