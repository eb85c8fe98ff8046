"""Bad input of every kind for everything public: each call gives a result or an error of saltflat's own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import saltflat
from saltflat.audit.result import Audit
from saltflat.bounds import Bound
from saltflat.bounds.robustness_result import FeatureRobustness
from saltflat.datasets import read_data
from saltflat.datasets.checkpoints import load_weights
from saltflat.engine.data import unpack_batch
from saltflat.integrations import JsonLines, Monitor, Table, TensorBoard, WandB
from saltflat.landscape.result import Landscape
from saltflat.spectrum.result import Spectrum
from saltflat.symmetry import canonicalize, equal_up_to_rescaling
from saltflat.training import ASAM, SAM, FisherPenalty, GradientNormPenalty, penalty, shift_weights

Call = Callable[[], Any]

X, Y = torch.linspace(-1, 1, 24).reshape(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
GOOD = X, Y


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def nested(*lengths: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nested tensors are a prototype
        return torch.nested.nested_tensor([torch.ones(length) for length in lengths])


class Gives(nn.Module):
    """A network whose outputs are made into something else."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.change = net(), change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.inner(x))


def holding(value: Tensor, kind: str = "parameter") -> nn.Module:
    """A network with one more parameter or buffer, which its forward pass uses where that is possible."""
    model = Gives(lambda outputs: outputs)
    if kind == "parameter":
        model.extra = nn.Parameter(value, requires_grad=value.is_floating_point() or value.is_complex())
    elif kind == "buffer":
        model.register_buffer("extra", value)
    else:
        model.extra = value
    return model


def in_place_of_weight(value: Tensor) -> nn.Module:
    model = net()
    model[0].weight = nn.Parameter(value, requires_grad=value.is_floating_point())
    return model


def tied_to(**changes: Any) -> nn.Module:
    model = net()
    for name, value in changes.items():
        setattr(model, name, value)
    return model


