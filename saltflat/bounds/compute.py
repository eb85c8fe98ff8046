"""Compute all bounds on a network from its training data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import scipy
import torch
from rich.console import Group, RenderableType
from rich.text import Text
from torch import nn

from saltflat._late import load_later
from saltflat.bounds.bound import Bound
from saltflat.bounds.evidence import Evidence
from saltflat.bounds.losses import BoundedLoss, check_bounded_loss
from saltflat.bounds.pac_bayes import check_delta
from saltflat.bounds.registry import BOUNDS, BoundOption, BoundResult, BoundRule, parse_bounds
from saltflat.engine.context import Context, describe_context
from saltflat.engine.data import Data
from saltflat.engine.losses import LossLike, parse_loss
from saltflat.engine.output_curvature import parse_column_plan
from saltflat.engine.problem import Problem
from saltflat.engine.progress import show_steps
from saltflat.engine.read_data import select_examples
from saltflat.engine.session import open_session
from saltflat.errors import ModelError, NotDefinedError
from saltflat.results.display import Displayable
from saltflat.results.report import describe_run
from saltflat.results.text import add_number_column, build_ruled_table, make_printable
from saltflat.symmetry.equality import copy_model
from saltflat.validation import check_count, check_seed, parse_bytes, take_turns

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Bounds(Displayable, Mapping[str, Bound]):
    """Several bounds on one network, by name. ``print()`` shows them as a table.

    Args:
        found: the bounds.
        left_out: why some could not be computed, by name.
    """

    renderer = ("", "", "")

    def __init__(self, found: Mapping[str, Bound], left_out: Mapping[str, str] | None = None) -> None:
        self._found, self.left_out = dict(found), dict(left_out or {})

    def __getitem__(self, name: str) -> Bound:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"<Bounds: {', '.join(self)}; print() shows them>"

    def plot(self) -> Figure:
        """Return a ``matplotlib`` Figure of all bounds against the risk of guessing."""
        figure: Figure = load_later("render.bound").plot_bounds(list(self.values()))
        return figure

    def to_dict(self) -> dict[str, Any]:
        """Return all bounds as strict JSON, by name."""
        return {name: each.to_dict() for name, each in self.items()}

    def __rich__(self) -> RenderableType:
        table = build_ruled_table("bound")
        for header in ("value", "guessing"):
            add_number_column(table, header)
        for header in ("risk", "status", "largest term"):
            table.add_column(header, overflow="fold")
        round_up = load_later("render.bound").round_up
        for name, each in self.items():
            status = "valid" if each.is_valid else "heuristic" if each.kind == "heuristic" else "assumption violated"
            table.add_row(
                name,
                round_up(each.value),
                round_up(each.chance),
                make_printable(each.loss.replace("_", " ")),
                f"{status}, vacuous" if each.is_vacuous else status,
                make_printable(_format_largest(each)),
            )
        lines = [Text(make_printable(f"{name}: left out, {reason}")) for name, reason in self.left_out.items()]
        return Group(table, *lines)


def _format_largest(bound: Bound) -> str:
    """Format the largest term; that of lambda itself is as large as what lambda has to pay for."""
    largest, driver = (str(bound.details.get(name, "")) for name in ("largest_term", "driven_by"))
    return f"{largest}, driven by {driver}" if driver else largest


@take_turns
def compute_bounds(
    model: nn.Module,
    data: Data,
    loss: LossLike = "cross_entropy",
    *,
    bounds: str | Sequence[str] | Mapping[str, Mapping[str, BoundOption]] | None = None,
    of: BoundedLoss = "error",
    delta: float = 0.05,
    draws: int = 1,
    limit: int | None = None,
    memory: str | int = "1GiB",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool | Callable[[str, int, int | None], None] | None = None,
    mode: str = "eval",
    columns: str = "exact",
) -> Bounds:
    """Compute upper bounds on the error of a classifier on new data, from its training data.

    Each bound holds by itself with probability ``1 - delta``. Most are far above the error of guessing, and are
    returned as they are: their terms say why.

    Args:
        model: any module; it is not modified.
        data: the examples the network was trained on, as for :func:`saltflat.measure`.
        loss: of the training: ``"cross_entropy"`` or ``"bce_with_logits"``.
        bounds: a name, several, or a mapping from names to options, such as ``{"row_column": {"constant": 8}}``; all
            bounds if None.
        of: the risk that is bounded: ``"error"`` or ``"clipped_cross_entropy"``, divided by its largest value.
        delta: the probability with which a bound may fail.
        draws: of random weights for each example.
        limit: use at most this many examples, the first ones; all if None.
        memory: working memory beyond the model and the results, such as ``"512MiB"``.
        dtype: ``torch.float32`` or ``torch.float64`` to work in; the model's own if None.
        seed: of everything random.
        progress: True for a progress bar, False for none, None for a bar on a terminal only, or a function of
            ``(step, done, total)``.
        mode: ``"eval"``, or ``"keep"`` to leave the modules in the modes they are in.
        columns: ``"exact"``, ``"top"`` or ``"sampled"``: how the curvature of the loss is taken. The bounds hold with
            any.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> data = torch.randn(20, 2), torch.randint(2, (20,))
        >>> found = compute_bounds(net, data, bounds=["parameterwise", "isotropic"])
        >>> list(found), found["parameterwise"].is_valid, found["parameterwise"].is_vacuous
        (['parameterwise', 'isotropic'], True, True)
    """
    asked = parse_bounds(bounds)
    check_delta(delta)
    check_count(1, draws=draws)
    check_bounded_loss(of, parse_loss(loss))
    plan, room, seed = parse_column_plan(columns), parse_bytes(memory), check_seed(seed)
    data = data if limit is None else select_examples(data, limit=limit)
    with open_session(model, mode, data) as notes, show_steps(progress) as tick:
        Problem.build(model, data, loss, None, dtype, mode)  # errors in the user's own model and names
        own = copy_model(model)
        own = own if dtype is None else own.to(dtype)
        with open_session(own, mode, data):
            context = Context(Problem.build(own, data, loss, None, dtype, mode), plan, seed, room, tick=tick)
            evidence = Evidence(context, of, delta, draws)
            found, left_out = {}, {}
            for name, options in asked.items():
                started = time.perf_counter()
                try:
                    result = BOUNDS[name].apply(evidence, options)
                except NotDefinedError as reason:
                    if bounds is not None:
                        raise ModelError(
                            f"Expected a model and data that allow it, but got the bound {name!r}, which {reason}. Try "
                            "leaving it out."
                        ) from reason
                    left_out[name] = str(reason)
                    continue
                found[name] = _make_bound(BOUNDS[name], options, result, evidence, notes, started)
        return Bounds(found, left_out)


def _make_bound(
    rule: BoundRule,
    options: Mapping[str, BoundOption],
    result: BoundResult,
    evidence: Evidence,
    notes: Sequence[str],
    started: float,
) -> Bound:
    settings = {**describe_context(evidence.context), **rule.options, **options, "draws": evidence.draws}
    return Bound(
        name=rule.name,
        value=result.value,
        quantity=result.quantity,
        loss=result.loss or evidence.of,
        delta=evidence.delta,
        terms=result.terms,
        assumptions=result.assumptions,
        chance=evidence.chance if result.chance is None else result.chance,
        reference=rule.reference,
        formula=rule.formula,
        kind=rule.kind,
        examples=evidence.examples,
        details=result.details,
        notes=(*result.notes, *notes),
        settings=settings,
        **describe_run(evidence.context.problem.model, started, torch, numpy, scipy),
    )
