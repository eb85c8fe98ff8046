"""The gradients of Gram and Fisher matrices are taken in float64, whatever the precision of the model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import measure_oracle as dense
import numpy as np
import pytest
import torch
from cases import Case, torch_words
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

import saltflat
from saltflat.engine import context as context_module
from saltflat.engine.context import Context
from saltflat.engine.gram import compute_gram_matrix, use_float64
from saltflat.engine.output_curvature import parse_column_plan
from saltflat.engine.problem import Problem
from saltflat.engine.session import open_session
from saltflat.engine.strategy import run_probe
from saltflat.errors import NotDefinedError
from saltflat.measures.fisher import fisher_logdet, fisher_spectral_radius
from saltflat.measures.measurer import Measurer
from saltflat.measures.stack import NetworkStack, StackMember

Data = tuple[Tensor, Tensor]
POOL, SUBSET, DRAWS = 40, 20, 3
LOGDET = f"fisher_logdet(draws={DRAWS}, subset={SUBSET})"
RADIUS = f"fisher_spectral_radius(draws={DRAWS}, subset={SUBSET})"
SHORT = "fisher_logdet(draws=2, subset=5)"


def make_data(*shape: int, examples: int = POOL) -> Data:
    noise = torch.Generator().manual_seed(0)
    return torch.randn(examples, *shape, generator=noise), torch.randint(3, (examples,), generator=noise)


def make_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3)
    )  # fmt: skip


def make_cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip


def train(net: nn.Module, data: Data, steps: int) -> nn.Module:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(data[0]), data[1]).backward()
        optimizer.step()
    return net


def find_oracle(net: nn.Module, data: Data, measure: Callable[..., dense.Oracle]) -> float:
    """What the definition says of a copy of the network in float64."""
    inputs = data[0].double() if data[0].is_floating_point() else data[0]
    case = Case(deepcopy(net).double(), [(inputs, data[1])], "cross_entropy", torch_words("cross_entropy"))
    noise = torch.Generator().manual_seed(0)
    subsets = [torch.randperm(len(data[1]), generator=noise)[:SUBSET].tolist() for _ in range(DRAWS)]
    return measure(case, subsets).value


def measure(net: nn.Module, data: Data, measures: Any = (LOGDET, RADIUS), **options: Any) -> saltflat.Report:
    return saltflat.measure(net, data, measures=measures, certificate=False, progress=False, **options)


def open_context(net: nn.Module, data: Data, dtype: torch.dtype | None = None, limit: int = 1 << 30) -> Context:
    return Context(Problem.build(net, data, dtype=dtype), parse_column_plan("exact"), 0, limit)


def compute_in_own_precision(net: nn.Module, data: Data) -> dict[str, Any]:
    """The Gram matrix of gradients in the model's precision."""
    eps = max(torch.finfo(value.dtype).eps for value in net.parameters())
    with open_session(net, "eval", None):
        gram = compute_gram_matrix(open_context(net, data), torch.arange(len(data[1])))
    return {"gram": gram, "eps": eps, "seed": 0}


@pytest.mark.parametrize(
    ("build", "shape", "steps"),
    [(make_mlp, (6,), 0), (make_cnn, (1, 8, 8), 0), (make_mlp, (6,), 60), (make_cnn, (1, 8, 8), 28)],
    ids=["mlp", "cnn", "trained mlp", "trained cnn"],
)
def test_a_model_in_float32_has_the_values_of_its_copy_in_float64(
    build: Callable[[], nn.Module], shape: tuple[int, ...], steps: int
) -> None:
    data = make_data(*shape)
    net = train(build(), data, steps)
    before = deepcopy(net.state_dict())
    wanted = find_oracle(net, data, dense.fisher_logdet)
    for dtype in (None, torch.float32, torch.float64):
        found = measure(net, data, dtype=dtype)
        assert found[LOGDET].value == pytest.approx(wanted, rel=1e-10)
        assert found[LOGDET].details["floored_eigenvalues"] == 0
        assert found[LOGDET].details["eps"] == torch.finfo(torch.float64).eps
        assert found[RADIUS].value == pytest.approx(find_oracle(net, data, dense.fisher_spectral_radius), rel=1e-10)
    assert all(
        torch.equal(value, before[name]) and value.dtype == torch.float32 for name, value in net.state_dict().items()
    )
    old = fisher_logdet(compute_in_own_precision(net, data), subset=SUBSET, draws=DRAWS)
    # What this is for: gradients in float32 are enough before training, and not after.
    assert (abs(float(old.value) - wanted) > 1) == (steps > 0)
    assert (old.details["floored_eigenvalues"] > 0) == (steps > 0)