def models() -> dict[str, Callable[[], Any]]:
    sparse = torch.eye(5, 4).to_sparse()
    return {
        "None": lambda: None,
        "a number": lambda: 3,
        "a text": lambda: "resnet",
        "a function": lambda: lambda x: x,
        "a class": lambda: nn.Linear,
        "a list of modules": lambda: [nn.Linear(4, 3)],
        "a dict of weights": lambda: net().state_dict(),
        "a tensor": lambda: X,
        "a parameter": lambda: nn.Parameter(X),
        "no parameters": lambda: nn.Sequential(nn.Flatten()),
        "a ModuleList": lambda: nn.ModuleList([nn.Linear(4, 3)]),
        "a ModuleDict": lambda: nn.ModuleDict({"a": nn.Linear(4, 3)}),
        "a ParameterList": lambda: nn.ParameterList([torch.ones(2)]),
        "no forward": nn.Module,
        "frozen": lambda: net().requires_grad_(False),
        "NaN": lambda: in_place_of_weight(torch.full((5, 4), math.nan)),
        "infinity": lambda: in_place_of_weight(torch.full((5, 4), math.inf)),
        "a sparse weight": lambda: in_place_of_weight(sparse),
        "a compressed weight": lambda: in_place_of_weight(_quietly(lambda: torch.eye(5, 4).to_sparse_csr())),
        "a sparse parameter": lambda: holding(sparse),
        "a sparse buffer": lambda: holding(sparse, "buffer"),
        "a sparse attribute": lambda: holding(sparse, "attribute"),
        "a nested parameter": lambda: holding(nested(2, 3)),
        "a nested buffer": lambda: holding(nested(2, 3), "buffer"),
        "a nested attribute": lambda: holding(nested(2, 3), "attribute"),
        "a weight of another shape": lambda: in_place_of_weight(torch.ones(2, 2)),
        "a weight of no dimensions": lambda: in_place_of_weight(torch.ones(())),
        "an empty weight": lambda: in_place_of_weight(torch.ones(0, 4)),
        "an empty parameter": lambda: holding(torch.ones(0)),
        "an empty buffer": lambda: holding(torch.ones(0), "buffer"),
        "an integer parameter": lambda: holding(torch.ones(2, dtype=torch.int64)),
        "a boolean buffer": lambda: holding(torch.ones(2, dtype=torch.bool), "buffer"),
        "a complex parameter": lambda: holding(torch.ones(2, dtype=torch.complex64)),
        "a complex buffer": lambda: holding(torch.ones(2, dtype=torch.complex64), "buffer"),
        "a quantized buffer": lambda: holding(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "buffer"),
        "a float8 buffer": lambda: holding(torch.ones(2).to(torch.float8_e4m3fn), "buffer"),
        "a meta parameter": lambda: holding(torch.ones(2, device="meta")),
        "a meta buffer": lambda: holding(torch.ones(2, device="meta"), "buffer"),
        "all on meta": lambda: net().to("meta"),
        "half precision": lambda: net().half(),
        "lazy": lambda: nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.Linear(5, 3)),
        "DataParallel": lambda: nn.DataParallel(net()),
        "TorchScript": lambda: torch.jit.script(net()),
        "gives None": lambda: Gives(lambda outputs: None),
        "gives a text": lambda: Gives(lambda outputs: "outputs"),
        "gives a list": lambda: Gives(lambda outputs: [outputs]),
        "gives an empty dict": lambda: Gives(lambda outputs: {}),
        "gives one number": lambda: Gives(lambda outputs: outputs.sum()),
        "gives a float": lambda: Gives(lambda outputs: float(outputs.sum())),
        "gives an array": lambda: Gives(lambda outputs: outputs.detach().numpy()),
        "gives integers": lambda: Gives(lambda outputs: outputs.argmax(1)),
        "gives complex numbers": lambda: Gives(lambda outputs: outputs + 1j),
        "gives half precision": lambda: Gives(lambda outputs: outputs.half()),
        "gives a sparse tensor": lambda: Gives(lambda outputs: outputs.to_sparse()),
        "gives a nested tensor": lambda: Gives(lambda outputs: nested(2, 3)),
        "gives NaN": lambda: Gives(lambda outputs: outputs * math.nan),
        "gives infinity": lambda: Gives(lambda outputs: outputs * math.inf),
        "gives nothing per example": lambda: Gives(lambda outputs: outputs[:, :0]),
        "gives no examples": lambda: Gives(lambda outputs: outputs[:0]),
        "gives fewer examples": lambda: Gives(lambda outputs: outputs[:1]),
        "gives one number per example": lambda: Gives(lambda outputs: outputs.sum(1)),
        "gives constants": lambda: Gives(lambda outputs: outputs.detach()),
        "gives other things each time": lambda: Gives(torch.rand_like),
        "raises": lambda: Gives(lambda outputs: outputs @ outputs),
        "takes no input": lambda: _takes(lambda self: torch.ones(6, 3)),
        "takes two inputs": lambda: _takes(lambda self, a, b: a),
        "mixes examples": lambda: Gives(lambda outputs: outputs - outputs.mean(0)),
        "cannot be copied": lambda: tied_to(lock=_uncopied()),
    }


def _takes(forward: Callable[..., Tensor]) -> nn.Module:
    kind = type("Takes", (nn.Linear,), {"forward": forward})
    made: nn.Module = kind(4, 3)
    return made


def _uncopied() -> Any:
    import threading

    return threading.Lock()


