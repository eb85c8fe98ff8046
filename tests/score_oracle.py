"""Scores by their definitions: loops over pairs of runs, dictionaries of counts, nothing shared with the package."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations

Axes = Mapping[str, Sequence[Hashable]]


def sign(value: float) -> int:
    return int(value > 0) - int(value < 0)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
    mx, my = mean(x), mean(y)
    xy = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return xy / math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y))


def ranks(x: Sequence[float]) -> list[float]:
    """Counted from one; equal values share their mean rank."""
    ordered = sorted(x)
    places: dict[float, list[int]] = defaultdict(list)
    for place, value in enumerate(ordered, start=1):
        places[value].append(place)
    return [mean(places[value]) for value in x]


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    return pearson(ranks(x), ranks(y))


def kendall_a(x: Sequence[float], y: Sequence[float]) -> float:
    return mean([sign(x[a] - x[b]) * sign(y[a] - y[b]) for a in range(len(x)) for b in range(len(x)) if a != b])


def granulated(x: Sequence[float], y: Sequence[float], axes: Axes, seeds: Sequence[Hashable]) -> dict[str, float]:
    found = {}
    for name in axes:
        settings: dict[Hashable, list[int]] = defaultdict(list)
        for run in range(len(x)):
            others = tuple(values[run] for other, values in axes.items() if other != name)
            settings[others, seeds[run]].append(run)
        taus = []
        for runs in settings.values():
            if len(runs) >= 2:
                taus.append(kendall_a([x[run] for run in runs], [y[run] for run in runs]))
        found[name] = mean(taus)
    return found


def shared_and_entropy(
    x: Sequence[float],
    y: Sequence[float],
    given: Callable[[int], Hashable],
    symbol: Callable[[float], int],
    itself: bool,
    equal_weights: bool,
) -> tuple[float, float]:
    """I(V_x; V_y | U) and H(V_y | U), averaged over the values of U by probability or all alike."""
    by_value: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for a in range(len(x)):
        for b in range(len(x)):
            if a != b or itself:
                by_value[given(a), given(b)].append((symbol(x[a] - x[b]), symbol(y[a] - y[b])))
    every = sum(map(len, by_value.values()))
    information, entropy = 0.0, 0.0
    for pairs in by_value.values():
        weight = 1 / len(by_value) if equal_weights else len(pairs) / every
        count = len(pairs)
        for u in {pair[0] for pair in pairs}:
            for v in {pair[1] for pair in pairs}:
                joint = sum(pair == (u, v) for pair in pairs) / count
                left = sum(pair[0] == u for pair in pairs) / count
                right = sum(pair[1] == v for pair in pairs) / count
                if joint:
                    information += weight * joint * math.log2(joint / (left * right))
        for v in {pair[1] for pair in pairs}:
            share = sum(pair[1] == v for pair in pairs) / count
            entropy -= weight * share * math.log2(share)
    return information, entropy


def conditional_information(x: Sequence[float], y: Sequence[float], axes: Axes) -> dict[str, float]:
    found = {}
    for size in (0, 1, 2):
        for names in combinations(axes, size):

            def given(run: int, names: tuple[str, ...] = names) -> Hashable:
                return tuple(axes[name][run] for name in names)

            information, entropy = shared_and_entropy(x, y, given, sign, itself=False, equal_weights=False)
            found[" + ".join(names)] = information / entropy if entropy > 1e-12 else math.nan
    return found


def pgdl(x: Sequence[float], y: Sequence[float], axes: Axes) -> float:
    """As the competition's organisers scored a task: pairs of axes, larger or not, each run with itself as well."""
    found = []
    for names in combinations(axes, 2):

        def given(run: int, names: tuple[str, ...] = names) -> Hashable:
            return tuple(axes[name][run] for name in names)

        def larger(difference: float) -> int:
            return int(difference > 0)

        information, entropy = shared_and_entropy(x, y, given, larger, itself=True, equal_weights=True)
        if entropy > 1e-12:
            found.append(100 * information / entropy)
    return min(found, default=math.nan)


def environment_errors(x: Sequence[float], y: Sequence[float], axes: Axes, examples: int) -> list[float]:
    settings = [tuple(values[run] for values in axes.values()) for run in range(len(x))]
    errors: dict[Hashable, list[tuple[float, float]]] = defaultdict(list)
    for a in range(len(x)):
        for b in range(len(x)):
            if sum(one != other for one, other in zip(settings[a], settings[b], strict=True)) != 1:
                continue
            weight = max(0.0, 1 - 2 * math.exp(-2 * examples * (abs(y[a] - y[b]) / 2) ** 2)) ** 2
            wrong = (1 - sign(x[a] - x[b]) * sign(y[a] - y[b])) / 2
            errors[frozenset((settings[a], settings[b]))].append((weight, wrong))
    found = []
    for pairs in errors.values():
        total = sum(weight for weight, _ in pairs)
        if total > 0:
            found.append(sum(weight * wrong for weight, wrong in pairs) / total)
    return found


def drawn(values: Sequence[float], times: Sequence[int]) -> list[float]:
    """The values of a resample, copies side by side."""
    return [value for value, count in zip(values, times, strict=True) for _ in range(count)]
