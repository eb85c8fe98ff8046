"""Random problems against the dense oracle: a short form with fixed choices, and a long one on request.

``SALTFLAT_FUZZ_SECONDS=3600 pytest tests/engine/test_fuzz.py -s`` searches with fresh choices for an hour. Every
failure is reduced to a minimal problem; from then on, problems with the same ingredients that fail in the same way
count as that failure, so that the search goes on to the next. ``SALTFLAT_FUZZ_SEED`` repeats a search.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from fuzz_blocks import BLOCKS, TABLES
from fuzz_data import FORMS, LOSSES
from fuzzing import INGREDIENTS, Drawn, WrongError, check, forget, problems
from hypothesis import HealthCheck, Phase, given, seed, settings

# The share of problems that have to end in a comparison: a fuzzer that only hears refusals finds nothing.
COMPARED = 0.7


def search(test: Callable[[Drawn], None], examples: int, start: int, around: str | None = None) -> None:
    """Run a test on drawn problems with the ingredient ``around`` in each; the same ones for the same ``start``."""
    quiet = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        print_blob=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    seed(start)(quiet(given(problems(around))(test)))()


def test_random_problems_around_every_ingredient_agree_with_the_oracle() -> None:
    ends: Counter[str] = Counter()
    seen: set[str] = set()

    def agrees(drawn: Drawn) -> None:
        seen.update(drawn.used)
        try:
            ends[check(drawn)] += 1
        finally:
            forget()

    for number, ingredient in enumerate(INGREDIENTS):
        # The plainest problem with it, and two random ones.
        search(agrees, 3, start=number, around=ingredient)
    assert ends["agrees"] >= COMPARED * sum(ends.values()), ends
    tables: list[dict[str, Any]] = [*BLOCKS.values(), TABLES, LOSSES, FORMS]
    plainest = {next(iter(table)) for table in tables}
    assert seen >= set(INGREDIENTS) - plainest


@pytest.mark.skipif("SALTFLAT_FUZZ_SECONDS" not in os.environ, reason="runs for as long as SALTFLAT_FUZZ_SECONDS says")
def test_a_long_search_finds_nothing() -> None:
    end = time.monotonic() + float(os.environ["SALTFLAT_FUZZ_SECONDS"])
    start = int(os.environ.get("SALTFLAT_FUZZ_SEED", random.SystemRandom().randrange(2**32)))
    print(f"\nSALTFLAT_FUZZ_SEED={start}")
    ends: Counter[str] = Counter()
    known: list[tuple[str, frozenset[str]]] = []
    found: list[str] = []

    def is_new(drawn: Drawn) -> None:
        if time.monotonic() > end:
            return
        try:
            ends[check(drawn)] += 1
        except WrongError as error:
            ends["wrong"] += 1
            minimal = error.kind, frozenset(drawn.used)
            if not any(kind == error.kind and ingredients <= minimal[1] for kind, ingredients in known):
                found[:] = [f"{error}\n{drawn!r}"]
                last[:] = [minimal]
                raise
        finally:
            forget()

    reports: list[str] = []
    last: list[tuple[str, frozenset[str]]] = []
    while time.monotonic() < end:
        try:
            search(is_new, 200, start + len(known) + sum(ends.values()))
        except WrongError:
            known += last
            reports += found
            print(f"--- failure {len(known)} after {sum(ends.values())} problems\n{found[0]}")
    print(f"{sum(ends.values())} problems: {dict(ends)}")
    assert not reports, f"{len(reports)} failures, each with its minimal problem:\n\n" + "\n\n".join(reports)