def _quietly(make: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def data() -> dict[str, Callable[[], Any]]:
    targets = torch.zeros(6, 3)
    return {
        "None": lambda: None,
        "a number": lambda: 3,
        "a text": lambda: "mnist",
        "one tensor": lambda: X,
        "no data": list,
        "an empty pair": lambda: (X[:0], Y[:0]),
        "a pair of no dimensions": lambda: (torch.tensor(1.0), torch.tensor(0)),
        "inputs of no dimensions": lambda: (torch.tensor(1.0), Y),
        "targets of no dimensions": lambda: (X, torch.tensor(0)),
        "batches of no dimensions": lambda: [(torch.tensor(1.0), torch.tensor(0))],
        "sparse inputs": lambda: (X.to_sparse(), Y),
        "compressed inputs": lambda: (_quietly(X.to_sparse_csr), Y),
        "sparse targets": lambda: (X, Y.to_sparse()),
        "sparse batches": lambda: [(X.to_sparse(), Y)],
        "sparse named inputs": lambda: {"input": X.to_sparse(), "labels": Y},
        "sparse among several inputs": lambda: [((X, X.to_sparse()), Y)],
        "nested inputs": lambda: (nested(4, 4, 4, 4, 4, 4), Y),
        "ragged inputs": lambda: (nested(4, 3, 2, 4, 4, 4), Y),
        "nested targets": lambda: (X, nested(1, 1, 1, 1, 1, 1)),
        "nested batches": lambda: [(nested(4, 4, 4, 4, 4, 4), Y)],
        "jagged inputs": lambda: (_jagged(), Y),
        "quantized inputs": lambda: (torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), Y),
        "complex inputs": lambda: (X + 1j, Y),
        "complex targets": lambda: (X, Y + 1j),
        "boolean inputs": lambda: (X > 0, Y),
        "integer inputs": lambda: (X.long(), Y),
        "half inputs": lambda: (X.half(), Y),
        "double inputs": lambda: (X.double(), Y),
        "float8 inputs": lambda: (X.to(torch.float8_e4m3fn), Y),
        "meta inputs": lambda: (X.to("meta"), Y),
        "meta targets": lambda: (X, Y.to("meta")),
        "inputs that require a gradient": lambda: (X.clone().requires_grad_(), Y),
        "inputs with NaN": lambda: (X * math.nan, Y),
        "inputs with infinity": lambda: (X * math.inf, Y),
        "inputs of another width": lambda: (X[:, :3], Y),
        "inputs of no width": lambda: (X[:, :0], Y),
        "inputs of more dimensions": lambda: (X[None], Y),
        "flat inputs": lambda: (X[:, 0], Y),
        "fewer targets": lambda: (X, Y[:4]),
        "targets out of range": lambda: (X, Y + 5),
        "targets far out of range": lambda: (X, torch.full((6,), 2**62)),
        "negative targets": lambda: (X, Y - 4),
        "targets all ignored": lambda: (X, torch.full((6,), -100)),
        "float targets": lambda: (X, Y.float()),
        "half targets": lambda: (X, Y.half()),
        "boolean targets": lambda: (X, Y > 0),
        "unsigned targets": lambda: (X, Y.to(torch.uint8)),
        "wide unsigned targets": lambda: (X, Y.to(torch.uint64)),
        "targets with NaN": lambda: (X, targets * math.nan),
        "negative probabilities": lambda: (X, targets - 1),
        "probabilities of other classes": lambda: (X, torch.zeros(6, 4)),
        "targets of two dimensions": lambda: (X, Y[:, None]),
        "targets of three dimensions": lambda: (X, Y[:, None, None]),
        "targets of no width": lambda: (X, targets[:, :0]),
        "arrays": lambda: (X.numpy(), Y.numpy()),
        "arrays of objects": lambda: [(np.array([None] * 6), Y)],
        "lists": lambda: (X.tolist(), Y.tolist()),
        "texts": lambda: (["a"] * 6, Y),
        "a triple": lambda: (X, Y, Y),
        "batches that are triples": lambda: [(X, Y, Y)],
        "a list of numbers": lambda: [1, 2, 3],
        "a list of None": lambda: [None],
        "a list of tensors": lambda: [X, X, X],
        "a dict without labels": lambda: {"input": X},
        "a dict of lists": lambda: {"input": X.tolist(), "labels": Y.tolist()},
        "a dict with an unknown input": lambda: {"image": X, "labels": Y},
        "a dict with a number as its key": lambda: [{1: X, "labels": Y}],
        "inputs that are an empty dict": lambda: [({}, Y)],
        "inputs that are an empty tuple": lambda: [((), Y)],
        "inputs that are None": lambda: [(None, Y)],
        "a generator": lambda: (batch for batch in [GOOD]),
        "an iterator": lambda: iter([GOOD]),
        "a class": lambda: list,
        "a function": lambda: lambda: GOOD,
        "a dataset of nothing": lambda: _Broken(0),
        "a dataset that raises": lambda: _Broken(6),
        "an iterable that raises": lambda: _Raises(),
        "batches of other shapes": lambda: [GOOD, (X[:, :2], Y)],
        "batches of other types": lambda: [GOOD, (X.double(), Y)],
        "a later batch with NaN": lambda: [GOOD, (X * math.nan, Y)],
        "a later batch that is none": lambda: [GOOD, 5],
    }


class _Broken(torch.utils.data.Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, n: int) -> Any:
        raise saltflat.SaltflatError("an error of the data's own")


class _Raises:
    def __iter__(self) -> Iterator[Any]:
        raise saltflat.SaltflatError("an error of the data's own")


def _jagged() -> Any:
    return _quietly(lambda: torch.nested.nested_tensor([torch.ones(4)] * 6, layout=torch.jagged))


