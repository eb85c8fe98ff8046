"""From a model and data to a report, or to the plan of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from saltflat.engine.data import Data
from saltflat.engine.losses import LossLike
from saltflat.engine.processes import parse_process_group
from saltflat.measures.meter import Meter
from saltflat.results.plan import MeasurementPlan
from saltflat.results.report import Report
from saltflat.validation import take_turns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["measure", "plan"]


@take_turns
def measure(
    model: nn.Module,
    data: Data,
    loss: LossLike = "cross_entropy",
    measures: str | Sequence[str] | None = None,
    *,
    columns: str = "exact",
    layers: Sequence[str] | str | None = None,
    memory: str | int = "1GiB",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool | Callable[..., None] | None = None,
    mode: str = "eval",
    logits: str = "none",
    diagonal: str = "exact",
    initial: nn.Module | Mapping[str, Tensor] | None = None,
    certificate: bool = True,
    sampling: bool = True,
    limit: int | None = None,
    device: str | torch.device | None = None,
    precision: str = "ieee",
    process_group: ProcessGroup | None = None,
) -> Report:
    """Measure how flat the minimum is that a trained network sits in.

    Args:
        model: any module. It is measured in eval mode and given back bit for bit as it was.
        data: a ``DataLoader``, a pair of tensors ``(inputs, targets)``, a dataset, or batches that can be read again.
        loss: ``"cross_entropy"``, ``"mse"``, ``"bce_with_logits"``, ``"model"`` for the one the model itself computes
            from labels, the matching loss module of torch with its options, such as
            ``nn.CrossEntropyLoss(label_smoothing=0.1)``, or a function ``loss(outputs, targets)``, which is called on
            one example at a time.
        measures: names, with options where wanted, such as ``["kappa", "rho(axis='row')"]``; ``"quick"`` (as None),
            all that one sweep over the data gives; ``"invariant"``, all that rescaling layers leaves unchanged;
            ``"all"``; or some of these, such as ``["quick", "kappa"]``. What only a preset asks for and this model does
            not allow is left out, and the report says why. :func:`saltflat.list_measures` lists the measures and their
            cost.
        columns: how the loss's curvature is taken, which costs a backward pass for each column: ``"exact"``; ``"top"``,
            the few likeliest classes exactly and random columns for the rest; or ``"sampled"``, random columns alone.
            With many classes the last two cost less; they come with standard errors. ``"top:5"`` and ``"sampled:16"``
            choose their numbers.
        layers: names of modules or parameters to measure; all parameters that require a gradient if None.
        memory: working memory beyond the model and the results, such as ``"512MiB"``.
        dtype: ``torch.float32`` or ``torch.float64`` to work in; the model's own if None.
        seed: of everything random.
        progress: True for a progress bar (lines of text off a terminal), False for none, None for a bar on a terminal
            only, or a function of
            ``(step, done, total)``. If that has a parameter ``seconds_left``, it is also given about how many seconds
            are left of all the steps together, or None as long as that is not known.
        mode: ``"eval"``, or ``"keep"`` to leave the modules in the modes they are in.
        logits: ``"none"``, or ``"std"`` or ``"l2"`` to bring each example's outputs to unit deviation or length before
            the loss, so that their scale plays no part.
        diagonal: where measures take the curvature diagonal from: ``"exact"``, or the estimates
            ``"finite_difference"``, ``"finite_difference_printed"``, ``"gaussian"`` and ``"hutchinson"`` of the true
            Hessian's.
        initial: the model, or its ``state_dict``, before training, for ``distance_from_init``.
        certificate: whether to measure how far the Gauss-Newton blocks are from the Hessian's, if a measure is made of
            them.
        sampling: whether to estimate how far each number depends on the choice of the examples
            (``sampling_stderr``), by leaving out groups of them.
        limit: take at most so many examples, the first ones; all if None.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"`` for a GPU if there is one; the model's own if None. A copy of the
            model is moved there, and batches as they are read.
        precision: of float32 products in the sweep over the data: ``"ieee"`` for all digits, or ``"tf32"`` for three,
            faster on an NVIDIA GPU. The error this makes is measured on the first examples, and stated in the report's
            notes and settings. Elsewhere, and in float64, ``"tf32"`` has no effect, and the report says so.
        process_group: processes that share the measurement, such as ``torch.distributed.group.WORLD`` in a script that
            ``torchrun`` starts; this process alone if None. Each of them makes the same call, with the same weights and
            *all* of the data, computes on its part of the examples, and returns the same report.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> data = torch.randn(20, 2), torch.randint(3, (20,))
        >>> report = measure(net, data, measures=["normalized_sharpness", "hessian_trace"])
        >>> sorted(report), report.certificate["holds"]
        (['hessian_trace', 'normalized_sharpness'], True)
    """
    # What one process refuses, all do.
    with parse_process_group(process_group).join():
        meter = Meter(
            model,
            loss,
            measures,
            columns=columns,
            layers=layers,
            memory=memory,
            dtype=dtype,
            seed=seed,
            progress=progress,
            mode=mode,
            logits=logits,
            diagonal=diagonal,
            initial=initial,
            certificate=certificate,
            sampling=sampling,
            limit=limit,
            device=device,
            precision=precision,
            process_group=process_group,
        )
    return meter.measure(data)


@take_turns
def plan(
    model: nn.Module,
    data: Data,
    loss: LossLike = "cross_entropy",
    measures: str | Sequence[str] | None = None,
    *,
    columns: str = "exact",
    layers: Sequence[str] | str | None = None,
    memory: str | int = "1GiB",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    mode: str = "eval",
    logits: str = "none",
    diagonal: str = "exact",
    initial: nn.Module | Mapping[str, Tensor] | None = None,
    certificate: bool = True,
    sampling: bool = True,
    limit: int | None = None,
    device: str | torch.device | None = None,
    precision: str = "ieee",
) -> MeasurementPlan:
    """Find out what :func:`saltflat.measure` will do with these arguments, and what it will take, before any long work.

    A few examples are measured in the chunks that all of them will be cut into. From the time of a chunk, of a pass and
    of a few derivatives, the time of every step is predicted by counting chunks, passes, groups of examples and
    parameters; memory is what the few examples took, and what is known to grow with their number. Searches may take
    fewer or more steps on all examples. What would be an error of ``saltflat.measure`` is the same error here, as far
    as the first examples show it.

    Args:
        model: as for :func:`saltflat.measure`, like all other arguments.
        data: the examples.
        loss: the loss.
        measures: names of measures.
        columns: how the loss's curvature is taken.
        layers: names of modules or parameters to measure.
        memory: working memory beyond the model and the results.
        dtype: precision to work in.
        seed: of everything random.
        mode: ``"eval"`` or ``"keep"``.
        logits: how outputs are normalized.
        diagonal: where measures take the curvature diagonal from.
        initial: the model, or its ``state_dict``, before training.
        certificate: whether there will be a certificate.
        sampling: whether there will be standard errors over examples.
        limit: take at most so many examples.
        device: where to measure.
        precision: of float32 products in the sweep.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> found = plan(net, (torch.randn(20, 2), torch.randint(3, (20,))), measures="hessian_trace")
        >>> found.measures, [each.way for each in found.parameters]
        (('hessian_trace',), ['layer', 'layer', 'layer', 'layer'])
    """
    meter = Meter(
        model,
        loss,
        measures,
        columns=columns,
        layers=layers,
        memory=memory,
        dtype=dtype,
        seed=seed,
        mode=mode,
        logits=logits,
        diagonal=diagonal,
        initial=initial,
        certificate=certificate,
        sampling=sampling,
        limit=limit,
        device=device,
        precision=precision,
    )
    return meter.plan(data)
