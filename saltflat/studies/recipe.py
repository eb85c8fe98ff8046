"""The settings of one training, with the names and meanings they have in torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from saltflat.errors import OptionError

# Settings by the names of earlier versions, which mean something else or nothing now.
RENAMED = {"batch": "batch_size", "l2": "weight_decay"}
# Settings that version 1 of the files did not have. Where they have their default they are no part of a run's identity,
# so that earlier runs keep their keys.
ADDED = (
    "decoupled_weight_decay", "sam", "asam", "asam_eta", "gradient_norm", "gradient_norm_balance", "fisher_penalty",
    "fisher_parts", "fisher_alpha", "fisher_clip", "fisher_start_epoch", "label_smoothing", "patience", "warmup",
    "train_subset",
)  # fmt: skip
Value: TypeAlias = "bool | int | float | str | tuple[Value, ...] | None"


@dataclass(frozen=True)
class Recipe:
    """All settings of one training. A grid may vary any of them.

    Values are checked against :mod:`saltflat.studies.schema` when the network is built.

    Attributes:
        network: the name of a built-in network, or ``package.module:function`` that makes one.
        architecture: arguments of the function that makes the network, such as its width.
        seed: seed of the weights, labels, order of examples, dropout and augmentation.
        optimizer: ``"sgd"``, ``"adam"`` or ``"adamw"``, as in ``torch.optim``.
        lr: initial learning rate.
        momentum: momentum of SGD.
        nesterov: whether SGD uses Nesterov momentum.
        weight_decay: as in ``torch.optim``: SGD and Adam add ``weight_decay * w`` to the gradient; AdamW multiplies the
            weights by ``1 - lr * weight_decay`` before the step.
        decoupled_weight_decay: multiplies the weights by ``1 - lr * decoupled_weight_decay`` before the step, with any
            optimizer, besides ``weight_decay``.
        beta1: decay rate of Adam's mean of gradients.
        beta2: decay rate of Adam's mean of squared gradients.
        eps: added to Adam's denominator.
        sam: radius ``rho`` of SAM (Foret et al., 2021), as in :class:`saltflat.training.SAM`; 0 for none. At most one
            of ``sam``, ``asam``, ``gradient_norm`` and ``fisher_penalty`` may be above 0.
        asam: radius ``rho`` of ASAM (Kwon et al., 2021), as in :class:`saltflat.training.ASAM`; 0 for none.
        asam_eta: ``eta`` of ASAM, which lets small weights move as well.
        gradient_norm: radius ``rho`` of the penalty of the gradient's norm (Zhao et al., 2022), as in
            :class:`saltflat.training.GradientNormPenalty`; 0 for none.
        gradient_norm_balance: share of the second gradient in its step, from 0 to 1.
        fisher_penalty: strength ``beta`` of the Fisher penalty (Jia and Su, 2020), as in
            :class:`saltflat.training.FisherPenalty`; 0 for none.
        fisher_parts: number of parts of a batch.
        fisher_alpha: length of the small steps, in gradients.
        fisher_clip: maximum norm of the gradient of loss and penalty, where ``fisher_penalty`` is above 0; None for no
            clipping.
        fisher_start_epoch: number of epochs before the penalty starts.
        label_smoothing: as in ``torch.nn.CrossEntropyLoss``. Only the steps, and so the curve, use it: training and
            test losses and measures are those of the plain cross-entropy.
        schedule: ``"constant"``; ``"cosine"``, to zero at the last epoch; ``"steps"``, times ``decay`` at milestones;
            ``"inverse"``, ``lr / (1 + decay * step)``; or ``"plateau"``, times ``decay`` when the mean loss of the
            steps has not improved for more than ``patience`` epochs, as ``ReduceLROnPlateau`` of torch.
        decay: factor of the schedules ``"steps"``, ``"inverse"`` and ``"plateau"``.
        milestones: epochs at which ``"steps"`` decays, as fractions of ``epochs``.
        patience: number of epochs without improvement that ``"plateau"`` waits for.
        warmup: number of epochs, whole or not, in which the learning rate first grows linearly; with any schedule.
        batch_size: examples per step; the last batch of an epoch may be smaller.
        epochs: maximum number of epochs.
        target_loss: stop when the mean loss on the training examples is at most this; None for no such rule.
        target_error: stop when the error on the training examples is at most this; None for no such rule.
        check_every: number of epochs between checks of the targets.
        dropout: probability of dropping a unit, where the network has dropout.
        init: ``"default"`` (the network's own), or for all weights: ``"xavier_normal"``, ``"xavier_uniform"``,
            ``"kaiming_normal"``, ``"kaiming_uniform"``, ``"normal"`` (standard deviation ``init_scale``) or
            ``"uniform"`` (between -init_scale and init_scale), with zero biases.
        init_scale: factor of the initial weights.
        train_size: number of training examples; None for all.
        train_subset: ``"first"`` takes them from the beginning, ``"random"`` draws them, others for every seed.
        label_noise: fraction of the training labels that are randomized.
        label_noise_kind: ``"permuted"`` permutes a random subset of floor(label_noise * n) labels (Ibayashi et al.);
            ``"uniform"`` replaces each of them by a random class (Zhang et al.).
        confusion: number of further training examples, besides ``train_size``, that are trained on with random labels
            (Jia and Su); nothing is measured on them.
        augment: ``"none"``, ``"flip"``, ``"crop"`` or ``"flip_crop"``.
        crop: pixels of padding of ``"crop"``.
        dtype: ``"float32"``; ``"float64"``; ``"tf32"``, float32 with faster products of three digits on a GPU; or
            ``"bf16"``, steps under ``torch.autocast`` with bfloat16, where weights, their updates and the loss stay
            in float32.
    """

    network: str = "mlp"
    architecture: Mapping[str, Value] = field(default_factory=dict)
    seed: int = 0
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    decoupled_weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    sam: float = 0.0
    asam: float = 0.0
    asam_eta: float = 0.01
    gradient_norm: float = 0.0
    gradient_norm_balance: float = 0.8
    fisher_penalty: float = 0.0
    fisher_parts: int = 8
    fisher_alpha: float = 1e-4
    fisher_clip: float | None = None
    fisher_start_epoch: int = 0
    label_smoothing: float = 0.0
    schedule: str = "constant"
    decay: float = 0.1
    milestones: tuple[float, ...] = (0.5, 0.75)
    patience: int = 10
    warmup: float = 0.0
    batch_size: int = 128
    epochs: int = 10
    target_loss: float | None = None
    target_error: float | None = None
    check_every: int = 1
    dropout: float = 0.0
    init: str = "default"
    init_scale: float = 1.0
    train_size: int | None = None
    train_subset: str = "first"
    label_noise: float = 0.0
    label_noise_kind: str = "permuted"
    confusion: int = 0
    augment: str = "none"
    crop: int = 4
    dtype: str = "float32"

    def __new__(cls, *args: Any, **settings: Any) -> Recipe:
        """Refuse the names of earlier versions: ``weight_decay`` changed its meaning."""
        for name in RENAMED.keys() & settings.keys():
            raise make_renamed_error(name)
        return super().__new__(cls)

    @classmethod
    def from_config(cls, config: Mapping[str, Value]) -> Recipe:
        """Return the recipe of a flat configuration. Names that are not settings are arguments of the network."""
        for name in RENAMED.keys() & config.keys():
            raise make_renamed_error(name)
        own: dict[str, Any] = {name: value for name, value in config.items() if name in SETTINGS}
        return cls(**own, architecture={name: value for name, value in config.items() if name not in SETTINGS})


SETTINGS = tuple(each.name for each in fields(Recipe) if each.name != "architecture")


def make_renamed_error(name: str) -> OptionError:
    """Return the error for a setting by its earlier name."""
    new = RENAMED[name]
    return OptionError(f"Expected the setting {new!r}, as in torch, but got {name!r}. Try {new}.")