def losses() -> dict[str, Any]:
    return {
        "None": None,
        "a number": 3,
        "an unknown name": "crossentropy",
        "an empty name": "",
        "a list": ["mse"],
        "a class": nn.CrossEntropyLoss,
        "a module of another kind": nn.Linear(3, 1),
        "a sum": nn.CrossEntropyLoss(reduction="sum"),
        "no reduction": nn.MSELoss(reduction="none"),
        "weights of other classes": nn.CrossEntropyLoss(weight=torch.ones(7)),
        "negative weights": nn.CrossEntropyLoss(weight=-torch.ones(3)),
        "weights with NaN": nn.CrossEntropyLoss(weight=torch.full((3,), math.nan)),
        "sparse weights": nn.CrossEntropyLoss(weight=torch.ones(3).to_sparse()),
        "weights that are no tensor": partial(F.cross_entropy, weight=[1, 2, 3]),  # type: ignore[arg-type]
        "weights of two dimensions": nn.CrossEntropyLoss(weight=torch.ones(3, 3)),
        "smoothing of a text": nn.CrossEntropyLoss(label_smoothing="much"),  # type: ignore[arg-type]
        "smoothing beyond one": partial(F.cross_entropy, label_smoothing=7.0),
        "negative log-likelihood of outputs that are no logarithms": nn.NLLLoss(),
        "mse": "mse",
        "bce_with_logits": "bce_with_logits",
        "BCELoss": nn.BCELoss(),
        "Huber loss": nn.HuberLoss(),
        "gives None": lambda outputs, targets: None,
        "gives a number": lambda outputs, targets: 1.0,
        "gives the outputs": lambda outputs, targets: outputs,
        "gives NaN": lambda outputs, targets: outputs.sum() * math.nan,
        "gives a constant": lambda outputs, targets: torch.ones(()),
        "gives an integer": lambda outputs, targets: outputs.argmax(),
        "gives a complex number": lambda outputs, targets: outputs.sum() + 1j,
        "gives a sparse tensor": lambda outputs, targets: outputs.sum().reshape(1).to_sparse(),
        "takes one argument": lambda outputs: outputs.sum(),
        "raises": lambda outputs, targets: outputs @ outputs,
        "cannot be differentiated twice": lambda outputs, targets: _Once.apply(outputs).sum(),  # type: ignore[no-untyped-call]
    }


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


# For options of any kind. Each is wrong for most of them.
VALUES: dict[str, Any] = {
    "None": None,
    "True": True,
    "-1": -1,
    "0": 0,
    "2": 2,
    "0.5": 0.5,
    "2.5": 2.5,
    "NaN": math.nan,
    "infinity": math.inf,
    "10^30": 10**30,
    "10^400": 10**400,
    "a fraction": Fraction(1, 2),
    "a complex number": 1j,
    "an empty text": "",
    "a text": "no such thing",
    "a text with NUL": "a\0b",
    "half of a surrogate pair": "\ud800",
    "a long text": "x" * 10_000,
    "bytes": b"exact",
    "an empty list": [],
    "a list of a text": ["no such thing"],
    "a list of a number": [3],
    "a list of None": [None],
    "an empty dict": {},
    "a dict": {"a": 1},
    "a set": {1, 2},
    "an array": np.arange(3.0),
    "a tensor": torch.ones(2),
    "a tensor of no dimensions": torch.tensor(3),
    "a sparse tensor": torch.ones(2).to_sparse(),
    "a class": int,
    "a function": lambda *args: None,
    "an object": object(),
}

MORE: dict[str, list[Any]] = {
    "columns": [
        "sampled:100000000000",
        "top:100000000000",
        "sampled:1" + "0" * 5000,
        "top:-1",
        "sampled:2.5",
        "top:",
        ":3",
        "sampled:¹²",
        "exact:3",
    ],
    "measures": ["rho(axis=3)", "rho(", "rho(axis='row', axis='row')", "rho(axis=__import__('os'))", "kappa,rho"],
    "memory": ["1e400GiB", "-3GiB", "1", "12 parsecs", "1ib", "0.0001"],
    "dtype": [torch.float16, torch.int64, torch.complex64, "float64", float],
    "seed": [2**63, 2**64, -(2**70), "0"],
    "layers": ["0.weight", ["0.weight", "0.weight"], "1", ["0", 1], "0.", "."],
    "initial": [net().double(), nn.Linear(2, 2), {"0.weight": X.to_sparse()}, {"0.weight": "w"}],
    "every": ["3 parsecs", "0 steps", "epoch", "1 epochs", "-1 steps"],
    "draws": [10**9 + 0.5, "3"],
    "directions": ["eigenvectors", [{}], [{"0.weight": torch.ones(2)}], [net().state_dict()] * 3],
    "example": ["x", X.to_sparse(), nested(4, 4), torch.tensor(1.0), X[:0], X[:, :2], (X, X), {"input": X}, {"x": X}],
}


