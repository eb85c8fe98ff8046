"""What a loss stands for: modules of torch, functions, and those that do not mean what is measured."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import saltflat
from saltflat.engine.custom_losses import CustomLoss
from saltflat.engine.losses import CrossEntropy, NegativeLogLikelihood, format_loss, parse_loss
from saltflat.errors import LabelError, OptionError
from saltflat.statistics.compute import Statistics
from saltflat.training.objective import make_objective

NAMES = ["curvature_diagonal", "gradient_second_moment"]
WEIGHT = torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64)


def net(*last: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), *last).double()


def examples(count: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.arange(count) * 3 // count  # sorted by class


def measured(loss: Any, model: nn.Module | None = None, data: Any = None, **options: Any) -> Statistics:
    return saltflat.compute_statistics(model or net(), data or examples(), names=NAMES, loss=loss, **options)


def assert_same(one: Statistics, other: Statistics) -> None:
    assert one.loss == pytest.approx(other.loss, rel=1e-12)
    for name in NAMES:
        for (_, a), (_, b) in zip(one[name].items(), other[name].items(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-14)


# Functions of a whole batch.


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, weight=WEIGHT)


def rooted(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets).sqrt()


def contrasted(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs - outputs.mean(0), targets)


@pytest.mark.parametrize("sizes", [[12], [1] * 12, [4, 4, 4]], ids=["one batch", "batches of one", "by class"])
@pytest.mark.parametrize(
    ("function", "says"),
    [
        (summed, "sum of the losses"),
        (weighted, "CrossEntropyLoss(weight=..., ignore_index=...)"),
        (rooted, "Expected the mean over the examples, "),
        (contrasted, "Expected the mean over the examples, "),
    ],
)
def test_a_function_that_is_no_mean_over_examples_is_refused(
    function: Callable[..., Tensor], says: str, sizes: list[int]
) -> None:
    """Called on one example at a time it would be another loss than the one that was trained on."""
    batches = list(zip(*(part.split(sizes) for part in examples()), strict=True))
    with pytest.raises(OptionError) as caught:
        measured(function, data=batches)
    message = str(caught.value)
    assert says in message
    assert function.__name__ in message
    assert re.fullmatch(r"Expected .+, but got .+\. (Try|Check) .+\.", message, re.DOTALL), message


def test_a_function_over_labels_that_are_not_ignored_is_refused() -> None:
    inputs, labels = examples()
    labels[3] = -100
    with pytest.raises(OptionError, match=r"each example alone, but got nan from the loss <lambda>.*ignore_index"):
        measured(lambda outputs, targets: F.cross_entropy(outputs, targets), data=(inputs, labels))


def test_means_and_values_per_example_are_taken_and_sums_are_not() -> None:
    wanted = measured("cross_entropy")

    def one_only(outputs: Tensor, targets: Tensor) -> Tensor:
        (output,), (target,) = outputs, targets
        value: Tensor = output.logsumexp(0) - output[target]
        return value

    for function in (
        lambda outputs, targets: F.cross_entropy(outputs, targets),
        lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"),
        lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none")[:, None],
        one_only,
    ):
        assert_same(measured(function), wanted)
    with pytest.raises(OptionError, match="sum of the losses"):
        measured(summed)


def test_a_rare_class_with_a_weight_is_noticed() -> None:
    inputs, _ = examples(200)
    labels = torch.zeros(200, dtype=torch.long)
    labels[137] = 1
    with pytest.raises(OptionError, match="together"):
        measured(weighted, data=(inputs, labels))


def test_penalties_and_landscapes_refuse_such_functions_too() -> None:
    with pytest.raises(OptionError, match="sum of the losses"):
        saltflat.training.penalty("hessian_trace", loss=summed)(net(), examples())
    with pytest.raises(OptionError, match="sum of the losses"):
        saltflat.compute_landscape(net(), examples(), loss=summed, points=3)


# Modules and functions of torch.


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (nn.CrossEntropyLoss(WEIGHT), partial(F.cross_entropy, weight=WEIGHT)),
        (
            nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1),
            partial(F.cross_entropy, weight=WEIGHT, label_smoothing=0.1),
        ),
        (nn.CrossEntropyLoss(ignore_index=1), partial(F.cross_entropy, ignore_index=1)),
    ],
    ids=["weights", "smoothing", "ignored"],
)
def test_a_function_of_torch_is_the_module_of_the_same_meaning(module: nn.Module, function: Any) -> None:
    assert_same(measured(function), measured(module))


def test_what_only_a_function_of_torch_can_do_is_left_to_it() -> None:
    assert isinstance(parse_loss(F.nll_loss), NegativeLogLikelihood)
    assert isinstance(parse_loss(partial(F.cross_entropy, WEIGHT)), CustomLoss)
    own: Any = F.mse_loss  # not every stub knows its weight
    assert isinstance(parse_loss(partial(own, weight=WEIGHT)), CustomLoss)
    assert isinstance(parse_loss(partial(partial(F.cross_entropy), label_smoothing=0.1)), CrossEntropy)
    assert isinstance(parse_loss(nn.CrossEntropyLoss()), CrossEntropy)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (nn.MSELoss(reduction="sum"), "number of outputs of all examples"),
        (nn.BCEWithLogitsLoss(reduction="sum"), "number of outputs of all examples"),
        (nn.CrossEntropyLoss(reduction="sum"), "number of labels that count"),
        (nn.SmoothL1Loss(reduction="sum"), "reduction='mean'"),
        (nn.MultiMarginLoss(reduction="none"), "reduction='mean'"),
        (partial(F.mse_loss, reduction="sum"), "number of outputs of all examples"),
    ],
)
def test_the_error_about_a_sum_says_what_it_is_a_multiple_of(loss: Any, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_loss(loss)
    assert says in str(caught.value)


def test_a_class_in_place_of_a_loss_is_named() -> None:
    with pytest.raises(OptionError, match=r"Try passing CrossEntropyLoss\(\)"):
        measured(nn.CrossEntropyLoss)


# Log-probabilities.


@pytest.mark.parametrize("options", [{}, {"weight": WEIGHT}, {"ignore_index": 1}, {"weight": WEIGHT.float()}])
def test_likelihoods_of_log_probabilities_are_cross_entropies_of_logits(options: dict[str, Any]) -> None:
    found = measured(nn.NLLLoss(**options), net(nn.LogSoftmax(1)))
    assert_same(found, measured(nn.CrossEntropyLoss(**options)))
    inputs, labels = examples()
    reference = {name: value.double() if name == "weight" else value for name, value in options.items()}
    with torch.no_grad():
        wanted = nn.NLLLoss(**reference)(net(nn.LogSoftmax(1))(inputs), labels)
    assert found.loss == pytest.approx(float(wanted), rel=1e-12)


@pytest.mark.parametrize("columns", ["exact", "top:2", "sampled:4"])
def test_measures_of_log_probabilities_are_those_of_logits(columns: str) -> None:
    names = ["quick", "hessian_top_eigenvalue", "kappa"] if columns == "exact" else ["quick"]
    model, twin = net(nn.LogSoftmax(1)), net()
    one, other = (
        saltflat.measure(each, examples(), loss, names, columns=columns)
        for each, loss in ((model, nn.NLLLoss()), (twin, "cross_entropy"))
    )
    assert list(one) == list(other)
    for name, found in other.items():
        assert one[name].value == pytest.approx(found.value, rel=1e-9)
        errors = [(each.stderr, each.sampling_stderr) for each in (one[name], found)]
        ours, theirs = ([-1.0 if error is None else error for error in each] for each in errors)
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-12)
        assert found.value > 0
    assert one.accuracy == other.accuracy
    assert one.certificate is not None
    assert other.certificate is not None
    assert one.certificate["holds"] == other.certificate["holds"]
    assert one.certificate["gap"] == pytest.approx(other.certificate["gap"], rel=1e-6, abs=1e-12)


def test_likelihoods_of_logits_or_probabilities_are_refused() -> None:
    with pytest.raises(OptionError, match=r"exponentials sum to.*CrossEntropyLoss"):
        measured(nn.NLLLoss())
    with pytest.raises(OptionError, match=r"exponentials sum to.*log_softmax"):
        measured(nn.NLLLoss(), net(nn.Softmax(1)))
    inputs, labels = examples()
    with pytest.raises(LabelError, match="class numbers"):
        measured(nn.NLLLoss(), net(nn.LogSoftmax(1)), (inputs, F.one_hot(labels).double()))


def test_training_objectives_take_likelihoods_as_they_are() -> None:
    inputs, labels = examples()
    model = net()  # of logits: nobody looks at values while training
    wanted = F.nll_loss(model(inputs), labels, WEIGHT)
    torch.testing.assert_close(make_objective(nn.NLLLoss(WEIGHT))(model, (inputs, labels)), wanted)
    assert isinstance(parse_loss(nn.NLLLoss()), CrossEntropy)


# Names.


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (nn.CrossEntropyLoss(), "cross_entropy"),
        (nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1), "cross_entropy(label_smoothing=0.1, weight=[1, 5, 2])"),
        (nn.CrossEntropyLoss(ignore_index=1), "cross_entropy(ignore_index=1)"),
        (nn.MSELoss(), "mse"),
        (partial(weighted), "weighted"),
        (nn.HuberLoss(), "HuberLoss"),
    ],
)
def test_losses_are_told_apart_by_their_names(loss: Any, name: str) -> None:
    """Reports of different losses cannot be compared, and those of one can, however it was passed."""
    assert format_loss(parse_loss(loss)) == name


def test_the_report_names_the_loss() -> None:
    report = saltflat.measure(
        net(), examples(), nn.CrossEntropyLoss(), "hessian_trace", logits="std", certificate=False
    )
    assert report.settings["loss"] == "cross_entropy"


# Labels.


def test_labels_of_one_byte_are_the_numbers_they_show() -> None:
    inputs, labels = examples()
    assert_same(measured("cross_entropy", data=(inputs, labels.byte())), measured("cross_entropy"))
    ignored = labels.where(labels != 1, 255).byte()
    wanted = measured(nn.CrossEntropyLoss(ignore_index=1))
    assert_same(measured(nn.CrossEntropyLoss(ignore_index=255), data=(inputs, ignored)), wanted)
    # 156 is -100 modulo 256: a label, and none of these classes.
    with pytest.raises(LabelError, match="156"):
        measured("cross_entropy", data=(inputs, labels.where(labels != 1, 156).byte()))


@pytest.mark.parametrize("loss", ["mse", "bce_with_logits"])
def test_truth_values_as_labels_are_refused_by_name(loss: str) -> None:
    inputs, labels = examples()
    with pytest.raises(LabelError, match=r"but got targets of type torch\.bool\. Try "):
        measured(loss, data=(inputs, F.one_hot(labels) > 0))


# Second derivatives that torch does not have.


def test_a_loss_without_second_derivatives_in_torch_is_named() -> None:
    with pytest.raises(OptionError, match=r"second derivative of the loss MultiMarginLoss.*fisher_trace"):
        measured(nn.MultiMarginLoss())
    model, data = net(), examples()
    found = saltflat.compute_statistics(
        model, data, names="gradient_second_moment", loss=nn.MultiMarginLoss(weight=WEIGHT.float())
    )
    wanted = nn.MultiMarginLoss(weight=WEIGHT)(model(data[0]), data[1]).detach()
    assert found.loss == pytest.approx(float(wanted), rel=1e-12)


def test_a_loss_that_uses_the_models_parameters_is_refused() -> None:
    model = nn.Linear(2, 3)
    given = torch.randn(5, 2), torch.arange(5) % 3

    def penalized(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + model.weight.square().sum()

    with pytest.raises(OptionError, match="uses the model's parameter 'weight'"):
        saltflat.compute_statistics(model, given, names="curvature_trace", loss=penalized)
