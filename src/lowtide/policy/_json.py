"""Policies as JSON: each value under the name of its class, with its fields."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from lowtide.errors import InvalidInputError
from lowtide.policy import _matchers, _megatron, _module_matchers, _named, _preset, _rules, _selection, _settings
from lowtide.policy._functions import dump, load
from lowtide.policy._matchers import Matcher
from lowtide.policy._policy import Policy
from lowtide.records import Decision

FORMAT = "lowtide.policy"
VERSION = 1

_MODULES = (_matchers, _module_matchers, _rules, _selection, _preset, _megatron, _named, _settings)
_KINDS: dict[str, type] = {
    name: kind
    for place in _MODULES
    for name, kind in vars(place).items()
    if isinstance(kind, type) and issubclass(kind, (Policy, Matcher)) and kind not in (Policy, Matcher)
}


def encode(policy: Policy) -> str:
    """Write a policy.

    Raises:
        InvalidInputError: it holds a function or class that cannot be found again by a name.
    """
    return json.dumps({"format": FORMAT, "version": VERSION, "policy": _value(policy)}, indent=2) + "\n"


def _value(value: Any) -> Any:
    if isinstance(value, (Policy, Matcher)):
        return {"kind": type(value).__name__, **{field.name: _value(getattr(value, field.name)) for field in fields(value)}}
    if isinstance(value, tuple):
        return [_value(part) for part in value]
    if isinstance(value, Decision):
        return {"decision": value.value}
    return value if value is None or isinstance(value, (str, int, float, bool)) else {"object": dump(value)}


def policy_from_json(text: str) -> Policy:
    """Read what ``Policy.to_json`` wrote. Modules of the user's own that it names have to be imported already.

    Raises:
        InvalidInputError: not JSON, not a policy, of another version, or it names what is not there.
    """
    try:
        read = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"not a policy: it is not JSON ({error})") from error
    if not isinstance(read, dict) or read.get("format") != FORMAT or read.get("version") != VERSION:
        raise InvalidInputError(f"not a policy of this version: it must have format {FORMAT!r} and version {VERSION}")
    policy = _object(read.get("policy"))
    if not isinstance(policy, Policy):
        raise InvalidInputError(f"not a policy: its field 'policy' is {policy!r}")
    return policy


def _object(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_object, value))
    if not isinstance(value, dict):
        return value
    if value.keys() == {"decision"}:
        return Decision(value["decision"])
    if value.keys() == {"object"}:
        return load(value["object"])
    return _made(dict(value))


def _made(found: dict[str, Any]) -> Any:
    kind = _KINDS.get(str(found.pop("kind", None)))
    known = set() if kind is None else {field.name for field in fields(kind)}
    if kind is None or found.keys() != known:
        raise InvalidInputError(
            f"not a policy: a part has the fields {', '.join(map(str, found)) or 'none'}, which belong to no known kind"
        )
    return kind(**{name: _object(part) for name, part in found.items()})
