"""Bad input: one typed exception each, which says what was expected, what was given and what to try."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

import saltflat
from saltflat import errors
from saltflat.statistics.compute import Statistics

X, Y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])


def net(*, bad: float | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    first, last = nn.Linear(4, 5), nn.Linear(5, 3)
    if bad is not None:
        last.weight.data[1, 2] = bad
    return nn.Sequential(first, nn.ReLU(), last)


def measure(model: Any = None, data: Any = (X, Y), names: Any = "curvature_trace", **options: Any) -> Statistics:
    return saltflat.compute_statistics(net() if model is None else model, data, names=names, **options)


def assert_refused(kind: type[errors.SaltflatError], *words: str, **call: Any) -> None:
    with pytest.raises(kind) as caught:
        measure(**call)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert re.fullmatch(r"Expected .+, but got .+\. (Try|Check) .+\.", message, re.DOTALL), message


def test_an_assertion_of_the_model_is_told_as_its_own() -> None:
    class Asserting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[1] == 5, "five features, please"
            return super().forward(x)

    with pytest.raises(
        errors.ModelError, match="got AssertionError: five features, please from the model on the first"
    ):
        measure(Asserting(4, 3))


class Once:
    """Runs dry after the first reading, but does not look like an iterator."""

    def __init__(self) -> None:
        self.batches = [(X, Y)]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.batches:
            yield self.batches.pop()


class Augmented(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, n: int) -> tuple[Tensor, int]:
        return X[n] + torch.randn(4), int(Y[n])


class Resampled:
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        some = torch.randint(6, (6,))
        yield X[some], Y[some]


@pytest.mark.parametrize(
    "data",
    [
        [],
        (X[:0], Y[:0]),
        DataLoader(TensorDataset(X[:0], Y[:0])),
        [(X[:0], Y[:0])],
        DataLoader(TensorDataset(X, Y), 8, drop_last=True),
    ],
    ids=["list", "pair", "loader", "empty batch", "all dropped"],
)
def test_empty_data(data: Any) -> None:
    assert_refused(errors.EmptyDataError, "empty data", data=data)


def test_a_generator_and_data_that_run_dry() -> None:
    assert_refused(errors.OneShotDataError, "generator", data=(batch for batch in [(X, Y)]))
    assert_refused(errors.OneShotDataError, "Once", data=Once())


def test_data_that_differs_between_readings() -> None:
    assert_refused(errors.NondeterministicError, "augmentation", data=DataLoader(Augmented(), 3))
    assert_refused(errors.NondeterministicError, "augmentation", data=DataLoader(Augmented(), 3, shuffle=True))
    assert_refused(errors.NondeterministicError, "first batch", data=Resampled())
    assert_refused(
        errors.NondeterministicError, "drops", data=DataLoader(TensorDataset(X, Y), 4, shuffle=True, drop_last=True)
    )


def test_a_shuffled_loader_is_the_same_data() -> None:
    plain = measure()["curvature_trace"]
    shuffled = measure(data=DataLoader(TensorDataset(X, Y), 4, shuffle=True))["curvature_trace"]
    torch.testing.assert_close(dict(shuffled), dict(plain))


def test_batches_of_the_wrong_make() -> None:
    assert_refused(errors.DataError, "Tensor", data=[X, X, X])
    assert_refused(errors.DataError, "labels", data=[{"x": X}])
    assert_refused(errors.DataError, "5", "6", data=(X, Y[:5]))
    assert_refused(errors.DataError, "5 targets", data=[(X, Y[:5])])
    assert_refused(errors.DataError, "int", data=3)
    assert_refused(errors.DataError, "text 'mnist'", "read_data", data="mnist")
    assert_refused(errors.DataError, "one tensor of shape (6, 4)", "pair", data=X)
    assert_refused(errors.DataError, "NumPy", "from_numpy", data=(X.numpy(), Y.numpy()))
    assert_refused(errors.ModelError, "OrderedDict", "loading the weights", model=net().state_dict())
    assert_refused(errors.ModelError, "str", "loading the weights", model="net.pt")
    assert_refused(errors.ModelError, "wrapping the function", model=torch.relu)
    assert_refused(errors.DataError, "axis", data=TensorOfOne())


class TensorOfOne(list[Any]):
    def __init__(self) -> None:
        super().__init__([(X[0], Y[0])])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite(bad: float) -> None:
    assert_refused(errors.NonFiniteError, "2.weight", model=net(bad=bad))
    inputs = X.clone()
    inputs[4, 1] = bad
    assert_refused(errors.NonFiniteError, "batch 1", "examples 3 to 5", data=[(X[:3], Y[:3]), (inputs[3:], Y[3:])])
    assert_refused(errors.NonFiniteError, "batch 0", data=(X, X.new_full((6, 3), bad)), loss="mse")
    assert_refused(errors.NonFiniteError, "loss", loss=lambda outputs, targets: outputs.sum() * bad)


def test_outputs_that_overflow() -> None:
    class Explodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return out * (1e38 if x.sum() > 50 else 1) * 1e5

    assert_refused(
        errors.NonFiniteError,
        "outputs",
        "examples 3 to 5",
        model=Explodes(),
        data=[(X[:3], Y[:3]), (X[3:] + 100, Y[3:])],
    )


def test_a_loss_that_is_not_finite_later_on() -> None:
    targets = X.new_zeros(6, 3)
    targets[5] = 7

    def picky(outputs: Tensor, goals: Tensor) -> Tensor:
        return (outputs - goals).square().mean() / (goals.sum() < 5)

    assert_refused(
        errors.NonFiniteError, "loss", "examples 3 to 5", data=[(X[:3], targets[:3]), (X[3:], targets[3:])], loss=picky
    )


def test_labels_that_do_not_fit() -> None:
    assert_refused(errors.LabelError, "0 to 3", "3 classes", data=(X, Y + 1 - (Y == 0).long()))
    assert_refused(errors.LabelError, "-1", data=[(X[:3], Y[:3]), (X[3:], Y[3:] - 1)])
    assert_refused(errors.LabelError, "floating-point targets", "torch.long", data=(X, Y.float()))
    assert_refused(errors.LabelError, "shape", data=(X, torch.zeros(6, 3)[:, :2]), loss="mse")
    assert_refused(errors.LabelError, "(N,)", "(N, 1)", model=nn.Linear(4, 1), data=(X, torch.zeros(6)), loss="mse")
    assert_refused(errors.LabelError, "from 0 to 2", data=(X, Y[:, None].expand(6, 3).float()), loss="bce_with_logits")
    assert_refused(errors.LabelError, "class weights", loss=nn.CrossEntropyLoss(weight=torch.ones(4)))
    assert_refused(errors.EmptyDataError, "ignored", data=(X, torch.full((6,), -100)))


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return nn.functional.dropout(out, 0.5, training=True)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) if len(x) > 1 else self.inner[2](self.inner[0](x))
        return out


def test_models_that_are_no_fixed_function_of_an_example() -> None:
    assert_refused(errors.NondeterministicError, "random", "dropout", model=Noisy())
    assert_refused(errors.CoupledExamplesError, "batch", model=Mixing())


def test_train_mode_is_no_error_unless_it_is_to_be_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 3))
    found = measure(model=model)
    assert any("train mode" in note for note in found.notes)
    assert model.training
    assert_refused(errors.ModelError, "'1'", "BatchNorm1d", model=model, mode="keep")
    assert_refused(
        errors.ModelError,
        "'2'",
        "Dropout",
        "random",
        model=model.train(False).requires_grad_() and _only_dropout_trains(model),
        mode="keep",
    )
    assert not any("train mode" in note for note in measure(model=model.eval(), mode="keep").notes)
    assert_refused(errors.OptionError, "mode", mode="train")


def _only_dropout_trains(model: nn.Sequential) -> nn.Sequential:
    model.eval()
    model[2].train()
    return model


def test_parameters_without_curvature() -> None:
    assert_refused(errors.ParameterError, "none of which requires", model=net().requires_grad_(False))
    assert_refused(errors.ParameterError, "got a model with 0,", model=nn.Sequential(nn.ReLU()))
    model = net()
    model.register_parameter("count", nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False))
    assert_refused(errors.ParameterError, "integer", "count", model=model)
    assert list(measure(model=model, layers=["0"])["curvature_trace"]) == ["0.weight", "0.bias"]
    model = net()
    model.register_parameter("phase", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    assert_refused(errors.ParameterError, "complex", "phase", model=model)


def test_models_and_outputs_of_the_wrong_make() -> None:
    assert_refused(errors.ModelError, "function", model=lambda x: x)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return out.mean()

    assert_refused(errors.ModelError, "shape ()", model=Loss())

    class Pair(Loss):
        def forward(self, x: Tensor) -> Any:
            return self.inner(x), x

    assert_refused(errors.ModelError, "tuple", model=Pair())


def test_a_model_on_another_device() -> None:
    assert_refused(errors.DeviceError, "meta", "cpu", model=net().to("meta"))


def test_half_precision() -> None:
    assert_refused(
        errors.PrecisionError, "bfloat16", "dtype=torch.float32", model=net().bfloat16(), data=(X.bfloat16(), Y)
    )
    assert_refused(errors.PrecisionError, "float16", dtype=torch.float16)
    full = measure()["curvature_trace"]
    half = measure(model=net().bfloat16(), data=(X.bfloat16(), Y), dtype=torch.float32)["curvature_trace"]
    torch.testing.assert_close(dict(half), dict(full), rtol=0.1, atol=1e-3)


def test_unknown_names_come_with_the_nearest_known_one() -> None:
    assert_refused(errors.UnknownNameError, "'curvature_trace'", names="curvature_tracé")
    assert_refused(errors.UnknownNameError, "'cross_entropy'", loss="crossentropy")
    assert_refused(errors.UnknownNameError, "'2.weight'", layers=["2.wieght"])
    assert_refused(errors.UnknownNameError, "'sampled'", columns="sample")
    assert_refused(errors.UnknownNameError, "mse", loss=3)
    assert_refused(errors.ParameterError, "'1', which has none", layers=["1"])
    assert_refused(errors.ParameterError, "layers=[]", layers=[])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("memory", "lots"),
        ("memory", "0GB"),
        ("memory", -1),
        ("columns", "top:0"),
        ("columns", "sampled:1"),
        ("columns", "exact:3"),
        ("seed", -1),
    ],
)
def test_options_that_mean_nothing(option: str, value: Any) -> None:
    assert_refused(errors.OptionError, repr(value), **{option: value})


def test_a_loss_that_is_not_a_mean_is_refused() -> None:
    assert_refused(errors.OptionError, "sum", loss=nn.CrossEntropyLoss(reduction="sum"))
    assert_refused(errors.OptionError, "single number", loss=lambda outputs, targets: outputs)


def test_a_shuffled_loader_is_read_in_one_order() -> None:
    """What goes by the number of an example would else mix them up: pools in windows, random columns."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    data = TensorDataset(torch.randn(30, 6).double(), torch.randint(3, (30,)))
    asked = ["fisher_logdet(subset=30)", "kappa"]
    for options in ({"memory": 10_000}, {"columns": "sampled:2"}):
        plain, *others = (
            saltflat.measure(net, loader, measures=asked, certificate=False, **options)
            for loader in (
                DataLoader(data, 7),
                DataLoader(data, 7, shuffle=True),
                DataLoader(data, 7, shuffle=True, generator=torch.Generator().manual_seed(3)),
            )
        )
        for other in others:
            assert [each.value for each in other.values()] == [each.value for each in plain.values()]


