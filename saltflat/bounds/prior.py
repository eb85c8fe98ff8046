"""The prior of a certificate: its center, the form it is normal in, and whether it has seen the bound's examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset

from saltflat.bounds.stochastic import BoundedLoss, compute_bounded_losses
from saltflat.engine.context import Context
from saltflat.engine.data import Data, compute_digests, prepare_data, read_batches
from saltflat.errors import DataError, ModelError, OptionError
from saltflat.symmetry.batch_norm_uses import is_batch_norm
from saltflat.symmetry.canonical import canonicalize
from saltflat.symmetry.equality import Example, compare_outputs, copy_model, parse_example
from saltflat.symmetry.fold import fold
from saltflat.validation import parse_integer

FRESH = 0.5  # a network from before training has at least this share of the error of guessing
SAME = {torch.float32: 1e-3, torch.float64: 1e-9}  # relative difference of outputs that counts as rounding
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
        met: whether that was checked; None if it is the caller's word.
        evidence: what was checked.
        record: fingerprints and counts, to repeat the check.
    """

    data: Data
    seen: int
    met: bool | None
    evidence: str
    record: Mapping[str, Any] = field(default_factory=dict)


def split_data(data: Data, prior: PriorLike, prior_data: PriorData) -> Split:
    """Return the examples of the bound after checking that the prior has not seen them.

    Args:
        data: the examples, those of the prior included if ``prior_data`` names their positions.
        prior: as given to :func:`saltflat.certify_error`.
        prior_data: likewise.
    """
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
            raise OptionError(f"Expected 'none', examples or positions, but got prior_data={prior_data!r}. Try 'none'.")
        return Split(data, 0, None, "Its weights are said to be from before training.")
    positions = _parse_positions(prior_data)
    if positions is not None:
        return _leave_out(data, positions)
    return _compare_examples(data, prior_data)


def _parse_positions(given: Any) -> list[int] | None:
    """Return positions in the data, or None for anything else."""
    if isinstance(given, Tensor):
        if given.dim() != 1 or given.is_floating_point() or given.dtype == torch.bool:
            raise OptionError(
                f"Expected positions of examples as whole numbers, but got a tensor of {given.dtype} and shape "
                f"{tuple(given.shape)} as prior_data. Try mask.nonzero()[:, 0] for a mask."
            )
        return [int(each) for each in given.tolist()]
    if isinstance(given, range):
        return list(given)
    if isinstance(given, Sequence) and not isinstance(given, str) and given:
        found = [parse_integer(each) for each in given]
        if all(each is not None for each in found):
            return [each for each in found if each is not None]
    if hasattr(given, "dtype") and hasattr(given, "tolist"):  # an array
        return _parse_positions(torch.as_tensor(given))
    return None


def _leave_out(data: Data, positions: list[int]) -> Split:
    """Return the examples at all other positions."""
    pair = isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)
    if not pair and not (
        isinstance(data, Dataset) and not isinstance(data, IterableDataset) and hasattr(data, "__len__")
    ):
        raise OptionError(
            "Expected a pair of tensors or a dataset with a length, whose examples have positions, but got data of "
            f"type {type(data).__name__} with positions as prior_data. Try passing the examples themselves as "
            "prior_data, and only the others as data."
        )
    count = len(data[0]) if pair else len(data)  # type: ignore[index, arg-type]
    taken = set(positions)
    if len(taken) < len(positions) or min(taken, default=0) < 0 or max(taken, default=0) >= count:
        raise OptionError(
            f"Expected different positions from 0 to {count - 1}, but got {len(positions)} positions from "
            f"{min(taken)} to {max(taken)} as prior_data, {len(positions) - len(taken)} of them repeated. Check the "
            "positions."
        )
    rest = [n for n in range(count) if n not in taken]
    if not rest:
        raise DataError(
            f"Expected examples that the prior has not seen, but got all {count} positions as prior_data. Try a prior "
            "that was trained on a part of the data."
        )
    mark = sha256(",".join(map(str, sorted(taken))).encode()).hexdigest()[:16]
    chosen = torch.tensor(rest)
    left: Data = tuple(part[chosen.to(part.device)] for part in data) if pair else Subset(data, rest)  # type: ignore
    return Split(
        left,
        len(taken),
        True,
        f"It has seen {len(taken)} of {count} examples, by their positions; the bound uses the other {len(rest)}.",
        {"prior_positions": mark, "prior_examples": len(taken)},
    )


def _compare_examples(data: Data, prior_data: Data) -> Split:
    """Compare the inputs of the bound with those the prior has seen."""
    own, seen = fingerprint_inputs(data), fingerprint_inputs(prior_data)
    both = sum(count for mark, count in own.items() if mark in seen)
    total, known = sum(own.values()), sum(seen.values())
    if both:
        raise DataError(
            f"Expected a prior that has not seen the bound's examples, but got {both} of {total} examples whose inputs "
            "are also in prior_data. Try passing only the other examples as data, or, if equal inputs are different "
            "examples, their positions as prior_data."
        )
    return Split(
        data,
        known,
        True,
        f"It has seen {known} examples, and none of the bound's {total} has the same inputs as one of them.",
        {"prior_inputs": combine_marks(seen), "prior_examples": known},
    )


def fingerprint_inputs(data: Data) -> Counter[bytes]:
    """Return how often each input occurs in the data, by a digest of it in float32."""
    found: Counter[bytes] = Counter()
    for batch in read_batches(prepare_data(data)):
        alike = batch.to(torch.float32)
        found.update(compute_digests(replace(alike, targets=torch.zeros(alike.examples, dtype=torch.int64))))
    return found


def combine_marks(marks: Counter[bytes]) -> str:
    """Return one digest of all inputs, whatever their order."""
    return sha256(b"".join(sorted(marks.elements()))).hexdigest()[:16]


