"""Measure a network again after random rescalings, and report which measures changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from saltflat.audit.change import TOLERANCE, compute_change
from saltflat.audit.result import Audit, AuditLine
from saltflat.engine.data import Data
from saltflat.engine.losses import LossLike
from saltflat.engine.network import Network
from saltflat.engine.processes import Processes, is_of_some, parse_process_group
from saltflat.engine.progress import show_steps
from saltflat.engine.read_data import select_examples
from saltflat.engine.same_inputs import check_same_settings
from saltflat.engine.session import check_module, open_session
from saltflat.engine.sharding import gather_weights
from saltflat.errors import OptionError, ProcessError, SaltflatError, format_error_line, make_unknown_name_error
from saltflat.measures.apply import list_invariances
from saltflat.measures.compute import measure
from saltflat.measures.meter import Meter
from saltflat.measures.registry import parse_measures
from saltflat.results.report import Report
from saltflat.symmetry.equality import Example, copy_model, select_logits, take_example
from saltflat.symmetry.find import find_output_symmetries
from saltflat.symmetry.group import Array, Symmetries
from saltflat.symmetry.rescale import apply_rescaling, check_same_function
from saltflat.validation import check_count, check_positive, check_seed, is_choice, take_turns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# The invariance that a measure claims, for each kind of rescaling.
KINDS = {"layer": "layer_scale", "unit": "unit_scale"}
# Tolerance for the loss after a rescaling, far above rounding errors.
LOSS_TOLERANCE = 1e-9
STEP = "Measuring rescaled networks"


@take_turns
def audit_invariance(
    model: nn.Module,
    data: Data,
    loss: LossLike = "cross_entropy",
    measures: str | Sequence[str] | None = None,
    *,
    draws: int = 20,
    spread: float = 2.0,
    kinds: str | Sequence[str] | None = ("layer", "unit"),
    seed: int = 0,
    columns: str = "exact",
    layers: Sequence[str] | str | None = None,
    memory: str | int = "1GiB",
    progress: bool | Callable[[str, int, int | None], None] | None = None,
    logits: str = "none",
    diagonal: str = "exact",
    initial: nn.Module | Mapping[str, Tensor] | None = None,
    limit: int | None = None,
    process_group: ProcessGroup | None = None,
) -> Audit:
    """Measure how much each measure changes when the weights are rescaled without changing the function.

    First the rescalings of the network are found. Then the network is measured as it is, and again after each of
    ``draws`` random rescalings of each kind: ``1 + 2 * draws`` measurements in total. Parameters that are frozen or not
    measured stay unchanged, since measures that minimize over rescalings treat them as fixed. All computations use
    float64, to exclude rounding errors, and the same seed, so that random columns and directions are equal.

    Args:
        model: any module whose rescalings can be found. It is not modified.
        data: as for :func:`saltflat.measure`; the rescalings are found on the first examples.
        loss: as for :func:`saltflat.measure`.
        measures: as for :func:`saltflat.measure`; ``"quick"`` if None.
        draws: number of random rescalings of each kind.
        spread: standard deviation of the log factors, which are truncated at twice that.
        kinds: ``"layer"`` for rescalings that multiply every parameter by one number, ``"unit"`` for those that
            multiply the weights of every unit by one, or both.
        seed: seed of the measurements; draw ``i`` of a kind uses the seed ``seed + i``.
        columns: as for :func:`saltflat.measure`, like all further arguments.
        layers: names of modules or parameters to measure.
        memory: working memory beyond the model and the results.
        progress: True for a progress bar (lines of text if not on a terminal), False for none, None for a bar on a
            terminal only, or a function of ``(step, done, total)``, called after each measurement.
        logits: how outputs are normalized.
        diagonal: how the curvature diagonal is computed.
        initial: the model, or its ``state_dict``, before training, for ``distance_from_init``.
        limit: maximum number of examples, taken from the start; all if None.
        process_group: processes that share the measurements, as for :func:`saltflat.measure`; this one alone if None.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> data = torch.randn(20, 2), torch.randint(3, (20,))
        >>> found = audit_invariance(net, data, measures=["normalized_sharpness", "hessian_trace"], draws=3)
        >>> found.holds, found["hessian_trace"].verdicts["unit"]
        (True, 'moves, as expected')
    """
    started = time.perf_counter()
    with parse_process_group(process_group).join() as processes:
        check_count(1, draws=draws)
        check_positive(spread=spread)
        chosen, seed, data = _parse_kinds(kinds), check_seed(seed), select_examples(data, limit=limit)
        parse_measures(measures)  # report unknown names before any computation
        check_module(model)
        check_same_settings(processes, {"draws": draws, "spread": spread, "kinds": chosen, "seed": seed})
        with gather_weights(model, processes), open_session(model, "eval", data) as notes:
            exact, example = copy_model(model).double(), take_example(data, torch.float64)
    options: dict[str, Any] = {
        "columns": columns,
        "layers": layers,
        "memory": memory,
        "dtype": torch.float64,
        "seed": seed,
        "progress": False,
        "logits": logits,
        "diagonal": diagonal,
        "initial": initial,
        "process_group": process_group,
    }
    with processes.join(), show_steps(progress if processes.rank == 0 else False) as tick:
        # Outputs that the loss does not use may change; parameters that are not measured must not.
        measured = Network(exact, layers, None).measured
        group = find_output_symmetries(exact, example, select_logits).restrict_to_parameters(measured)
        groups = {kind: group.restrict_to_layers() if kind == "layer" else group for kind in chosen}
        report = measure(exact, data, loss, measures, sampling=False, **options)
        measure_copy = _RescaledMeter(exact, data, loss, list(report), options) if report else None
        tried = {kind: draws if each.scales and report else 0 for kind, each in groups.items()}
        tick(STEP, 1, 1 + sum(tried.values()))
        after: dict[str, list[Report | str]] = {kind: [] for kind in groups}
        for kind, each in groups.items():
            for draw in range(tried[kind]):
                assert measure_copy is not None
                # Seeds wrap around at the largest one.
                logs = each.sample((seed + draw) % 2**63, spread)
                after[kind].append(_measure_rescaled(exact, each, logs, example, report.loss, measure_copy, processes))
                tick(STEP, 1 + sum(map(len, after.values())), 1 + sum(tried.values()))
    return Audit(
        report=report,
        lines=_make_audit_lines(report, after),
        scales={kind: each.scales for kind, each in groups.items()},
        obstacles=tuple(asdict(each) for each in group.obstacles),
        failed={
            kind: {str(draw): each for draw, each in enumerate(found) if isinstance(each, str)}
            for kind, found in after.items()
        },
        draws=draws,
        spread=spread,
        seed=seed,
        tolerance=TOLERANCE,
        seconds=time.perf_counter() - started,
        notes=tuple(notes),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _parse_kinds(given: str | Sequence[str] | None) -> list[str]:
    if not (given is None or isinstance(given, Sequence | Set)):
        raise make_unknown_name_error("kind of rescaling", given, KINDS)
    kinds = list(KINDS) if given is None else [given] if isinstance(given, str) else list(given)
    for kind in kinds:
        if not is_choice(kind, KINDS):
            raise make_unknown_name_error("kind of rescaling", kind, KINDS)
    if not kinds:
        raise OptionError("Expected 'layer', 'unit' or both, but got no kinds. Try omitting kinds for both.")
    return list(dict.fromkeys(kinds))


class _RescaledMeter:
    """Measures rescaled copies of a model, which take turns as the weights of one that was prepared."""

    def __init__(
        self, model: nn.Module, data: Data, loss: LossLike, measures: Sequence[str], options: Mapping[str, Any]
    ) -> None:
        self.data = data
        self.meter = Meter(copy_model(model), loss, measures, certificate=False, sampling=False, **options)

    def __call__(self, rescaled: nn.Module) -> Report:
        """Return the report of a model that differs in its parameters and buffers alone."""
        with torch.no_grad():
            for to, value in zip(_list_tensors(self.meter.model), _list_tensors(rescaled), strict=True):
                to.copy_(value)
        return self.meter.measure(self.data)


def _list_tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _measure_rescaled(
    model: nn.Module,
    group: Symmetries,
    logs: Array,
    example: Example,
    loss: float,
    measure_copy: Callable[[nn.Module], Report],
    processes: Processes,
) -> Report | str:
    """Return the report of the rescaled network, or the reason why it could not be measured."""
    try:
        with np.errstate(over="ignore"), processes.join():  # infinite factors show in the weights
            check_same_function(model, group, logs, example, select_logits)
            found = measure_copy(apply_rescaling(model, group, logs))
    except ProcessError:
        raise
    except SaltflatError as error:
        return str(error)
    except (RuntimeError, ArithmeticError, np.linalg.LinAlgError) as error:
        if is_of_some(error) and not isinstance(error, RuntimeError):  # a ProcessError in the others
            raise
        return format_error_line(error)
    if abs(found.loss - loss) > LOSS_TOLERANCE * max(1.0, abs(loss)):
        return (
            f"Expected the loss {loss} after the rescaling, but got {found.loss}: the rescaled network is not the same "
            "function on all the data."
        )
    return found


def _make_audit_lines(before: Report, after: Mapping[str, Sequence[Report | str]]) -> dict[str, AuditLine]:
    lines = {}
    for request in parse_measures(list(before)) if before else []:
        of, name = request.measure, request.key
        claimed = list_invariances(of, before[name])
        changes = {
            kind: compute_change(
                before[name],
                [found[name] if isinstance(found, Report) else None for found in draws],
                KINDS[kind] in claimed,
                of.logarithmic,
            )
            for kind, draws in after.items()
            if draws
        }
        lines[name] = AuditLine(before[name], claimed, of.logarithmic, changes)
    return lines