def options_of(function: Callable[..., Any], usual: Mapping[str, Any], *names: str) -> Iterator[tuple[str, Call]]:
    """The function with each of these options set to every value."""
    for name in names:
        given = [*VALUES.items(), *((repr(value)[:40], value) for value in MORE.get(name, []))]
        for label, value in given:
            yield f"{name}={label}", partial(function, **{**usual, name: value})


def every_call(folder: Path) -> dict[str, Call]:
    """Bad input of every kind for everything public, by what it is."""
    made: dict[str, Call] = {}
    quick = {"progress": False}
    on_data: dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]] = {
        "measure": (
            saltflat.measure,
            {"measures": ["hessian_trace", "fisher_trace"], **quick},
            (
                "measures", "columns", "layers", "memory", "dtype", "seed", "progress", "mode", "logits", "diagonal",
                "initial", "certificate", "sampling", "limit",
            ),
        ),
        "compute_statistics": (
            saltflat.compute_statistics,
            {"names": "curvature_trace", **quick},
            ("names", "columns", "layers", "memory", "dtype", "seed", "progress", "mode", "limit"),
        ),
        "certify": (saltflat.certify, {}, ("layers", "examples", "seed", "mode")),
        "compute_eigenvalues": (
            saltflat.compute_eigenvalues,
            {"steps": 3, **quick},
            ("start", "tolerance", "steps", "columns", "layers", "memory", "dtype", "seed", "progress", "mode"),
        ),
        "spectrum": (
            saltflat.compute_spectrum,
            {"density": False, "k": 1, **quick},
            ("k", "smallest", "matrix", "per", "density", "draws", "steps", "layers", "memory", "dtype", "seed",
             "progress", "mode", "limit"),
        ),
        "landscape": (
            saltflat.compute_landscape,
            {"points": 3, **quick},
            ("directions", "dimensions", "points", "radius", "normalize", "biases", "batch_norm", "layers", "memory",
             "dtype", "seed", "progress"),
        ),
        "audit": (
            saltflat.audit_invariance,
            {"measures": "fisher_trace", "draws": 1, **quick},
            ("measures", "draws", "spread", "kinds", "seed", "columns", "layers", "memory", "progress", "logits",
             "diagonal", "initial", "limit"),
        ),
        "compute_bounds": (
            saltflat.compute_bounds,
            {"bounds": "parameterwise", **quick},
            ("bounds", "of", "delta", "draws", "limit", "memory", "dtype", "seed", "progress", "mode", "columns"),
        ),
        "certify_error": (
            saltflat.certify_error,
            {"draws": 1, **quick},
            (
                "prior", "prior_data", "delta", "of", "epochs", "move", "lr", "draws", "precision", "columns", "memory",
                "dtype", "seed", "progress", "mode", "limit",
            ),
        ),
        "feature_robustness": (
            _robust,
            {"deltas": 0.1, "draws": 2, "restarts": 0, "steps": 1, **quick},
            ("layer", "deltas", "norm", "matrix", "draws", "restarts", "steps", "per_example", "memory", "dtype",
             "seed", "progress", "mode", "limit"),
        ),
        "rebalance": (saltflat.rebalance, quick, ("kind", "columns", "memory", "dtype", "seed", "progress", "strict")),
        "Monitor": (
            _monitored,
            {},
            ("measures", "every", "cap", "loggers", "by_layer", "optimizer", "spectrum", "table", "seed", "prefix",
             "clock", "initial", "columns", "layers"),
        ),
    }  # fmt: skip
    for name, (function, usual, options) in on_data.items():
        for label, model in models().items():
            made[f"{name} of a model: {label}"] = partial(_on, function, model, lambda: GOOD, usual)
        for label, examples in data().items():
            made[f"{name} with data: {label}"] = partial(_on, function, net, examples, usual)
        for label, loss in losses().items():
            made[f"{name} with a loss: {label}"] = partial(_on, function, net, lambda: GOOD, {**usual, "loss": loss})
        for label, call in options_of(partial(_later, function), usual, *options):
            made[f"{name}({label})"] = call
    on_example: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
        "symmetries": (saltflat.find_symmetries, ("example", "kind")),
        "rescale": (saltflat.rescale, ("example", "seed", "spread", "kind", "strict")),
        "canonicalize": (canonicalize, ("example",)),
        "fold": (saltflat.fold, ("example",)),
        "equal_up_to_rescaling": (lambda model, example: equal_up_to_rescaling(model, net(), example), ("example",)),
    }
    for name, (function, options) in on_example.items():
        for label, model in models().items():
            made[f"{name} of a model: {label}"] = partial(_called, function, model)
        for label, call in options_of(partial(_of_net, function), {"example": X}, *options):
            made[f"{name}({label})"] = call
        for label, inputs in data().items():
            made[f"{name} with an example: {label}"] = partial(_with_example, function, inputs)
    made.update(_trainings())
    made.update(_files(folder))
    made.update(_studies())
    made.update(_results())
    made.update(_callbacks())
    return made


