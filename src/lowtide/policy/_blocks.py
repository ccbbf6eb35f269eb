"""A model's blocks: the repeated modules that it is mostly made of, found from its structure alone.

Members of a list that have one class and modules of their own are blocks. Where they are themselves made mostly of such
lists (the stages of a CNN, the levels of a U-Net), the members of those are the blocks. Experts and heads stand in lists as
well, but run beside each other on one input: they are parts of a block. They are known by the name of the list, or by this: the modules
around are alike to the last shape, as stages hardly are, and the list is not called layers or the like. Where no list has blocks, siblings
of one class are.
"""

from __future__ import annotations

from torch import nn

from lowtide.policy._order import own_class

_LISTS = (nn.ModuleList, nn.ModuleDict)
_BESIDE_EACH_OTHER = ("expert", "head", "branch")
_AFTER_EACH_OTHER = ("layer", "block", "stage", "resnet", "cell", "level", "step")
_MOSTLY = 0.5

Found = list[tuple[str, nn.Module]]


def blocks(model: nn.Module) -> tuple[str, ...]:
    """Paths of the model's blocks, none inside another, in the order in which they were registered.

    A module that is used several times is found once, under its first path.

    Args:
        model: any module.

    Returns:
        The paths; none where nothing repeats.

    >>> layer = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> blocks(nn.Sequential(nn.Embedding(9, 2), nn.ModuleList([layer(), layer()]), nn.Linear(2, 9)))
    ('1.0', '1.1')
    """
    found = _repeated("", model, lists=True) or _repeated("", model, lists=False)
    kinds = {own_class(module) for _, module in found} - {nn.Sequential}
    chosen = {id(module) for _, module in found}
    paths: list[str] = []
    for path, module in model.named_modules():
        if (id(module) in chosen or own_class(module) in kinds) and not any(path.startswith(f"{outer}.") for outer in paths):
            paths.append(path)
    return tuple(paths)


def runs(paths: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Blocks that follow each other under one parent.

    >>> runs(("a.0", "a.1", "b.0"))
    [('a.0', 'a.1'), ('b.0',)]
    """
    found: dict[str, list[str]] = {}
    for path in paths:
        found.setdefault(path.rpartition(".")[0], []).append(path)
    return [tuple(members) for members in found.values()]


def _repeated(path: str, module: nn.Module, *, lists: bool) -> Found:
    """The outermost repeated modules in a module, each seen through to what it is made of."""
    children = _children(path, module, isinstance(module, nn.Sequential))
    classes = [own_class(child) for _, child, listed in children if listed or not lists]
    found: Found = []
    for child_path, child, listed in children:
        deeper = _repeated(child_path, child, lists=lists)
        repeats = (listed or not lists) and (classes.count(own_class(child)) > 1 or listed == _ONLY)
        small = _size(deeper) <= _MOSTLY * _size([(child_path, child)])
        peers = [peer for _, peer, _ in children if own_class(peer) is own_class(child)]
        found += [(child_path, child)] if repeats and (small or (_are_parts(child_path, deeper) and _are_alike(peers))) else deeper
    return found


def _are_parts(path: str, deeper: Found) -> bool:
    """Whether the name of no list in a module says that its members run one after the other."""
    names = {inner.removeprefix(f"{path}.").rpartition(".")[0].lower() for inner, _ in deeper}
    return all(names) and not any(word in name for name in names for word in _AFTER_EACH_OTHER)


def _are_alike(modules: list[nn.Module]) -> bool:
    shapes = [[parameter.shape for parameter in module.parameters()] for module in modules]
    return len(modules) > 1 and all(other == shapes[0] for other in shapes)


_ONLY = 2
"""The one member of a list."""


def _children(path: str, module: nn.Module, listed: int) -> list[tuple[str, nn.Module, int]]:
    """Children with modules of their own, whether they are in a list; those in a list stand for the list."""
    found: list[tuple[str, nn.Module, int]] = []
    for name, child in module._modules.items():
        child_path = f"{path}.{name}" if path else name
        if isinstance(child, _LISTS):
            if not any(word in name.lower() for word in _BESIDE_EACH_OTHER):
                found += _children(child_path, child, _ONLY if len(child) == 1 else 1)
        elif child is not None and any(True for _ in child.children()):
            found.append((child_path, child, listed))
    return found


def _size(modules: Found) -> int:
    """Parameters; of a module without any, one."""
    different = {id(module): module for _, module in modules}.values()
    return sum(sum(parameter.numel() for parameter in module.parameters()) or 1 for module in different)
