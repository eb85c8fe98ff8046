"""The groups of examples that standard errors come from.

The examples are split at random into a few groups. Every statistic is kept group by group, so that any function of
statistics can be evaluated with one group left out at a time, and the scatter of these values gives its standard error.
The split depends on the number of examples alone: two networks measured on the same data have the same groups, and the
error of their *difference* is estimated from the differences group by group, in which most of the scatter cancels.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

MOST_GROUPS = 20
LEAST_GROUPS = 8
GROUP_SIZE = 50  # examples in a group, if that makes at least LEAST_GROUPS of them


class ExampleGroups:
    """A random split of the examples into groups.

    Args:
        examples: number of examples; None if it is not known before the data has been read.
    """

    def __init__(self, examples: int | None) -> None:
        self.examples = examples
        fitting = MOST_GROUPS if examples is None else min(MOST_GROUPS, max(LEAST_GROUPS, examples // GROUP_SIZE))
        self.count = fitting if examples is None else max(1, min(fitting, examples))
        self._numbers = None
        if examples is not None:
            self._numbers = torch.from_numpy(np.random.default_rng(0).permutation(examples) % self.count)

    @classmethod
    def from_numbers(cls, numbers: Tensor, count: int) -> ExampleGroups:
        """Return a split into ``count`` groups, some of which may be empty, from the group of every example."""
        groups = cls(len(numbers))
        groups.count, groups._numbers = count, numbers
        return groups

    def find_groups(self, places: Tensor) -> Tensor:
        """Return the groups of the examples at these positions in the data."""
        known = 0 if self._numbers is None else len(self._numbers)
        inside = places < known
        found = torch.empty(len(places), dtype=torch.long)
        if self._numbers is not None:
            found[inside] = self._numbers[places[inside]]
        # If the length is unknown, or wrong, groups are drawn independently, so that every position has one.
        drawn = [int(np.random.Philox(key=[0, n]).random_raw()) % self.count for n in places[~inside].tolist()]
        found[~inside] = torch.tensor(drawn, dtype=torch.long)
        return found