def _on(function: Callable[..., Any], model: Call, examples: Call, usual: Mapping[str, Any]) -> Any:
    return function(model(), examples(), **usual)


def _later(function: Callable[..., Any], **given: Any) -> Any:
    return function(net(), GOOD, **given)


def _of_net(function: Callable[..., Any], **given: Any) -> Any:
    return function(net(), **given)


def _called(function: Callable[..., Any], model: Call) -> Any:
    return function(model(), example=X)


def _with_example(function: Callable[..., Any], example: Call) -> Any:
    given = example()
    return function(net(), example=given[0] if isinstance(given, tuple) and given else given)


def _robust(model: Any, examples: Any, *, layer: Any = "0", **options: Any) -> Any:
    return saltflat.feature_robustness(model, examples, layer, **options)


def _monitored(model: Any, probe: Any, loss: Any = "cross_entropy", **options: Any) -> Any:
    with Monitor(model, probe, loss=loss, **{"every": 1, "cap": None, "measures": "fisher_trace", **options}) as found:
        return found.after_step()


def _trainings() -> dict[str, Call]:
    made: dict[str, Call] = {}
    kinds = {"SAM": SAM, "ASAM": ASAM, "GradientNormPenalty": GradientNormPenalty}
    for name, kind in kinds.items():
        own = {"SAM": (), "ASAM": ("eta",), "GradientNormPenalty": ("balance",)}[name]
        for label, call in options_of(partial(_two_pass, kind), {"lr": 0.1}, "rho", "sync", *own):
            made[f"{name}({label})"] = call
        for label, call in options_of(partial(_two_pass, kind), {}, "base"):
            made[f"{name}({label})"] = call
        for label, model in models().items():
            made[f"{name} of a model: {label}"] = partial(_shifted_twice, kind, model)
        for label, closure in {**VALUES, "no gradient": lambda: torch.ones(())}.items():
            made[f"{name}.step({label})"] = partial(_stepped, kind, closure)
    fisher = ("parts", "alpha", "beta", "clip", "start_step", "start_epoch", "objective", "strategy", "whole")
    for label, call in options_of(_fisher, {}, *fisher):
        made[f"FisherPenalty({label})"] = call
    for label, model in models().items():
        made[f"FisherPenalty of a model: {label}"] = partial(_with, model, _fisher)
        made[f"penalty of a model: {label}"] = partial(_with, model, _priced)
    for label, examples in data().items():
        made[f"FisherPenalty with a batch: {label}"] = partial(_with, examples, partial(_fisher, None))
        made[f"FisherPenalty with mse and a batch: {label}"] = partial(
            _with, examples, lambda batch: _fisher(None, batch, "mse")
        )
        made[f"penalty with a batch: {label}"] = partial(_with, examples, partial(_priced, None))
    for label, loss in losses().items():
        made[f"FisherPenalty with a loss: {label}"] = partial(_fisher, loss=loss)
        made[f"penalty with a loss: {label}"] = partial(_priced, loss=loss)
    of_value: dict[str, Callable[[Any], Any]] = {
        "FisherPenalty.step({})": lambda value: FisherPenalty(net()).step(value, GOOD),
        "FisherPenalty.backward(weight={})": lambda value: FisherPenalty(net()).backward(GOOD, value),
        "FisherPenalty.set_epoch({})": lambda value: FisherPenalty(net()).set_epoch(value),
        "FisherPenalty.load_state_dict({})": partial(_loaded, FisherPenalty),
        "SAM.load_state_dict({})": partial(_loaded, SAM),
        "penalty({})": penalty,
        "shifted with parameters {}": lambda value: _shifted(value, [X]),
        "shifted with steps {}": lambda value: _shifted(None, value),
    }
    made.update(_with_values(of_value))
    other = torch.optim.Adam(nn.Linear(1, 1).parameters()).state_dict()
    made["SAM.load_state_dict of another optimizer"] = partial(_loaded, SAM, other)
    for label, call in options_of(_priced, {}, "columns", "layers", "dtype", "seed", "mode", "logits", "strategy"):
        made[f"penalty({label})"] = call
    return made


