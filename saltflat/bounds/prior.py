"""The prior of a certificate: its center, the form in which it is normal, and how its network does on the examples."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn

from saltflat.bounds.seen import PriorLike
from saltflat.bounds.stochastic import BoundedLoss, compute_bounded_losses
from saltflat.engine.context import Context
from saltflat.engine.session import check_module, check_tensors
from saltflat.errors import DataError, ModelError
from saltflat.symmetry.batch_norm_uses import is_batch_norm
from saltflat.symmetry.canonical import canonicalize
from saltflat.symmetry.equality import Example, compare_outputs, copy_model, parse_example
from saltflat.symmetry.fold import fold

SUSPICIOUS = 5.0  # standard errors by which a prior may do better on what it has not seen
FRESH = 0.5  # a network from before training has at least this share of the error of guessing
SAME = {torch.float32: 1e-3, torch.float64: 1e-9}  # relative difference of outputs that counts as rounding


def build_prior_model(model: nn.Module, prior: nn.Module | Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of the model with the prior's weights, after checking that it has the same parameters."""
    made = copy_model(model)
    if isinstance(prior, nn.Module):
        check_module(prior)
        check_tensors(prior)
        shapes = [{name: tuple(p.shape) for name, p in each.named_parameters()} for each in (model, prior)]
        if shapes[0] != shapes[1]:
            name, shape = sorted({*shapes[0].items()} ^ {*shapes[1].items()})[0]
            raise ModelError(
                f"Expected a prior of the model's architecture, but got parameters of which only one model has "
                f"{name!r} with the shape {shape}. Try a copy of the model from before training."
            )
        prior = prior.state_dict()
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
        fixed: names of what is not drawn: frozen parameters and buffers.
    """

    model: nn.Module
    prior: nn.Module | None
    name: str
    problem: str
    fixed: tuple[str, ...]

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
        _check_same_fixed({name: p for name, p in each.named_parameters() if not p.requires_grad} for each in copies)
    copies = [_fold_batch_norm(each if dtype is None else each.to(dtype), example) for each in copies]
    drawn = {name for each in copies for name, value in each.named_parameters() if value.requires_grad}
    for each in copies:
        _fix_parameters(each, drawn)
    fixed = [dict(each.named_buffers()) for each in copies]
    _check_same_fixed(fixed)
    name, problem = "canonical", ""
    try:
        forms = [canonicalize(each, example) for each in copies]
        inputs = parse_example(example)
        off = max(compare_outputs(a, b, inputs) for a, b in zip(copies, forms, strict=True))
        kinds = [p.dtype for p in copies[0].parameters()]
        if not off <= max(SAME.get(kind, SAME[torch.float32]) for kind in kinds):
            raise ModelError(f"The canonical form changes the outputs by {off:.1e}.")
        changed = [key for key, value in forms[0].named_buffers() if not torch.equal(value, fixed[0][key])]
        if changed:
            raise ModelError(f"The canonical form changes {changed[0]!r}, which is not drawn.")
    except ModelError as error:
        forms, name, problem = copies, "given", str(error)
    return Gauge(forms[0], forms[1] if len(forms) > 1 else None, name, problem, tuple(fixed[0]))


def _fold_batch_norm(model: nn.Module, example: Example) -> nn.Module:
    """Return the model without BatchNorm. Whatever depends on what a BatchNorm has seen is a parameter to draw."""
    if not any(is_batch_norm(module) for module in model.modules()):
        return model
    before, folded = dict(model.named_parameters()), fold(model, example)
    left = [name for name, module in folded.named_modules() if is_batch_norm(module)]
    if left:
        raise ModelError(
            f"Expected BatchNorm that can be folded, but got {left[0]!r}, whose running statistics depend on the data. "
            "Try a model without BatchNorm, or with nn.GroupNorm."
        )
    for name, value in folded.named_parameters():
        if name not in before or not torch.equal(value, before[name]):
            value.requires_grad_(True)
    return folded


def _fix_parameters(model: nn.Module, drawn: Container[str]) -> None:
    """Turn all parameters that are not drawn into buffers, whose scale the canonical form does not change.

    Otherwise it could move the scale of a trained layer into a frozen one, where the KL divergence does not see it.
    """
    fixed = {value: value.detach() for name, value in model.named_parameters() if name not in drawn}
    for module in model.modules():
        for key, value in list(module._parameters.items()):
            if value is not None and value in fixed:
                del module._parameters[key]
                module.register_buffer(key, fixed[value])
    model.requires_grad_(True)


def _check_same_fixed(values: Iterable[Mapping[str, Tensor]]) -> None:
    """Check that model and prior have the same tensors beside the weights that are drawn."""
    first, *others = values
    for name, value in first.items():
        if not all(torch.equal(value, each[name]) for each in others) and not name.endswith("num_batches_tracked"):
            raise ModelError(
                f"Expected frozen parameters and buffers to be the same in model and prior, but got {name!r}, which "
                "differs. Try model.requires_grad_() for what was trained, and buffers that do not depend on the data."
            )


@dataclass(frozen=True)
class OwnRisk:
    """How a network itself does on the examples.

    Attributes:
        risk: its mean loss in [0, 1].
        error: its error.
        classes: the number of classes.
        examples: the number of examples.
    """

    risk: float
    error: float
    classes: int
    examples: int


def measure_risk(context: Context, of: BoundedLoss, what: str) -> OwnRisk:
    """Return how the network itself does, after checking all of its outputs."""
    problem, classes, seen = context.problem, 2, 0
    totals = {of: 0.0, "error": 0.0}
    with torch.no_grad():
        for batch in context.read_chunks(0):
            outputs = problem.network(batch)
            problem.check_outputs(outputs, batch)
            context.independence.add(batch, outputs)
            for kind in totals:
                losses = compute_bounded_losses(
                    "error" if kind == "error" else of, problem.loss, outputs, batch.targets
                )
                totals[kind] += float(losses.sum())
            classes = max(2, outputs[0].numel())
            seen += batch.examples
            context.tick(what, seen, problem.num_examples)
    return OwnRisk(totals[of] / seen, totals["error"] / seen, classes, seen)


def check_unseen(rest: OwnRisk, seen: OwnRisk | None) -> None:
    """Check that a prior does not know the examples of the bound.

    Args:
        rest: how it does on these.
        seen: how it does on those that it is said to have seen; None if there are none.
    """
    guess = 1 - 1 / rest.classes
    if seen is None:
        if rest.error < FRESH * guess:
            raise DataError(
                f"Expected weights from before training with prior_data='none', but got a prior that errs on only "
                f"{rest.error:.1%} of these examples, where guessing errs on {guess:.0%}. Try passing what it was "
                "trained on as prior_data."
            )
        return
    both = (rest.error * rest.examples + seen.error * seen.examples) / (rest.examples + seen.examples)
    spread = sqrt(both * (1 - both) * (1 / rest.examples + 1 / seen.examples))
    if seen.error - rest.error > SUSPICIOUS * spread:
        raise DataError(
            f"Expected a prior that has not seen the bound's examples, but got one that errs on {rest.error:.1%} of "
            f"them and on {seen.error:.1%} of those in prior_data. Try swapping the two parts."
        )
