"""What the prior of a certificate has seen: positions or examples, which are compared with those of the bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Literal, SupportsIndex, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset

from saltflat.engine.data import Batch, Data, compute_digests, prepare_data, read_batches
from saltflat.engine.read_data import select_examples
from saltflat.errors import DataError, OptionError
from saltflat.validation import parse_integer

DIGESTED = 1024  # examples that are compared at once
FINE = 64  # numbers of an input from which on inputs that are equal up to rounding are copies
STEPS = 97.3137  # between the smallest and the largest number of an input, which are equal up to rounding
MOST_COPIES = 0.1  # share of the bound's inputs that may equal one that the prior has seen
# Where the prior is centered: at zero, at the weights of another model, or at weights by name.
PriorLike: TypeAlias = "Literal['zero'] | nn.Module | Mapping[str, Tensor]"
# What those weights have seen: nothing, the examples at some positions of the data, or data of their own.
PriorData: TypeAlias = "Literal['none'] | Sequence[int] | Tensor | Data | None"


@dataclass(frozen=True)
class Split:
    """The examples of the bound, and why the prior does not depend on them.

    Attributes:
        data: the bound's examples.
        seen: number of examples that the prior has seen.
        met: True for a prior at zero; None if it rests on the caller's word.
        evidence: what was checked.
        record: fingerprints and counts, to repeat the check.
        seen_data: what the prior has seen, if anything.
        marks: how often each input occurs, by its digest, where it was counted.
    """

    data: Data
    seen: int
    met: bool | None
    evidence: str
    record: Mapping[str, Any] = field(default_factory=dict)
    seen_data: Data | None = None
    marks: Counter[bytes] | None = None

    def count_inputs(self) -> Counter[bytes]:
        """Return how often each input of the bound occurs, by its digest."""
        return Fingerprints.compute(self.data).exact if self.marks is None else self.marks


def split_data(data: Data, prior: PriorLike, prior_data: PriorData, limit: int | None = None) -> Split:
    """Return the examples of the bound after checking that the prior has not seen them.

    Args:
        data: the examples, those of the prior included if ``prior_data`` names their positions.
        prior: as given to :func:`saltflat.certify_error`.
        prior_data: likewise.
        limit: use at most this many examples, the first ones; all if None.
    """
    positions = None if prior_data is None or isinstance(prior_data, str) else _parse_positions(prior_data)
    whole, data = data, select_examples(data, limit=limit)
    if isinstance(prior, str):
        if prior != "zero":
            raise OptionError(
                f"Expected 'zero', a model or a state_dict, but got prior={prior!r}. Try prior=initial_model."
            )
        if prior_data is not None and not (isinstance(prior_data, str) and prior_data == "none"):
            raise OptionError(
                "Expected no prior_data for a prior at zero, which has seen nothing, but got some. Try leaving it out, "
                "or passing the model that was trained on it as prior=."
            )
        return Split(data, 0, True, "It is centered at zero.")
    if not isinstance(prior, nn.Module | Mapping):
        raise OptionError(
            f"Expected 'zero', a model or a state_dict, but got a {type(prior).__name__} as prior. Try "
            "prior=initial_model."
        )
    if prior_data is None:
        raise OptionError(
            "Expected to be told which examples the prior has seen, but got prior= without prior_data=. Try "
            "prior_data='none' for weights from before training, or the examples or positions it was trained on."
        )
    if isinstance(prior_data, str):
        if prior_data != "none":
            raise OptionError(
                f"Expected 'none', examples or positions, but got prior_data={prior_data!r}. Try range(30000) for the "
                "first examples, or 'none' for weights from before training."
            )
        return Split(data, 0, None, "Its weights are said to be from before training.")
    if positions is not None:
        return _leave_out(whole, positions, limit)
    return _compare_examples(data, prior_data)


def _parse_positions(given: Any) -> Sequence[int] | None:
    """Return positions in the data, or None for anything else."""
    if isinstance(given, range) and given:
        return given
    if hasattr(given, "dtype") and hasattr(given, "tolist"):  # a tensor or an array
        shape, kind = tuple(given.shape), str(given.dtype)
        if len(shape) == 1 and shape[0] and "int" in kind:
            return [int(each) for each in given.tolist()]
        raise OptionError(
            f"Expected positions of examples as whole numbers, but got {kind} of shape {shape} as prior_data. Try "
            "mask.nonzero()[:, 0] for a mask, or (inputs, targets) for examples."
        )
    if not isinstance(given, Sequence | Set) or any(
        getattr(each, "shape", ()) or not isinstance(each, SupportsIndex | float) for each in given
    ):
        return None
    found = [parse_integer(each) for each in given]
    if None in found or not found:
        raise OptionError(
            f"Expected positions of examples as whole numbers, but got {str(given)[:40]} as prior_data. Try "
            "range(30000) for the first examples, or prior_data='none' for weights that have seen nothing."
        )
    return [each for each in found if each is not None]


def _leave_out(data: Data, positions: Sequence[int], limit: int | None) -> Split:
    """Return the examples at all other positions."""
    prepare_data(data)  # checks that there are as many inputs as targets
    pair = isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)
    if not pair and not (
        isinstance(data, Dataset) and not isinstance(data, IterableDataset) and hasattr(data, "__len__")
    ):
        raise OptionError(
            "Expected a pair of tensors or a dataset with a length, whose examples have positions, but got data of "
            f"type {type(data).__name__} with positions as prior_data. Try passing the examples themselves as "
            "prior_data, and only the others as data."
        )
    count = len(data[0]) if pair else len(data)  # type: ignore[index, arg-type]
    ends = (positions[0], positions[-1]) if isinstance(positions, range) else positions
    low, high = min(ends), max(ends)
    if low < 0 or high >= count:
        raise OptionError(
            f"Expected positions from 0 to {count - 1}, but got positions from {low} to {high} as prior_data. Try the "
            "positions of the examples in data."
        )
    taken = set(positions)
    if len(taken) < len(positions):
        raise OptionError(
            f"Expected different positions, but got {len(positions) - len(taken)} of {len(positions)} twice as "
            "prior_data. Try sorted(set(positions)), if the repeated ones are no mistake."
        )
    rest = [n for n in range(count) if n not in taken]
    if not rest:
        raise DataError(
            f"Expected examples that the prior has not seen, but got all {count} positions as prior_data. Try more "
            "data, or a prior that was trained on a part of it."
        )
    mark = sha256(",".join(map(str, sorted(taken))).encode()).hexdigest()[:16]

    def select(chosen: list[int]) -> Data:
        which = torch.tensor(chosen)
        return tuple(part[which.to(part.device)] for part in data) if pair else Subset(data, chosen)  # type: ignore

    left, seen = select_examples(select(rest), limit=limit), select(sorted(taken))
    marks = Fingerprints.compute(left)
    copies, own = marks.count_copies(Fingerprints.compute(seen)), marks.exact.total()
    equal = f" {copies} of the bound's {own} inputs equal one of them, up to rounding." if copies else ""
    return Split(
        left,
        len(taken),
        False if copies > MOST_COPIES * own else None,
        f"According to prior_data, it has seen {len(taken)} of {count} examples; the bound uses none of these.{equal}",
        {"prior_positions": mark, "prior_examples": len(taken)},
        seen,
        marks.exact,
    )


def _compare_examples(data: Data, prior_data: Data) -> Split:
    """Compare the inputs of the bound with those the prior has seen."""
    own, seen = Fingerprints.compute(data), Fingerprints.compute(prior_data)
    both, total, known = own.count_copies(seen), own.exact.total(), seen.exact.total()
    if both:
        raise DataError(
            f"Expected a prior that has not seen the bound's examples, but got {both} of {total} examples whose inputs "
            "are also in prior_data, up to rounding. Try passing only the other examples as data, or, if equal inputs "
            "are different examples, their positions as prior_data."
        )
    return Split(
        data,
        known,
        None,
        f"According to prior_data, it has seen {known} examples. None of the bound's {total} has the same inputs, up "
        "to rounding.",
        {"prior_inputs": combine_marks(seen.exact), "prior_examples": known},
        prior_data,
        own.exact,
    )


@dataclass(frozen=True)
class Fingerprints:
    """How often each input occurs in the data, by a digest.

    Attributes:
        exact: whatever the type of an input is; real numbers are compared in float32, the precision of most data.
        coarse: by about a hundred steps between the smallest and the largest number of an input, so that shifting,
            scaling or rounding it changes nothing. Inputs of few numbers are left out.
    """

    exact: Counter[bytes]
    coarse: Counter[bytes]

    @classmethod
    def compute(cls, data: Data) -> Fingerprints:
        """Read the data once."""
        exact: Counter[bytes] = Counter()
        coarse: Counter[bytes] = Counter()
        for whole in read_batches(prepare_data(data)):
            for start in range(0, whole.examples, DIGESTED):
                batch = whole.cut(start, start + DIGESTED)
                exact.update(_digest_inputs(batch, _normalize_numbers))
                fine = _find_fine(batch)
                if any(fine):
                    digests = _digest_inputs(batch, _quantize_numbers)
                    coarse.update(each for each, kept in zip(digests, fine, strict=True) if kept)
        return cls(exact, coarse)

    def count_copies(self, others: Fingerprints) -> int:
        """Return how many inputs are among the others."""
        pairs = (self.exact, others.exact), (self.coarse, others.coarse)
        return max(sum(count for mark, count in own.items() if mark in known) for own, known in pairs)


def _digest_inputs(batch: Batch, normalize: Callable[[Tensor], Tensor]) -> list[bytes]:
    args, kwargs = batch.map_tensors(normalize)
    named = dict(sorted(kwargs.items()))
    return compute_digests(replace(batch, args=args, kwargs=named, targets=torch.zeros(batch.examples)))


def _find_fine(batch: Batch) -> list[bool]:
    """Return which inputs have so many different steps that others hardly have the same by chance."""
    kept = torch.zeros(batch.examples, dtype=torch.bool)

    def count_steps(values: Tensor) -> Tensor:
        if values.is_floating_point() and values[0].numel() >= FINE:
            steps = _quantize_numbers(values).flatten(1).sort(1).values
            kept.logical_or_(((steps[:, 1:] != steps[:, :-1]).sum(1) >= FINE // 8).cpu())
        return values

    batch.map_tensors(count_steps)
    return kept.tolist()


def _quantize_numbers(values: Tensor) -> Tensor:
    """Return steps between the smallest and the largest number of each example."""
    if not values.is_floating_point() or values.ndim < 2 or not values[0].numel():
        return _normalize_numbers(values)
    rows = values.flatten(1).double()
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    # No round number of steps: 8-bit pixels would be on the border between two of them.
    return ((rows - low) / (high - low).clamp(min=1e-300) * STEPS).round().reshape(values.shape)


def _normalize_numbers(values: Tensor) -> Tensor:
    """Return equal numbers with equal bits, whatever their type is."""
    if values.is_complex():
        return values
    values = values.float() if values.is_floating_point() else values
    return values.double() + 0.0  # without negative zeros


def combine_marks(marks: Counter[bytes]) -> str:
    """Return one digest of all inputs, whatever their order."""
    return sha256(b"".join(sorted(marks.elements()))).hexdigest()[:16]