def _with(make: Call, use: Callable[[Any], Any]) -> Any:
    return use(make())


def _with_values(calls: Mapping[str, Callable[[Any], Any]]) -> dict[str, Call]:
    return {name.format(label): partial(call, value) for name, call in calls.items() for label, value in VALUES.items()}


def _priced(model: Any = None, batch: Any = GOOD, loss: Any = "cross_entropy", **given: Any) -> Any:
    return penalty("fisher_trace", loss, **given)(net() if model is None else model, batch)


def _two_pass(kind: Callable[..., Any], base: Any = torch.optim.SGD, **given: Any) -> Any:
    model = net()
    optimizer = kind(model, base, **given)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        return loss

    return optimizer.step(closure)


def _stepped(kind: Callable[..., Any], closure: Any) -> Any:
    return kind(net(), torch.optim.SGD, lr=0.1).step(closure)


def _loaded(kind: Callable[..., Any], state: Any) -> Any:
    made = kind(net()) if kind is FisherPenalty else kind(net(), torch.optim.SGD, lr=0.1)
    return made.load_state_dict(state)


def _shifted_twice(kind: Callable[..., Any], model: Call) -> Any:
    used = model()
    optimizer = kind(used, torch.optim.SGD, lr=0.1)
    for p in used.parameters():
        if p.requires_grad:
            p.grad = torch.ones_like(p)
    optimizer.first_step()
    for p in used.parameters():
        if p.requires_grad:
            p.grad = torch.ones_like(p)
    return optimizer.second_step()


def _fisher(model: Any = None, batch: Any = GOOD, loss: Any = "cross_entropy", **given: Any) -> Any:
    used = net() if model is None else model
    made = FisherPenalty(used, loss, **given)
    optimizer = torch.optim.SGD(used.parameters(), lr=0.1)
    try:
        return made.step(optimizer, batch)
    except saltflat.SaltflatError:
        raise
    except Exception as error:
        if _raises_in_plain_step(used, batch, loss, type(error)):
            return None
        raise


def _raises_in_plain_step(model: Any, batch: Any, loss: Any, kind: type[Exception]) -> bool:
    """Whether the model's forward pass, or a loss function of the user's own, raises an error of this kind by itself.

    That is the user's error, in training as everywhere. What targets and losses of torch make of them is not.
    """
    try:
        args, kwargs, targets = unpack_batch(batch)
        outputs = model(*args, **kwargs)
        if callable(loss):
            loss(outputs, targets)
    except kind:
        return True
    return False


def _shifted(parameters: Any, steps: Any) -> None:
    model = net()
    with shift_weights(model, list(model.parameters()) if parameters is None else parameters, steps):
        pass


def _files(folder: Path) -> dict[str, Call]:
    report = saltflat.measure(net(), GOOD, measures=["fisher_trace"], certificate=False, progress=False)
    kinds: dict[str, Any] = {
        "Report": saltflat.Report,
        "Audit": Audit,
        "Landscape": Landscape,
        "Spectrum": Spectrum,
        "Bound": Bound,
        "FeatureRobustness": FeatureRobustness,
    }
    compare: Any = saltflat.compare
    calls: dict[str, Callable[[Any], Any]] = {
        "Report.save({})": lambda value: report.save(_inside(folder, value)),
        "Report.to_html({})": lambda value: report.to_html(_inside(folder, value)),
        "JsonLines({})": lambda value: JsonLines(_inside(folder, value)),
        "TensorBoard({})": lambda value: TensorBoard(_inside(folder, value)).close(),
        "load_weights({})": load_weights,
        "WandB({})": WandB,
        "Table({})": Table,
        "compare with {}": lambda value: compare(report, value),
        "compare(names={})": lambda value: compare(report, report, names=value),
        "compare of {}": compare,
        "compare of a mapping of {}": lambda value: compare({"a": report, "b": value}),
        "report[{}]": lambda value: report[value],
        "report.get({})": report.get,
        "{} in report": lambda value: value in report,
        "report == {}": lambda value: report == value,
        "read({})": read_data,
    }
    for name, kind in kinds.items():
        calls |= {f"{name}.load({{}})": kind.load, f"{name}.from_dict({{}})": kind.from_dict}
    return _with_values(calls)


