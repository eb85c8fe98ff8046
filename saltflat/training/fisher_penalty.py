"""Penalize large gradients on the parts of a batch (Jia & Su, 2020, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from saltflat.engine.losses import LossLike, parse_loss
from saltflat.engine.session import check_tensors, snapshot_rng
from saltflat.errors import ModelError, OptionError, PrecisionError, TrainingError
from saltflat.training.distributed import average_gradients, check_not_sharded
from saltflat.training.objective import Objective, compute_mean_loss, is_mean_over_examples, make_objective
from saltflat.training.part_gradients import Gradients, PartGradients, PassStrategy, VmapOrLoop
from saltflat.training.parts import COARSE, BatchParts, TrainingBatch, copy_batch, count_examples
from saltflat.training.shift import compute_norm, has_training_batch_norm, multiply_in_place
from saltflat.training.two_pass import TwoPass
from saltflat.training.wrapper import check_needs_no_closure
from saltflat.validation import check_count, check_non_negative, check_positive, parse_integer, take_turns


class FisherPenalty:
    r"""Minimize :math:`L + \beta R`, where :math:`R` is the loss a small descent step saves on each part of the batch.

    .. math::
        R = \sum_i \frac{n_i}{n} \bigl[L(B_i, w) - L(B_i, w - \alpha g_i)\bigr], \qquad g_i = \nabla L(B_i, w)

    with the batch split into ``parts`` parts :math:`B_i` of :math:`n_i` examples and the :math:`g_i` held constant, so
    that the gradient added to that of the loss is :math:`\beta \sum_i \frac{n_i}{n} (g_i - g_i')`, where
    :math:`g_i'` is the gradient at :math:`w - \alpha g_i`.

    To first order in :math:`\alpha` that is the gradient of :math:`\frac{\alpha}{2} \mathrm{mean} \lVert g_i
    \rVert^2`. The paper states :math:`\alpha \lVert g_i \rVert^2`, the value of :math:`R`; holding :math:`g_i` constant
    leaves half of it. This is the paper's algorithm, so ``beta`` has the same meaning.

    **Parts** are contiguous and differ in size by at most one, so that no example is lost. With fewer examples than
    parts, every example is a part; with BatchNorm in training mode a part has at least two, since a single one cannot
    be normalized.

    **The loss of the batch.** Without BatchNorm in training mode it is the mean of the parts' losses, so its gradient
    costs nothing: two passes in total. With BatchNorm every part is normalized separately, and the loss of the batch
    requires another pass over all examples, which also updates the running statistics, exactly as a plain step would.
    ``whole`` controls this pass:

    * ``None``: run it with BatchNorm in training mode, with class weights or ignored labels, where cross-entropy is not
      a mean over examples, and for custom losses and objectives, for which this is unknown.
    * ``True``: always run it.
    * ``False``: never run it; use this for a custom function that returns the mean over the examples. With BatchNorm,
      the loss is then the mean over the parts, each normalized separately as if on its own device, and the running
      statistics come from a forward pass over all examples without gradients.

    **Precision.** With the default ``alpha`` the two gradients of a part differ by less than the precision of bfloat16,
    float16 and TF32. The parts run in the parameters' own precision, regardless of autocast; the pass for the loss of
    the batch runs under the caller's autocast.

    **Processes.** With DistributedDataParallel every process splits its own batch; the mean over the processes is added
    to ``.grad``.

    Weight decay belongs to the optimizer and is not part of the penalty.

    Args:
        model: the module that is trained, or the DistributedDataParallel around it.
        loss: a name, a loss module of torch, or a function of outputs and targets that returns the mean over a batch.
        parts: M in the paper, which uses 4, 8 and 16.
        alpha: the length of the small steps, in gradients.
        beta: the strength of the penalty; the paper uses 10 to 125.
        clip: the maximum norm of the gradient for :meth:`clip`; the paper uses 1 to 15. None for no clipping.
        start_step: the number of steps with the loss alone before the penalty starts.
        start_epoch: the number of epochs with the loss alone; pass each epoch to :meth:`set_epoch`.
        objective: a function of the model and a batch that returns the mean loss, instead of ``loss``. Tensors in the
            batch whose first axis counts the examples are split, and everything else is shared by the parts.
        strategy: ``"vectorized"`` runs all parts in one pass of ``torch.func``, ``"loop"`` one after the other, with
            the same result; ``"auto"`` selects the faster one that the model allows.
        whole: whether the loss of the batch requires another pass, see above.

    Attributes:
        steps: the number of gradients computed so far.

    Example:
        >>> model = nn.Linear(2, 3)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> penalty = FisherPenalty(model, parts=2, beta=10.0, clip=5.0)
        >>> batch = torch.randn(4, 2), torch.tensor([0, 1, 2, 0])
        >>> loss = penalty.step(optimizer, batch)
        >>> penalty.steps
        1
    """

    @take_turns
    def __init__(
        self,
        model: nn.Module,
        loss: LossLike = "cross_entropy",
        *,
        parts: int = 8,
        alpha: float = 1e-4,
        beta: float = 10.0,
        clip: float | None = None,
        start_step: int = 0,
        start_epoch: int = 0,
        objective: Objective | None = None,
        strategy: PassStrategy = "auto",
        whole: bool | None = None,
    ) -> None:
        check_count(1, parts=parts)
        check_positive(alpha=alpha)
        check_non_negative(beta=beta)
        if clip is not None:
            check_positive(clip=clip)
        check_count(0, start_step=start_step, start_epoch=start_epoch)
        if whole is not None and not isinstance(whole, bool):
            raise OptionError(f"Expected None, True or False, but got whole={whole!r}. Try leaving it out for None.")
        if objective is not None and (not callable(objective) or isinstance(objective, type)):
            raise OptionError(
                "Expected a function of a model and a batch, but got an objective of type "
                f"{type(objective).__name__}. Try leaving it out to use the loss."
            )
        _check_trainable_model(model)
        self.model, self.parts, self.alpha, self.beta = model, parts, float(alpha), float(beta)
        self.threshold, self.whole = None if clip is None else float(clip), whole
        self.start_step, self.start_epoch = start_step, start_epoch
        self.objective = make_objective(loss) if objective is None else objective
        self._loss = parse_loss(loss) if objective is None else None
        self.steps = self.epoch = 0
        self._vmap_or_loop = VmapOrLoop(strategy)

    @take_turns
    def step(self, optimizer: Optimizer, batch: TrainingBatch, scaler: GradScaler | None = None) -> Tensor:
        """Clear earlier gradients, compute that of the batch, clip it, and step.

        Args:
            optimizer: any optimizer that steps with one gradient.
            batch: the argument of the objective; for a loss, ``(inputs, targets)`` or a dict with ``labels``.
            scaler: scales a pass under float16 autocast and skips the step if a gradient overflowed. Call its
                ``update()`` afterwards, as usual.

        Returns:
            The loss of the batch, without the penalty.
        """
        _check_one_pass_optimizer(optimizer, self.model)
        loss, gradients = self._compute_gradients(batch, scaler)
        optimizer.zero_grad()
        self.model.zero_grad()  # clipping also counts parameters outside of the optimizer
        self._accumulate_gradients(gradients)
        if self.threshold is not None:
            self.clip()
        if scaler is None:
            optimizer.step()
        else:
            multiply_in_place(self._list_gradients(), self._get_scale(scaler))
            scaler.step(optimizer)
        return loss

    @take_turns
    def backward(self, batch: TrainingBatch, weight: float = 1.0, scaler: GradScaler | None = None) -> Tensor:
        """Add the gradient of the loss and its penalty to ``.grad``, as ``loss.backward()`` adds that of the loss.

        Args:
            batch: the argument of the objective.
            weight: the weight of this batch among several: 1/k for the mean over k micro-batches.
            scaler: scales the added gradients. Call its ``unscale_(optimizer)`` before :meth:`clip`.

        Returns:
            The loss of the batch, without the penalty and the weight.
        """
        check_positive(weight=weight)
        loss, gradients = self._compute_gradients(batch, scaler)
        factor = float(weight) if scaler is None else float(weight) * self._get_scale(scaler)
        if scaler is not None or weight != 1:
            multiply_in_place(list(gradients.values()), factor)
        self._accumulate_gradients(gradients)
        return loss

    @take_turns
    @torch.no_grad()
    def clip(self) -> Tensor:
        """Scale the gradient of all parameters down to the norm ``clip``, if larger, and return its norm before."""
        gradients = self._list_gradients()
        if not gradients:
            return torch.zeros(())
        norm = compute_norm(gradients)
        if self.threshold is not None:
            multiply_in_place(gradients, (self.threshold / norm).clamp(max=1.0))
        return norm

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that begins, counted from 0, for ``start_epoch``."""
        check_count(0, epoch=epoch)
        self.epoch = epoch

    @property
    def why_looped(self) -> str | None:
        """Return why ``strategy="auto"`` abandoned vectorized passes, if it did."""
        return self._vmap_or_loop.why_looped

    @property
    def is_active(self) -> bool:
        """Return whether the next gradient includes the penalty."""
        return self.beta > 0 and self.steps >= self.start_step and self.epoch >= self.start_epoch

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps and the epoch."""
        return {"steps": self.steps, "epoch": self.epoch}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Set the number of steps and the epoch."""
        given = state_dict if isinstance(state_dict, Mapping) else {}
        steps, epoch = parse_integer(given.get("steps")), parse_integer(given.get("epoch"))
        if steps is None or epoch is None or min(steps, epoch) < 0:
            raise TrainingError(
                "Expected the integers 'steps' and 'epoch', but got a state with the keys "
                f"{sorted(map(str, given))}. Try passing the state_dict() of a FisherPenalty."
            )
        self.steps, self.epoch = steps, epoch

    def _compute_gradients(self, batch: TrainingBatch, scaler: GradScaler | None) -> tuple[Tensor, Gradients]:
        """Return the loss of the batch and the gradient of loss and penalty; only running statistics change."""
        model = self.model
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        parameters = _get_trained_parameters(inner)
        examples = count_examples(batch)
        apart = not self.is_active or self._has_own_pass(inner, batch)
        passes = PartGradients(inner, self.objective, parameters, self.alpha, self.beta, own=float(not apart))
        if isinstance(model, DistributedDataParallel) and model.will_sync_module_buffers():
            model._sync_buffers()  # as its forward would
        # The caller's autocast may have cached low-precision copies of weights before the last step.
        torch.clear_autocast_cache()
        start = snapshot_rng()
        gradients: Gradients = {}
        if apart:
            scale = None if scaler is None else self._get_scale(scaler)
            loss, found = passes.compute_whole_gradient(copy_batch(batch), scale)
            # Copies in the parameters' own layout: autograd may return the same tensor for two of them.
            gradients = {name: torch.empty_like(parameters[name]).copy_(each) for name, each in found.items()}
            if scale is not None:
                multiply_in_place(list(gradients.values()), 1 / scale)
        elif has_running_statistics(inner):
            self._update_buffers(inner, batch)
        if self.is_active:
            most = max(1, examples // 2) if has_training_batch_norm(inner) else examples
            parts = BatchParts(batch, examples, min(self.parts, most), next(iter(parameters.values())).dtype)
            of_parts, added, is_written = self._vmap_or_loop(passes, parts)
            if is_written and not apart and not has_running_statistics(inner):
                start()
                self._update_buffers(inner, batch)
            loss = loss if apart else of_parts
            for name, value in added.items():
                gradients[name] = gradients[name].add_(value) if name in gradients else value
        if isinstance(model, DistributedDataParallel):
            gradients = average_gradients(model, parameters, gradients)
        self.steps += 1
        return loss, gradients

    def _has_own_pass(self, model: nn.Module, batch: TrainingBatch) -> bool:
        if self.whole is not None:
            return self.whole
        return has_training_batch_norm(model) or self._loss is None or not is_mean_over_examples(self._loss, batch)

    def _update_buffers(self, model: nn.Module, batch: TrainingBatch) -> None:
        """Update buffers as a plain step would; passes over the parts do not change them."""
        with torch.no_grad():
            compute_mean_loss(self.objective, model, copy_batch(batch))

    def _get_scale(self, scaler: GradScaler) -> Tensor:
        """Return the scale without synchronizing the device."""
        one = torch.ones((), device=next(self.model.parameters()).device)
        return scaler.scale(one)

    def _list_gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    @torch.no_grad()
    def _accumulate_gradients(self, gradients: Gradients) -> None:
        inner = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        for name, p in inner.named_parameters():
            if name not in gradients:
                continue
            if p.grad is None:
                p.grad = gradients[name]
            else:
                p.grad += gradients[name]


def has_running_statistics(model: nn.Module) -> bool:
    """Return whether layers that normalize, in training mode, track running statistics."""
    layers = [each for each in model.modules() if isinstance(each, _NormBase) and each.training]
    return any(each.track_running_stats and each.running_mean is not None for each in layers)


def _get_trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    trained: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ModelError(
            "Expected at least one trainable parameter, but got a model in which none requires a gradient. Try calling "
            "requires_grad_() on what you train."
        )
    for name, p in model.named_parameters():
        if isinstance(p, UninitializedParameter):
            raise ModelError(
                f"Expected initialized layers, but got {name!r} without a shape. Try running a batch through the model."
            )
        if p.dtype in COARSE:
            raise PrecisionError(
                f"Expected float32 or float64, but got {name!r} in {p.dtype}. In half precision, gradients at two "
                "points this close are identical. Try keeping the weights in float32 and using autocast for speed."
            )
    return trained


def _check_trainable_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"Expected a torch.nn.Module, but got a model of type {type(model).__name__}. Try passing the module "
            "that is trained."
        )
    check_not_sharded(model)
    check_tensors(model, buffers=False)
    _get_trained_parameters(model)


def _check_one_pass_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    if isinstance(getattr(optimizer, "optimizer", optimizer), TwoPass):
        raise TrainingError(
            f"Expected an optimizer that steps with one gradient, but got a {type(optimizer).__name__}, which computes "
            "gradients at two points itself, so that the penalty would be ambiguous. Try passing its base."
        )
    if not all(callable(getattr(optimizer, name, None)) for name in ("step", "zero_grad")):
        raise OptionError(
            f"Expected an optimizer of torch.optim, but got a {type(optimizer).__name__}. Try "
            "step(torch.optim.SGD(model.parameters(), lr=0.1), batch)."
        )
    check_needs_no_closure(optimizer)
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for group in getattr(optimizer, "param_groups", []) for p in group["params"]):
        raise OptionError(
            "Expected an optimizer of this model's parameters, but got one that has none of them. Check that it was "
            "created from model.parameters()."
        )