def test_a_loader_that_draws_some_of_the_examples_is_refused() -> None:
    data = TensorDataset(X, Y)
    sampler = RandomSampler(data, num_samples=2)
    assert_refused(errors.NondeterministicError, "2 of", data=DataLoader(data, 2, sampler=sampler))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"data": (torch.randn(4, 7), torch.tensor([0, 1, 0, 1]))}, "shape and type"),
        ({"data": (torch.randn(4, 6).double(), torch.tensor([0, 1, 0, 1]))}, "shape and type"),
        ({"data": (torch.randint(3, (4, 6)), torch.tensor([0, 1, 0, 1]))}, "shape and type"),
        ({"loss": lambda outputs: outputs.sum()}, "from the loss"),
        ({"loss": nn.BCELoss()}, "from the loss"),
        ({"layers": 5}, "list of names"),
        ({"layers": [1]}, "list of names"),
        ({"diagonal": []}, "diagonal"),
        ({"certificate": "x"}, "True or False"),
        ({"initial": {}}, "initial weights without"),
        ({"initial": {"weight": 3, "bias": 4}}, "initial weights without"),
        ({"initial": {"weight": torch.full((3, 6), torch.nan), "bias": torch.zeros(3)}}, "NaN"),
        ({"measures": "sharpness(adaptive=True)"}, "option of sharpness"),
        ({"measures": "quotient_sharpness(scaled='none')"}, "option of quotient_sharpness"),
        ({"measures": "pac_bayes_flatness(magnitude_aware=3)"}, "True or False"),
        ({"measures": "pac_bayes_flatness(epsilon=-1)"}, "positive"),
        ({"measures": "adaptive_sharpness(draws=1" + "0" * 22 + ")"}, "whole number"),
        ({"measures": "rho("}, "name=value"),
        ({"measures": "rho(axis='row', axis='column')"}, "name=value"),
    ],
)
def test_what_does_not_fit_a_measurement_is_named(options: dict[str, Any], says: str) -> None:
    torch.manual_seed(0)
    given = {"data": (torch.randn(4, 6), torch.tensor([0, 1, 0, 1])), **options}
    with pytest.raises(saltflat.SaltflatError, match=says):
        saltflat.measure(nn.Linear(6, 3), given.pop("data"), **given)


def test_an_error_in_the_users_own_function_is_the_users() -> None:
    def tell(step: str, done: int, total: int | None) -> None:
        if step == "Loss under random changes":
            raise RuntimeError("my own")

    data = torch.randn(8, 6), torch.tensor([0, 1] * 4)
    with pytest.raises(RuntimeError, match="my own"):
        saltflat.measure(nn.Linear(6, 3), data, measures="all", progress=tell)


def test_earlier_eigenvalues_that_are_none_are_refused() -> None:
    data = torch.randn(8, 6), torch.tensor([0, 1] * 4)
    for start in (5, {"weight": 5}):
        with pytest.raises(saltflat.SaltflatError, match="earlier result"):
            saltflat.compute_eigenvalues(nn.Linear(6, 3), data, start=start)  # type: ignore[arg-type]
    with pytest.raises(saltflat.SaltflatError, match="two or more axes"):
        saltflat.compute_eigenvalues(nn.Linear(6, 3), data, layers="bias")