def _results() -> dict[str, Call]:
    """Methods of what calls give back."""
    report = saltflat.measure(net(), GOOD, measures=["fisher_trace"], certificate=False, progress=False)
    both = saltflat.compare(report, report)
    spectrum = saltflat.compute_spectrum(net(), GOOD, k=1, draws=2, steps=3, progress=False)
    flat = saltflat.compute_landscape(net(), GOOD, points=3, progress=False)
    group = saltflat.find_symmetries(net(), X)
    methods: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
        "Report.plot": (report.plot, ("names",)),
        "Comparison.plot": (both.plot, ("names", "by")),
        "Spectrum.density": (spectrum.density, ("grid", "width")),
        "Spectrum.plot": (spectrum.plot, ("width",)),
        "Landscape.plot": (flat.plot, ("what", "log", "levels")),
        "Symmetries.sample": (group.sample, ("seed", "spread")),
        "Symmetries.fixing": (group.fix_parameters, ("names",)),
    }
    return {
        f"{name}({label})": call
        for name, (method, options) in methods.items()
        for label, call in options_of(method, {}, *options)
    }


def _callbacks() -> dict[str, Call]:
    """What hosts are given."""
    made: dict[str, Call] = {}
    for label, call in options_of(_hugging_face, {}, "sam", "fisher", "penalties", "flatness"):
        made[f"Hugging Face ({label})"] = call
    names = ("probe", "measures", "loss", "every", "model", "cap", "prefix")
    for host in ("lightning", "huggingface_callback"):
        for label, call in options_of(partial(_callback, host), {"probe": GOOD}, *names):
            made[f"FlatnessCallback of {host} ({label})"] = call
    return made


def _hugging_face(**given: Any) -> Any:
    from saltflat.integrations import huggingface_callback as options

    makers: dict[str, Callable[[Any], Any]] = {
        "sam": options.parse_sam_option,
        "fisher": options.parse_fisher_option,
        "penalties": options.parse_penalties,
        "flatness": options.parse_flatness_option,
    }
    ((name, value),) = given.items()
    return makers[name](value)


def _callback(host: str, **given: Any) -> Any:
    return import_module(f"saltflat.integrations.{host}").FlatnessCallback(**given)


def _inside(folder: Path, value: Any) -> Any:
    """Texts as names in a folder that may be written to."""
    return f"{folder}/{value}" if isinstance(value, str) else value


def _studies() -> dict[str, Call]:
    usual: dict[str, Any] = {
        "name": "small",
        "data": {"name": "digits", "train_limit": 50, "test_limit": 20},
        "axes": {"lr": [0.1, 0.2]},
        "seeds": 1,
        "settings": {"depth": 1, "width": 3, "batch_size": 50},
        "stop": {"epochs": 1},
        "measures": ["squared_norm"],
        "measure": {"examples": 10},
    }

    def made_of(**given: Any) -> Any:
        return saltflat.Study(**given).runs()

    names = [*usual, "network", "train", "together"]
    made = {f"Study({label})": call for label, call in options_of(made_of, usual, *names)}
    inner: dict[str, list[Any]] = {
        "data": ["name", "train_limit", "test_limit", "classes", "seed"],
        "axes": ["lr", "width", "network", "batch_size, lr", "momentum", "optimizer", "label_noise"],
        "settings": [
            "batch_size",
            "depth",
            "lr",
            "optimizer",
            "schedule",
            "augment",
            "momentum",
            "dropout",
            "weight_decay",
        ],
        "stop": ["epochs", "loss", "error", "check_every"],
        "measure": ["examples", "dtype", "columns", "memory", "seed", "loss"],
    }
    for part, keys in inner.items():
        for key in keys:
            for label, value in VALUES.items():
                for shown, tried in ((label, value), (f"[{label}]", [value])):
                    given = {**usual, part: {**usual[part], key: tried}}
                    made[f"Study({part}: {key}={shown})"] = partial(made_of, **given)
    made.update(
        _with_values({"Study.from_dict({})": saltflat.Study.from_dict, "Study.from_file({})": saltflat.Study.from_file})
    )
    return made


def tried(call: Call) -> BaseException | None:
    """The error that is not saltflat's, if there is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            str(call())
        except saltflat.SaltflatError as error:
            return None if str(error) else error
        except Exception as error:
            return error
    return None
