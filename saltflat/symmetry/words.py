"""What is said of the rescalings of a network, the same in the table and in the picture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from saltflat.report.text import listed, printable
from saltflat.symmetry.blocks import ABSORBED, Block, Summary, layers_of

if TYPE_CHECKING:
    from saltflat.symmetry.watch import Obstacle

MOST_NAMES = 6
MOST_OBSTACLES = 12


def headline(found: Summary) -> str:
    """How much is free, in a sentence."""
    if not found.entries:
        return "This model has no parameters: there is nothing to rescale."
    if not found.scales:
        why = (
            "what lies between its inputs and outputs is held by the operations below."
            if found.obstacles
            else "all its parameters lie between inputs and outputs, without a unit in between."
        )
        return f"No rescaling{' by layers' * (found.kind == 'layer')} leaves this network's function alone: {why}"
    said = f"{many(found.scales, 'independent scale')}; {found.moving} of {found.entries} parameter entries can move"
    if found.kind == "layer":
        return f"{said}; every parameter has one factor."
    return f"{said}; {many(found.layer_scales, 'scale')} if every parameter has one factor."


def notes(block: Block) -> str:
    """What is special about a block."""
    said = []
    larger, smaller = layers_of(block.incoming), layers_of(block.opposite)
    lower = {*smaller}
    others = [layer for layer in block.layers[1:] if layer not in lower]
    if others:
        said.append(f"tied with {few(others, 1)}")
    if smaller:
        said.append(f"opposite {'within' if larger == smaller else 'in'} {few(smaller, 1)}")
    if block.absorbed_by:
        names = few(block.absorbed_by, 1)
        said.append(f"absorbed by {names}" if block.kind == ABSORBED else f"statistics of {names} follow")
    elif not (block.outgoing or smaller):
        said.append("nothing shrinks for it")
    return "; ".join(said)


def fixed_told(found: Summary) -> list[str]:
    """What is free for nothing, and what cannot move."""
    lines = []
    absorbed = sum(block.scales for block in found.blocks if block.kind == ABSORBED)
    if absorbed:
        lines.append(
            f"{many(absorbed, 'scale')} absorbed by BatchNorm: the layer before it can have any size, as only running "
            "statistics follow. saltflat.fold(model) gives the network without BatchNorm."
        )
    if found.fixed and found.scales:
        lines.append(
            f"Cannot move: {many(len(found.fixed), 'parameter')} with "
            f"{many(sum(found.fixed.values()), 'entry', 'entries')}: {few(list(found.fixed), MOST_NAMES)}."
        )
    lines += [f"For inputs whose masks decide as those of the example did: {line}" for line in found.assumed]
    return [printable(line) for line in [*lines, *(["Held in place by:"] if found.obstacles else [])]]


def held_told(found: Summary) -> list[str]:
    """The operations that keep scales from being free, those without a rule first; similar ones together."""
    alike: dict[tuple[bool, str, str, str], list[Obstacle]] = {}
    for each in sorted(found.obstacles, key=lambda each: each.known):
        where = re.sub(r"\d+", "*", each.where)
        alike.setdefault((each.known, each.operation, where, re.sub(r":\d+", ":*", each.line)), []).append(each)
    told = [obstacle_told(several) for several in alike.values()]
    left = len(told) - MOST_OBSTACLES
    return [
        printable(line)
        for line in [*told[:MOST_OBSTACLES], *([f"... and {left} more: group.obstacles has all."] if left > 0 else [])]
    ]


def obstacle_told(several: Sequence[Obstacle]) -> str:
    """One operation, in one or several places."""
    first = several[0]
    where = f" in {few([each.where for each in several], 1)}" if first.where else ""
    line = f" ({first.line})" if first.line else ""
    pinned = sum(each.pinned for each in several)
    if first.known:
        return f"{operation(first)}{where}: {many(pinned, 'scale')}{line}"
    return f"UNKNOWN {first.operation}{where}: has no rule, so all it touches was taken as fixed{line}"


def operation(each: Obstacle) -> str:
    """The name of an operation as people know it.

    Example:
        >>> from saltflat.symmetry.watch import Obstacle
        >>> operation(Obstacle("aten.native_layer_norm", "ln", "", True, 4))
        'layer_norm'
    """
    return each.operation.removeprefix("aten.").removeprefix("native_").lstrip("_").removeprefix("safe_")


def few(names: Iterable[str], count: int) -> str:
    """The first of many names.

    Example:
        >>> few(["conv1", "conv2", "conv3"], 1)
        'conv1 and 2 more'
    """
    names = list(names)
    if len(names) <= count + 1:
        return listed(names)
    return f"{', '.join(names[:count])} and {len(names) - count} more"


def many(count: int, one: str, more: str = "") -> str:
    """A number of things.

    Example:
        >>> many(1, "scale"), many(3, "entry", "entries")
        ('1 scale', '3 entries')
    """
    return f"{count} {one if count == 1 else more or one + 's'}"
