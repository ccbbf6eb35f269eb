"""``lowtide policies``, and what can be typed as a policy of ``lowtide bench``."""

from __future__ import annotations

from lowtide.errors import InvalidInputError
from lowtide.plan import Plan
from lowtide.policy import ENTRIES, FromTrace, Policy, parse_policy
from lowtide.records import StepTrace

Wanted = dict[str, Policy | FromTrace]


def policies() -> None:
    """List the policies that can be named: on the command line, in lowtide.apply and in lowtide.checkpoint."""
    width = max(len(entry.form) for entry in ENTRIES)
    for entry in ENTRIES:
        print(f"{entry.form:{width}}  {entry.line}")
    print("\nN is a number; PATHS, PARTS and NAMES are joined by +, such as megatron_selective:mlp+layernorm.")
    print("FLAGS are those of Megatron-LM's command line, FILE is DeepSpeed's configuration.")


def read_policies(text: str) -> Wanted:
    """The policies in a list parted by commas, each once, as typed.

    Raises:
        InvalidInputError: one of them is unknown.
        BudgetError: the budget of a plan cannot be read.
    """
    found = {part: parse_policy(part) for part in (piece.strip() for piece in text.split(",")) if part}
    if not found:
        raise InvalidInputError("--policies names none: write some, parted by commas; `lowtide policies` lists them")
    return found


def made_for(policy: Policy | FromTrace, trace: StepTrace, *, time_limit_s: float = 30.0) -> Policy | Plan:
    """The policy; or what it makes of this step.

    Raises:
        InfeasibleBudgetError: no plan fits the budget.
    """
    return policy.make(trace, time_limit_s) if isinstance(policy, FromTrace) else policy