def test_the_fisher_matrix_is_that_of_the_copy_in_float64() -> None:
    data = make_data(6)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    name = "fisher_determinant(jitter=1e-10)"  # below the rounding of float32
    wanted = find_oracle(net, data, lambda case, _: dense.fisher_determinant(case, 1e-10))
    assert measure(net, data, name)[name].value == pytest.approx(wanted, rel=1e-8)
    assert measure(net, data, name)[name].value == pytest.approx(
        measure(net, data, name, dtype=torch.float64)[name].value, rel=1e-12
    )


def test_a_model_in_float64_is_measured_as_it_is() -> None:
    inputs, targets = make_data(6)
    net, data = make_mlp().double(), (inputs.double(), targets)
    with open_session(net, "eval", None):
        context = open_context(net, data)
        with use_float64(context) as wide:
            assert wide is context
    gram = compute_in_own_precision(net, data)
    found = measure(net, data)
    assert found[LOGDET].value == fisher_logdet(gram, subset=SUBSET, draws=DRAWS).value
    assert found[RADIUS].value == fisher_spectral_radius(gram, subset=SUBSET, draws=DRAWS).value


class Words(nn.Module):
    """With integers as inputs, which look the same in every precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(9, 8), nn.Linear(56, 3)

    def forward(self, numbers: Tensor) -> Tensor:
        if numbers.dtype != torch.int64:
            raise TypeError("Expected integers.")
        outputs: Tensor = self.out(self.table(numbers).tanh().flatten(1))
        return outputs


def test_integer_inputs_are_left_alone_and_probed_in_each_precision() -> None:
    noise = torch.Generator().manual_seed(0)
    net = Words()
    data = torch.randint(9, (POOL, 7), generator=noise), torch.randint(3, (POOL,), generator=noise)
    wanted = find_oracle(net, data, dense.fisher_logdet)
    assert measure(net, data)[LOGDET].value == pytest.approx(wanted, rel=1e-10)
    with open_session(net, "eval", None):
        context = open_context(net, data)
        narrow = context.get_probe(next(iter(context.problem.read_batches())))
        with use_float64(context) as wide:
            probe = wide.get_probe(next(iter(wide.problem.read_batches())))
        (kept,) = context.probes.values()
    assert kept is narrow
    assert (narrow.tolerance, probe.tolerance) == (1e-3, 1e-9)
    assert probe.moving > narrow.moving, "its examples need more memory"


class Different(nn.Module):
    """Uses the weight of a layer by itself, and only in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x).tanh()
        if x.dtype == torch.float64:
            hidden = hidden + (x @ self.one.weight.T).square()
        outputs: Tensor = self.two(hidden)
        return outputs


@pytest.mark.parametrize(("build", "is_searched"), [(make_mlp, False), (Different, True)])
def test_a_strategy_is_confirmed_in_float64_or_searched_again(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[], nn.Module], is_searched: bool
) -> None:
    net, data = build(), make_data(6)
    searched: list[torch.dtype | None] = []

    def record_probe(problem: Problem, *others: Any) -> Any:
        searched.append(problem.dtype)
        return run_probe(problem, *others)

    monkeypatch.setattr(context_module, "run_probe", record_probe)
    found = measure(net, data, RADIUS)[RADIUS].value
    assert found == pytest.approx(find_oracle(net, data, dense.fisher_spectral_radius), rel=1e-10)
    assert (torch.float64 in searched) == is_searched


@pytest.mark.parametrize("limit", [1, 1 << 18])
def test_windows_of_the_copy_give_the_same_matrix(limit: int) -> None:
    data = make_data(1, 8, 8)
    net = train(make_cnn(), data, 21)
    chosen = torch.arange(POOL)
    with open_session(net, "eval", None):
        whole = open_context(net, data, torch.float64)
        wanted = compute_gram_matrix(whole, chosen)
        context = open_context(net, data, limit=limit)
        with use_float64(context) as wide:
            torch.testing.assert_close(
                compute_gram_matrix(wide, chosen), wanted, rtol=1e-12, atol=1e-14 * float(wanted.max())
            )


def test_the_copy_is_announced_with_the_results() -> None:
    net = nn.Sequential(nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 3))
    size = sum(value.numel() * value.element_size() for value in net.parameters())
    data = make_data(500, examples=6)
    without, with_certificate = (
        {
            name: saltflat.measure(net, data, measures=name, certificate=certificate).settings["results_bytes"]
            for name in ("hessian_trace", SHORT)
        }
        for certificate in (False, True)
    )
    # The certificate, made where a measure depends on it, has such a copy, too, after this one is gone.
    assert with_certificate["hessian_trace"] - without["hessian_trace"] == 2 * size
    assert with_certificate[SHORT] == without[SHORT]
    both = saltflat.measure(net, data, measures=[SHORT, "hessian_trace"])
    assert both.settings["results_bytes"] == without[SHORT]


