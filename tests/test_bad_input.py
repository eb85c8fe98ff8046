"""Bad input: one typed exception each, saying what was got, what is wanted and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import saltflat
from saltflat import errors

X, Y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])


def net(*, bad: float | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    first, last = nn.Linear(4, 5), nn.Linear(5, 3)
    if bad is not None:
        last.weight.data[1, 2] = bad
    return nn.Sequential(first, nn.ReLU(), last)


def measure(
    model: Any = None, data: Any = (X, Y), names: Any = "curvature_trace", **options: Any
) -> saltflat.Statistics:
    return saltflat.statistics_of(net() if model is None else model, data, names, **options)


def assert_refused(kind: type[errors.SaltflatError], *words: str, **call: Any) -> None:
    with pytest.raises(kind) as caught:
        measure(**call)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert all(part in message for part in ("Got ", "Want ", "Do: ")), message


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


class Shuffled:
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(6)
        yield X[order], Y[order]


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
    assert_refused(errors.EmptyDataError, "examples", data=data)


def test_a_generator_and_data_that_run_dry() -> None:
    assert_refused(errors.OneShotDataError, "generator", data=(batch for batch in [(X, Y)]))
    assert_refused(errors.OneShotDataError, "Once", data=Once())


def test_data_that_differs_between_readings() -> None:
    assert_refused(errors.NondeterministicError, "augmentation", data=DataLoader(Augmented(), 3))
    assert_refused(errors.NondeterministicError, "augmentation", data=DataLoader(Augmented(), 3, shuffle=True))
    assert_refused(errors.NondeterministicError, "first batch", data=Shuffled())
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
    assert_refused(errors.LabelError, "type torch.float", data=(X, Y.float()))
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
    assert not measure(model=model.eval(), mode="keep").notes
    assert_refused(errors.OptionError, "mode", mode="train")


def _only_dropout_trains(model: nn.Sequential) -> nn.Sequential:
    model.eval()
    model[2].train()
    return model


def test_parameters_without_curvature() -> None:
    assert_refused(errors.ParameterError, "none of which requires", model=net().requires_grad_(False))
    assert_refused(errors.ParameterError, "0 parameters", model=nn.Sequential(nn.ReLU()))
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
    assert_refused(errors.ParameterError, "no parameters", layers=["1"])
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