def build_prior_model(model: nn.Module, prior: nn.Module | Mapping[str, Tensor]) -> nn.Module:
    """Return a model of the prior's weights, after checking that it has the same parameters."""
    if isinstance(prior, nn.Module):
        shapes = [{name: tuple(p.shape) for name, p in each.named_parameters()} for each in (model, prior)]
        if shapes[0] != shapes[1]:
            name, shape = sorted({*shapes[0].items()} ^ {*shapes[1].items()})[0]
            raise ModelError(
                f"Expected a prior of the model's architecture, but got parameters of which only one model has "
                f"{name!r} with the shape {shape}. Try a copy of the model from before training."
            )
        return copy_model(prior)
    made = copy_model(model)
    try:
        made.load_state_dict(dict(prior))
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ModelError(
            f"Expected the state_dict of the model, but got a prior that does not fit "
            f"({str(error).splitlines()[-1].strip()}). Try initial = copy.deepcopy(model) before training."
        ) from error
    return made


@dataclass(frozen=True)
class Gauge:
    """The form of the network in which posterior and prior are normal.

    Attributes:
        model: a private copy of the network in this form.
        prior: the prior's network in its own form; None for a prior at zero.
        name: ``"canonical"`` or ``"given"``.
        problem: why the canonical form is not used; empty if it is.
        buffers: names of the real-valued buffers.
    """

    model: nn.Module
    prior: nn.Module | None
    name: str
    problem: str
    buffers: tuple[str, ...]

    def get_center(self, name: str, value: Tensor) -> Tensor:
        """Return the mean of the prior for a parameter."""
        if self.prior is None:
            return torch.zeros_like(value, dtype=torch.float64)
        return self.prior.get_parameter(name).detach().double()


def choose_gauge(model: nn.Module, prior: PriorLike, example: Example, dtype: torch.dtype | None) -> Gauge:
    """Return private copies of the network and of the prior's, without BatchNorm, in canonical form if possible."""
    copies = [copy_model(model)]
    if not isinstance(prior, str):
        copies.append(build_prior_model(model, prior))
        for (name, one), (_, two) in zip(*(each.named_parameters() for each in copies), strict=True):
            if not one.requires_grad and not torch.equal(one, two):
                raise ModelError(
                    f"Expected frozen parameters to be the same in model and prior, but got {name!r}, which differs. "
                    "Try model.requires_grad_() for what was trained, or the same frozen weights in both."
                )
    if dtype is not None:
        copies = [each.to(dtype) for each in copies]
    for number, each in enumerate(copies):
        if any(is_batch_norm(module) for module in each.modules()):
            copies[number] = fold(each, example)
    # A frozen parameter stays a constant of the problem.
    for made in copies[1:]:
        made.requires_grad_(True)
    buffers = [{n: b for n, b in each.named_buffers() if b.is_floating_point()} for each in copies]
    left = [name for name, module in copies[0].named_modules() if is_batch_norm(module)]
    if left:
        raise ModelError(
            f"Expected BatchNorm that can be folded, but got {left[0]!r}, whose running statistics depend on the data. "
            "Try a model without BatchNorm, or with nn.GroupNorm."
        )
    for name, value in buffers[0].items():
        if len(buffers) > 1 and not torch.equal(value, buffers[1].get(name, value[:0])):
            raise ModelError(
                f"Expected buffers that do not depend on the data, but got {name!r}, which differs between model and "
                "prior. Try computing it from neither, or making it a parameter."
            )
    name, problem = "canonical", ""
    try:
        forms = [canonicalize(each, example) for each in copies]
        inputs = parse_example(example)
        off = max(compare_outputs(a, b, inputs) for a, b in zip(copies, forms, strict=True))
        kinds = [p.dtype for p in copies[0].parameters()]
        if not off <= max(SAME.get(kind, SAME[torch.float32]) for kind in kinds):
            raise ModelError(f"the canonical form changes the outputs by {off:.1e}")
    except ModelError as error:
        forms, name, problem = copies, "given", str(error)
    return Gauge(forms[0], forms[1] if len(forms) > 1 else None, name, problem, tuple(buffers[0]))


@dataclass(frozen=True)
class OwnRisk:
    """How a network itself does on the examples.

    Attributes:
        risk: its mean loss in [0, 1].
        error: its error.
        classes: the number of classes.
    """

    risk: float
    error: float
    classes: int


def measure_risk(context: Context, of: BoundedLoss, what: str) -> OwnRisk:
    """Return how the network itself does, after checking all of its outputs."""
    problem, classes, seen = context.problem, 2, 0
    totals = {of: 0.0, "error": 0.0}
    with torch.no_grad():
        for batch in context.read_chunks(0):
            outputs = problem.network(batch)
            problem.check_outputs(outputs, batch)
            context.check_uncoupled(batch, outputs)
            for kind in totals:
                losses = compute_bounded_losses(
                    "error" if kind == "error" else of, problem.loss, outputs, batch.targets
                )
                totals[kind] += float(losses.sum())
            classes = max(2, outputs[0].numel())
            seen += batch.examples
            context.tick(what, seen, problem.num_examples)
    return OwnRisk(totals[of] / seen, totals["error"] / seen, classes)


def check_unseen(prior: OwnRisk) -> None:
    """Check that weights that are said to be from before training do not know the examples."""
    guess = 1 - 1 / prior.classes
    if prior.error < FRESH * guess:
        raise DataError(
            f"Expected weights from before training with prior_data='none', but got a prior that errs on only "
            f"{prior.error:.1%} of these examples, where guessing errs on {guess:.0%}. Try passing what it was trained "
            "on as prior_data."
        )
