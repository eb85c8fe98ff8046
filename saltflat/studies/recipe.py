"""How one network is built and trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

Value: TypeAlias = "bool | int | float | str | tuple[Value, ...] | None"


@dataclass(frozen=True)
class Recipe:
    """Every setting of one training. A grid may vary any of them.

    Attributes:
        network: the name of a ready-made network, or ``package.module:function`` that makes one.
        architecture: what is handed to the function that makes the network, such as its width.
        seed: of weights, labels, the order of examples, dropout and augmentation.
        optimizer: ``"sgd"`` or ``"adam"``.
        lr: learning rate at the beginning.
        momentum: of SGD.
        nesterov: whether SGD looks ahead by its momentum.
        l2: adds ``l2 * w`` to the gradient, the gradient of ``l2 / 2 * |w|^2``. torch's optimizers call this
            weight_decay.
        weight_decay: decoupled from the gradient, ``w <- (1 - lr * weight_decay) * w``, as in AdamW.
        beta1: of Adam.
        beta2: of Adam.
        eps: of Adam.
        schedule: ``"constant"``; ``"cosine"``, to zero at the last epoch; ``"steps"``, times ``decay`` at milestones;
            or ``"inverse"``, ``lr / (1 + decay * step)`` after so many steps.
        decay: what the schedules above need of it.
        milestones: of ``"steps"``, as shares of the epochs.
        batch: examples in a step; the last of an epoch may be smaller.
        epochs: at most so many.
        target_loss: stop when the mean loss on the training examples is at most this; None for no such rule.
        target_error: the same for the share of wrong answers on the training examples.
        check_every: after so many epochs it is looked whether the targets are met.
        dropout: share of units that is dropped in training, where the network has dropout.
        init: ``"default"`` (the network's own), or for all weights: ``"xavier_normal"``, ``"xavier_uniform"``,
            ``"kaiming_normal"``, ``"kaiming_uniform"``, ``"normal"`` (deviation ``init_scale``) or ``"uniform"``
            (between -init_scale and init_scale); biases are zero then.
        init_scale: of ``"normal"`` and ``"uniform"``; the others are multiplied by it.
        train_size: take the first so many training examples; all if None.
        label_noise: share of the training labels that is made random.
        label_noise_kind: ``"permuted"``, a random subset of floor(share * n) labels is permuted among itself (Ibayashi
            et al.); or ``"uniform"``, each of these gets a class drawn at random (Zhang et al.).
        confusion: so many further training examples, behind the first ``train_size``, are trained on with random labels
            (Jia and Su); nothing is measured on them.
        augment: ``"none"``, ``"flip"``, ``"crop"`` or ``"flip_crop"``.
        crop: pixels of padding of ``"crop"``.
        dtype: ``"float32"``, ``"float64"``, or ``"tf32"``: float32 whose products have three digits on a GPU, and are
            quicker there.
    """

    network: str = "mlp"
    architecture: Mapping[str, Value] = field(default_factory=dict)
    seed: int = 0
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    l2: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    schedule: str = "constant"
    decay: float = 0.1
    milestones: tuple[float, ...] = (0.5, 0.75)
    batch: int = 128
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

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Recipe:
        """The recipe of a flat configuration: names that are no setting of training belong to the network."""
        own = {name: value for name, value in config.items() if name in SETTINGS}
        return cls(**own, architecture={name: value for name, value in config.items() if name not in SETTINGS})


SETTINGS = tuple(each.name for each in fields(Recipe) if each.name != "architecture")
