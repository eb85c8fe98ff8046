"""What is said of the rescalings of a network, the same in the table and in the picture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from saltflat.report.text import join_words, make_printable
from saltflat.symmetry.blocks import ABSORBED, ScaleBlock, SymmetrySummary, get_layer_names

if TYPE_CHECKING:
    from saltflat.symmetry.watch import Obstacle

MOST_NAMES = 6
MOST_OBSTACLES = 12


def format_headline(found: SymmetrySummary) -> str:
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
    scales = format_count(found.scales, "independent scale")
    said = f"{scales}; {found.moving} of {found.entries} parameter entries can move"
    if found.kind == "layer":
        return f"{said}; every parameter has one factor."
    return f"{said}; {format_count(found.layer_scales, 'scale')} if every parameter has one factor."


def format_block_notes(block: ScaleBlock) -> str:
    """What is special about a block."""
    said = []
    larger, smaller = get_layer_names(block.incoming), get_layer_names(block.opposite)
    lower = {*smaller}
    others = [layer for layer in block.layers[1:] if layer not in lower]
    if others:
        said.append(f"tied with {format_names(others, 1)}")
    if smaller:
        said.append(f"opposite {'within' if larger == smaller else 'in'} {format_names(smaller, 1)}")
    if block.absorbed_by:
        names = format_names(block.absorbed_by, 1)
        said.append(f"absorbed by {names}" if block.kind == ABSORBED else f"statistics of {names} follow")
    elif not (block.outgoing or smaller):
        said.append("nothing shrinks for it")
    return "; ".join(said)


def format_fixed_lines(found: SymmetrySummary) -> list[str]:
    """What is free for nothing, and what cannot move."""
    lines = []
    absorbed = sum(block.scales for block in found.blocks if block.kind == ABSORBED)
    if absorbed:
        lines.append(
            f"{format_count(absorbed, 'scale')} absorbed by BatchNorm: the layer before it can have any size, as only "
            "running statistics follow. saltflat.fold(model) gives the network without BatchNorm."
        )
    if found.fixed and found.scales:
        lines.append(
            f"Cannot move: {format_count(len(found.fixed), 'parameter')} with "
            f"{format_count(sum(found.fixed.values()), 'entry', 'entries')}: "
            f"{format_names(list(found.fixed), MOST_NAMES)}."
        )
    lines += [f"For inputs whose masks decide as those of the example did: {line}" for line in found.assumed]
    return [make_printable(line) for line in [*lines, *(["Held in place by:"] if found.obstacles else [])]]


def format_obstacles(found: SymmetrySummary) -> list[str]:
    """The operations that keep scales from being free, those without a rule first; similar ones together."""
    alike: dict[tuple[bool, str, str, str], list[Obstacle]] = {}
    for each in sorted(found.obstacles, key=lambda each: each.known):
        where = re.sub(r"\d+", "*", each.where)
        alike.setdefault((each.known, each.operation, where, re.sub(r":\d+", ":*", each.line)), []).append(each)
    told = [format_obstacle(several) for several in alike.values()]
    left = len(told) - MOST_OBSTACLES
    return [
        make_printable(line)
        for line in [*told[:MOST_OBSTACLES], *([f"... and {left} more: group.obstacles has all."] if left > 0 else [])]
    ]


def format_obstacle(several: Sequence[Obstacle]) -> str:
    """One operation, in one or several places."""
    first = several[0]
    where = f" in {format_names([each.where for each in several], 1)}" if first.where else ""
    line = f" ({first.line})" if first.line else ""
    pinned = sum(each.pinned for each in several)
    if first.known:
        return f"{format_operation(first)}{where}: {format_count(pinned, 'scale')}{line}"
    return f"UNKNOWN {first.operation}{where}: has no rule, so all it touches was taken as fixed{line}"


def format_operation(each: Obstacle) -> str:
    """The name of an operation as people know it.

    Example:
        >>> from saltflat.symmetry.watch import Obstacle
        >>> format_operation(Obstacle("aten.native_layer_norm", "ln", "", True, 4))
        'layer_norm'
    """
    return each.operation.removeprefix("aten.").removeprefix("native_").lstrip("_").removeprefix("safe_")


def format_names(names: Iterable[str], count: int) -> str:
    """The first of many names.

    Example:
        >>> format_names(["conv1", "conv2", "conv3"], 1)
        'conv1 and 2 more'
    """
    names = list(names)
    if len(names) <= count + 1:
        return join_words(names)
    return f"{', '.join(names[:count])} and {len(names) - count} more"


def format_count(count: int, one: str, more: str = "") -> str:
    """A number of things.

    Example:
        >>> format_count(1, "scale"), format_count(3, "entry", "entries")
        ('1 scale', '3 entries')
    """
    return f"{count} {one if count == 1 else more or one + 's'}"
