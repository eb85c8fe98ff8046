"""The settings of one training, with the names and meanings they have in torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from saltflat.errors import OptionError

# Settings by the names of earlier versions, which mean something else or nothing now.
RENAMED = {"batch": "batch_size", "l2": "weight_decay"}
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
        beta1: decay rate of Adam's mean of gradients.
        beta2: decay rate of Adam's mean of squared gradients.
        eps: added to Adam's denominator.
        schedule: ``"constant"``; ``"cosine"``, to zero at the last epoch; ``"steps"``, times ``decay`` at milestones;
            or ``"inverse"``, ``lr / (1 + decay * step)``.
        decay: factor of the schedules ``"steps"`` and ``"inverse"``.
        milestones: epochs at which ``"steps"`` decays, as fractions of ``epochs``.
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
        train_size: number of training examples, taken from the beginning; None for all.
        label_noise: fraction of the training labels that are randomized.
        label_noise_kind: ``"permuted"`` permutes a random subset of floor(label_noise * n) labels (Ibayashi et al.);
            ``"uniform"`` replaces each of them by a random class (Zhang et al.).
        confusion: number of further training examples, after the first ``train_size``, that are trained on with random
            labels (Jia and Su); nothing is measured on them.
        augment: ``"none"``, ``"flip"``, ``"crop"`` or ``"flip_crop"``.
        crop: pixels of padding of ``"crop"``.
        dtype: ``"float32"``, ``"float64"``, or ``"tf32"``: float32 with faster products of three digits on a GPU.
    """

    network: str = "mlp"
    architecture: Mapping[str, Value] = field(default_factory=dict)
    seed: int = 0
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    schedule: str = "constant"
    decay: float = 0.1
    milestones: tuple[float, ...] = (0.5, 0.75)
    batch_size: int = 128
    epochs: int = 10
    target_loss: float | None = None
    target_error: float | None = None
    check_every: int = 1
    dropout: float = 0.0
    init: str = "default"
    init_scale: float = 1.0
    train_size: int | None = None
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