def test_networks_measured_in_a_row_have_the_readings_they_have_alone() -> None:
    data = make_data(6)
    members = [train(make_mlp(), (data[0], data[1].roll(k)), 10 * k) for k in range(3)]
    names = [LOGDET, "hessian_trace"]
    measurer = Measurer.parse(
        "cross_entropy", names, "exact", None, "1GiB", None, 0, "eval", "none", "exact", False, False
    )
    stack = NetworkStack(make_mlp(), measurer)
    for net in members:
        found = stack.measure(StackMember(net.state_dict(), data)).readings
        alone = measure(net, data, names)
        assert found[LOGDET].value == pytest.approx(find_oracle(net, data, dense.fisher_logdet), rel=1e-10)
        assert found[LOGDET].value == pytest.approx(alone[LOGDET].value, rel=1e-12)
        assert found["hessian_trace"].value == pytest.approx(alone["hessian_trace"].value, rel=1e-5)


class Middle(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.function = nn.Linear(4, 6), nn.Linear(6, 3), function

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.two(self.function(self.one(x)))
        return outputs


class InNumPy(torch.autograd.Function):
    """The hyperbolic tangent, computed in float32 by NumPy."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        array = x.detach().numpy()
        return torch.from_numpy(np.tanh(array.astype(np.float32)).astype(array.dtype))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        slope: Tensor = g * (1 - x.tanh().square())
        return slope


class CoarseBackward(torch.autograd.Function):
    """Twice the number, with a backward pass in float32."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        coarse: Tensor = (2 * g.float()).to(g.dtype)
        return coarse


@torch.library.custom_op("saltflat_tests::tanh", mutates_args=())
def coarse_tanh(x: Tensor) -> Tensor:
    return x.float().tanh().to(x.dtype)


@torch.library.custom_op("saltflat_tests::only_float32", mutates_args=())
def only_float32(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise NotImplementedError("no kernel for this precision")
    return x.tanh()


@torch.library.custom_op("saltflat_tests::exact_tanh", mutates_args=())
def exact_tanh(x: Tensor) -> Tensor:
    return x.tanh()


for operation in (coarse_tanh, only_float32, exact_tanh):
    operation.register_autograd(
        lambda ctx, g: g * (1 - ctx.saved_tensors[0].square()),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )


def require_float32(x: Tensor) -> Tensor:
    assert x.dtype == torch.float32, "kernels for float32 only"
    return x.tanh()


def write_in_float32(x: Tensor) -> Tensor:
    kept = torch.zeros(x.shape)
    kept[:, 2:] = x[:, 2:]
    return x + kept.to(x.dtype)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a cast": (lambda x: x.float().tanh().to(x.dtype), "lower precision .*: _to_copy makes float32 of float64"),
    "half of a cast": (lambda x: x.float().tanh(), "does not run in it: RuntimeError: "),
    "a buffer": (write_in_float32, "lower precision .*: copy_ makes float32 of float64"),
    "a matrix": (lambda x: x @ torch.eye(6), "does not run in it: RuntimeError: "),
    "a backward pass": (CoarseBackward.apply, "lower precision .*: _to_copy makes float32 of float64"),
    "NumPy": (InNumPy.apply, "lower precision .*: numbers that NumPy or Python computed"),
    "Python": (
        lambda x: x * torch.tensor((0 * x.detach().sum() + 0.3).item()),
        "lower precision .*: numbers that NumPy or",
    ),
    "an operation of another library": (coarse_tanh, "lower precision .*: saltflat_tests::tanh gives numbers of it"),
    "an operation without kernel": (only_float32, "does not run in it: NotImplementedError: no kernel"),
    "an assertion": (require_float32, "does not run in it: AssertionError: kernels for float32 only"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_computes_in_float32_has_no_such_number_and_says_why(name: str) -> None:
    function, reason = REFUSED[name]
    net, data = Middle(function), make_data(4)
    before = deepcopy(net.state_dict())
    measures = [SHORT, "fisher_spectral_radius(draws=2, subset=5)", "fisher_determinant(jitter=0.1)", "fisher_trace"]
    found = measure(net, data, measures)
    for reading in list(found.values())[:3]:
        assert math.isnan(reading.value)
        assert not reading.exact
        (note,) = reading.notes
        assert re.match(f"needs gradients in float64, and this model .*{reason}", note), note
    assert found["fisher_trace"].value > 0, "the others are as before"
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    if "lower precision" in reason:
        # Nor is a model in float64 believed that computes in float32.
        wide = measure(net.double(), (data[0].double(), data[1]), SHORT)[SHORT]
        assert math.isnan(wide.value)
        assert re.match(f"needs gradients in float64, and this model .*{reason}", wide.notes[0])


ALLOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "positions": lambda x: x + torch.arange(6).float().div(3),
    "a mask": lambda x: x.tanh().masked_fill(torch.tril(torch.ones(6, 6))[2] == 0, 0.3),
    "a number": lambda x: x * torch.tensor(0.3),
    "a choice": lambda x: torch.where(x > 0, x, torch.where(x < -1, 0.1, 0.2) * x),
    "signs": lambda x: x + x.sign().detach(),
    "rounding": lambda x: x + (1000 * x).round().detach(),
    "a number that is read": lambda x: x * float(0 * x.detach().sum() + 0.3),
    "an operation of another library": exact_tanh,
}


@pytest.mark.parametrize("name", ALLOWED)
def test_constants_of_lower_precision_belong_to_the_function(name: str) -> None:
    net, data = Middle(ALLOWED[name]), make_data(4)
    found = measure(net, data, SHORT)[SHORT]
    inputs = data[0].double().requires_grad_()
    wide = Middle(ALLOWED[name]).double()
    losses = [nn.functional.cross_entropy(wide(x[None]), y[None]) for x, y in zip(inputs, data[1], strict=True)]
    rows = torch.stack(
        [torch.cat([g.flatten() for g in torch.autograd.grad(each, list(wide.parameters()))]) for each in losses]
    )
    gram = {"gram": rows @ rows.mT, "eps": torch.finfo(torch.float64).eps, "seed": 0}
    assert found.value == pytest.approx(float(fisher_logdet(gram, subset=5, draws=2).value), rel=1e-10)


class Routed(nn.Module):
    """Computes in float32 for one example, which is not among the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = [row.float().tanh().to(row.dtype) if bool(row.sum() > 50) else row.tanh() for row in self.one(x)]
        outputs: Tensor = self.two(torch.stack(hidden))
        return outputs


def test_every_example_of_the_pool_is_watched() -> None:
    inputs, targets = make_data(4)
    net = Routed()
    assert measure(net, (inputs, targets), SHORT)[SHORT].value == pytest.approx(
        measure(net, (inputs, targets), SHORT, dtype=torch.float64)[SHORT].value, rel=1e-12
    )
    with torch.no_grad():
        inputs[30] = 100 * net.one.weight.sum(0)
    assert bool(net.one(inputs[30]).sum() > 50)
    found = measure(net, (inputs, targets), SHORT)[SHORT]
    assert math.isnan(found.value)
    assert "makes float32 of float64" in found.notes[0]


def test_a_device_without_float64_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(self: Problem) -> Problem:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")

    monkeypatch.setattr(Problem, "to_float64", convert)
    reading = measure(make_mlp(), make_data(6), SHORT)[SHORT]
    assert math.isnan(reading.value)
    assert "this model does not run in it: TypeError: Cannot convert a MPS Tensor" in reading.notes[0]
    report = measure(make_mlp(), make_data(6), "all")
    assert "fisher_logdet" not in report
    assert "MPS" in report.left_out["fisher_logdet"]


class Remembering(nn.Module):
    """Keeps what it has seen, in every way that a module can."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(3))
        self.kinds: list[torch.dtype] = []
        self.array, self.last = np.zeros(3), torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.inner(x)
        self.kinds.append(x.dtype)
        self.array[:] += 1
        self.last = outputs.detach()[0]
        return outputs


def test_the_model_is_given_back_as_it_was() -> None:
    net, data = Remembering(), make_data(6)
    before, last = deepcopy(net.state_dict()), net.last
    found = measure(net, data, [SHORT, "hessian_top_eigenvalue"])
    assert found[SHORT].value == pytest.approx(measure(net, data, SHORT, dtype=torch.float64)[SHORT].value, rel=1e-12)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.dtype == torch.float32
    assert net.kinds == []
    assert not net.array.any()
    assert net.last is last
    assert all(value.grad is None for value in net.parameters())


def test_errors_that_are_not_of_the_precision_are_raised() -> None:
    def stop(step: str, done: int, total: int | None) -> None:
        if step == "Gradients of single examples":
            raise KeyError("stopped by the user")

    with pytest.raises(KeyError, match="stopped by the user"):
        saltflat.measure(make_mlp(), make_data(6), measures=SHORT, certificate=False, progress=stop)
    with open_session(make_mlp(), "eval", None):
        for error in (OSError("unreadable"), NotDefinedError("needs more")):
            with pytest.raises(type(error), match=str(error)), use_float64(open_context(make_mlp(), make_data(6))):
                raise error
