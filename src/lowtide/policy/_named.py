"""Policies by name: what can be typed on a command line, or given to ``apply`` as text."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from lowtide.errors import InvalidInputError
from lowtide.plan import Plan, simulate, solve
from lowtide.policy import _attention, _cheap, _chen, _full, _jax, _megatron, _settings, _torchtitan
from lowtide.policy._functions import close
from lowtide.policy._policy import Policy, PolicyRegion, Run
from lowtide.policy._preset import Preset
from lowtide.policy._selection import every, skip_last
from lowtide.records import CallSite, Category, Decision, StepTrace
from lowtide.units import parse_budget

NONE = "none"


@dataclass(frozen=True, repr=False)
class NoRegions(Policy):
    """Replays nothing."""

    def vote(self, site: CallSite, run: Run) -> Decision | None:
        """Nothing."""
        return None

    @property
    def whole(self) -> bool:
        """It keeps nothing."""
        return True

    def chosen(self, model: nn.Module) -> tuple[PolicyRegion, ...] | None:
        """No module."""
        return ()

    def __repr__(self) -> str:
        return "none()"


@dataclass(frozen=True)
class FromTrace:
    """A policy that is only known once a step was traced.

    Attributes:
        text: as it was typed.
        make: from the trace and the seconds that a solver may take.
    """

    text: str
    make: Callable[[StepTrace, float], Policy | Plan]


@dataclass(frozen=True, slots=True)
class Entry:
    """A name that can be typed.

    Attributes:
        form: how it is typed, ``every:N``.
        make: the policy, from what stands after the colon (empty if nothing does).
        line: what it does, in one line.
    """

    form: str
    make: Callable[[str], Policy | FromTrace]
    line: str

    @property
    def name(self) -> str:
        """What stands before the colon."""
        return self.form.partition(":")[0].rstrip("[")


def parse_policy(text: str) -> Policy | FromTrace:
    """Read a policy by name.

    Args:
        text: a form that ``lowtide policies`` lists, such as ``full``, ``every:2``, ``selective`` or ``plan:50%``.

    Returns:
        The policy; or one that has to be made from a trace.

    Raises:
        InvalidInputError: there is none of that name, or its argument cannot be read.
        BudgetError: the budget of a plan cannot be read.
    """
    name, colon, argument = (part.strip() for part in text.strip().partition(":"))
    entry = next((entry for entry in ENTRIES if entry.name == name), None)
    if entry is None:
        hint = close(name, [entry.name for entry in ENTRIES]) or f": write one of {', '.join(entry.form for entry in ENTRIES)}"
        raise InvalidInputError(f"there is no policy {text.strip()!r}{hint}")
    takes = ":" in entry.form
    if bool(argument) != takes and not (takes and entry.form.endswith("]") and not colon):
        raise InvalidInputError(f"there is no policy {text.strip()!r}: write {entry.form}")
    return entry.make(argument)


def _count(argument: str, form: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", argument):
        raise InvalidInputError(f"there is no policy {form.replace('N', argument)!r}: N is a number above zero")
    return int(argument)


def _words(argument: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in argument.split("+") if word.strip())


def _plan(argument: str) -> FromTrace:
    if parse_budget(argument).is_auto:
        raise InvalidInputError(f"the policy 'plan:{argument}' has no budget of its own: write bytes or a share, such as plan:50%")
    return FromTrace(f"plan:{argument}", lambda trace, seconds: solve(trace, _budget_bytes(argument, trace), time_limit_s=seconds))


def _budget_bytes(text: str, trace: StepTrace) -> int:
    budget, before = parse_budget(text), simulate(trace, None)
    if budget.bytes is not None:
        return budget.bytes
    if budget.share is not None:
        return int(budget.share * before.peak_bytes)
    from lowtide.explain import peak

    return before.peak_bytes - int((1 - (budget.activation_share or 0)) * peak(trace).of(Category.ACTIVATION))


def _none() -> Policy:
    """Replay nothing: the step as it is."""
    return Preset(NONE, (), NoRegions())


def _plain(make: Callable[[], Policy]) -> Entry:
    return Entry(make.__name__.lstrip("_"), lambda _: make(), _first_sentence(make))


def _first_sentence(function: Callable[..., object]) -> str:
    """The first line of what is written about it, without marks."""
    return (inspect.getdoc(function) or "").partition("\n")[0].replace("``", "")


ENTRIES: tuple[Entry, ...] = (
    _plain(_none),
    _plain(_full.full),
    Entry("every:N", lambda n: every(_count(n, "every:N")), "Replay the first of every N blocks whole."),
    Entry("skip_last:N", lambda n: skip_last(_count(n, "skip_last:N")), "Replay every block whole but the last N."),
    _plain(_chen.sqrt),
    _plain(_attention.selective),
    _plain(_attention.attention),
    Entry(
        "cheap",
        lambda _: FromTrace("cheap", lambda trace, seconds: _cheap.cheap(trace, time_limit_s=seconds)),
        "Recompute only what costs under 2 % of the step, all of it together: the least memory to be had for that.",
    ),
    Entry("torchtitan[:PATHS]", lambda words: _torchtitan.torchtitan(*_words(words)), _first_sentence(_torchtitan.torchtitan)),
    Entry(
        "megatron_uniform:N",
        lambda n: _megatron.megatron_full("uniform", _count(n, "megatron_uniform:N")),
        "Replay units of N blocks, each as one.",
    ),
    Entry(
        "megatron_block:N", lambda n: _megatron.megatron_full("block", _count(n, "megatron_block:N")), "Replay the first N blocks whole."
    ),
    Entry(
        "megatron_selective[:PARTS]",
        lambda words: _megatron.megatron_selective(*_words(words)),
        "Recompute parts of each block: core_attn, mlp, moe, shared_experts, layernorm, moe_act, mla_up_proj.",
    ),
    Entry("megatron:FLAGS", _settings.megatron, _first_sentence(_settings.megatron)),
    Entry("deepspeed:FILE", _settings.deepspeed, _first_sentence(_settings.deepspeed)),
    *map(_plain, (_jax.dots_saveable, _jax.dots_with_no_batch_dims_saveable, _jax.everything_saveable, _jax.nothing_saveable)),
    Entry(
        "save_only_these_names:NAMES",
        lambda words: _jax.save_only_these_names(*_words(words)),
        "Keep what lowtide.name gave one of these names.",
    ),
    Entry(
        "save_any_names_but_these:NAMES",
        lambda words: _jax.save_any_names_but_these(*_words(words)),
        "Keep what lowtide.name gave a name, unless it is one of these.",
    ),
    Entry(
        "save_anything_except_these_names:NAMES",
        lambda words: _jax.save_anything_except_these_names(*_words(words)),
        "Keep the result of every call, unless it has one of these names.",
    ),
    Entry("plan:BUDGET", _plan, "The fastest plan within a budget, such as plan:50% or plan:1.5GiB."),
)
"""Every name that can be typed, in the order in which they are listed."""
