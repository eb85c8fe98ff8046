"""Random problems, measured by the package and by the dense oracle.

:func:`problems` draws a model, a loss, a form of the data and options; :func:`check` compares every statistic and some
measures with the oracle, and makes sure that the model comes back bit for bit. The ingredients are the tables of
``fuzz_blocks`` and ``fuzz_data``.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import measure_oracle as measures
import numpy as np
import oracle
import torch
from cases import Batch, Case, Inputs, Net
from fuzz_blocks import BLOCKS, TABLES, Draw, Shape, size_of
from fuzz_data import CLASSES, FORMS, LOSSES, Form, Loss
from hypothesis import strategies as st
from torch import Tensor, nn

import saltflat
from saltflat.errors import SaltflatError

# Ingredients that the package may refuse, and why.
REFUSED = {
    "input_overwritten_after_its_layer": "layers' inputs have to stay",
    "table_with_sparse_gradients": "sparse gradients",
    "table_scaled_by_frequency": "its gradient depends on the batch",
    "gradient_in_the_forward_pass": "derivatives inside of a forward pass",
    "mapped_in_the_forward_pass": "derivatives inside of a forward pass",
    "caches": "what a forward pass writes to plain attributes",
    "parameter_in_a_plain_list": "parameters that no module owns by name",
    "module_in_a_plain_list": "parameters that no module owns by name",
    "in_single_precision": "numbers too coarse for curvature",
}
# Ingredients for which it is a matter of choice what the inputs of a layer are.
ODD = {
    "called_with_other_weights",
    "decoder_is_the_encoder_transposed",
    "hooked",
    "layer_and_its_weight",
    "layer_on_a_parameter",
    "layer_whose_weight_is_a_buffer",
    "mapped_in_the_forward_pass",
    "module_in_a_plain_list",
    "module_under_two_names",
    "parameter_in_a_plain_list",
    "parameter_that_is_a_buffer_too",
    "patched_forward",
    "shortcut_if_all_agree",
    "subclass_of_a_layer",
    "tied_layers",
    "weight_swapped_in_the_forward_pass",
}
SQUARES = ("curvature_diagonal", "curvature_trace", "gradient_second_moment", "gradient_norms")
SWEPT = (*SQUARES, "gradient_along_weights", "unit_forms", "unit_trace")
MEASURES = (
    "fisher_trace",
    "fisher_frobenius",
    "fisher_rao_norm",
    "fisher_rao_diagonal",
    "hessian_trace",
    "kappa_trace",
    "parameterwise_normalized_sharpness",
)


# Everything a problem can be made of.
INGREDIENTS = list(dict.fromkeys([*(name for table in BLOCKS.values() for name in table), *TABLES, *LOSSES, *FORMS]))
# Measures that solve something: slower, and compared where the oracle can solve it too.
SOLVED = ("normalized_sharpness", "kappa", "rho")


class WrongError(AssertionError):
    """The package gave a wrong number, changed the model, or raised something of torch's."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind


@dataclass(eq=False)
class Drawn:
    """A random problem: what the user passes, and what it was made of."""

    model: nn.Module
    form: Form
    loss: Loss
    options: dict[str, Any]
    used: list[str]
    honest: bool
    tolerance: float
    more: bool
    tally: Counter[str] = field(default_factory=Counter)

    def __repr__(self) -> str:
        return f"{', '.join(self.used) or 'nothing special'}; {self.options}; loss {self.loss.given}\n{self.model!r}"


@st.composite
def problems(draw_from: Callable[[Any], Any], around: str | None = None) -> Drawn:
    """A random problem, the plainest first, with the ingredient ``around`` in it."""
    draw = Draw(draw_from, around)
    seed = draw.integer(0, 99)
    own = draw.named({"own precision": torch.float64, "measured in float64": torch.float32})
    default = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # From the start: a cast would part a buffer from the parameter that it also is.
        torch.set_default_dtype(own)
        try:
            return _problem(draw, {} if own == torch.float64 else {"dtype": torch.float64})
        finally:
            torch.set_default_dtype(default)


def _problem(draw: Draw, options: dict[str, Any]) -> Drawn:
    make_loss = draw.named(LOSSES)
    classes = CLASSES.get(make_loss.__name__, 0)
    count = draw.integer(2, 3 if classes else 8)
    inputs, entry, shape = _entry(draw, count)
    body: list[nn.Module] = []
    for _ in range(draw.integer(1, 1 if classes else 3)):
        module, shape = draw.block(shape)
        body.append(module)
    outputs: Shape = (classes or draw.integer(2, 3),)
    if len(shape) == 2 and not classes and draw.flag():
        outputs = (shape[0], *outputs)
        body.append(nn.Linear(shape[-1], outputs[-1]))
    elif classes or draw.flag():
        body += [nn.Flatten(), _frozen(nn.Linear(size_of(shape), outputs[0], bias=False))]
    else:
        body += [nn.Flatten(), nn.Linear(size_of(shape), outputs[0])]
    loss = make_loss(draw, count, outputs)
    if loss.logs:
        body.append(nn.LogSoftmax(-1))
    model = Net(draw.named(ENDS), entry=entry, body=nn.Sequential(*body))
    with torch.no_grad():
        for parameter in model.parameters():  # zero biases and unit gains hide mistakes
            parameter.add_(0.2 * torch.randn_like(parameter))
    if draw.named({"roomy": False, "little memory": True}):
        options["memory"] = draw.one_of(["1B", "20kB", "200kB"])
    form = draw.named(FORMS)(draw, inputs, loss.targets)
    model.train(draw.flag())
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    some = draw.named({"all layers": False, "some layers": True})
    if trained and some:
        every = [*dict(model.named_parameters()), *(n for n, m in model.named_modules() if n and [*m.parameters()])]
        options["layers"] = sorted({draw.one_of(every) for _ in range(draw.integer(1, 2))})
    if not model.training and draw.flag():
        options["mode"] = "keep"
    return Drawn(model, form, loss, options, draw.used, draw.honest, draw.tolerance, draw.flag())


def _frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def _entry(draw: Draw, count: int) -> tuple[Inputs, nn.Module, Shape]:
    """Inputs, the module they come in through, and the shape of an example behind it."""

    def reals(*shape: int) -> Tensor:
        return torch.randn(count, *shape)

    kinds = [kind for kind, table in BLOCKS.items() if draw.around in table]
    kind = "tokens" if draw.around in TABLES else draw.one_of(kinds or [*BLOCKS, "tokens"])
    if kind == "tokens":
        tokens = torch.randint(5, (count, draw.integer(1, 3)))
        module = draw.named(TABLES)(draw, tokens.shape[1])
        with torch.no_grad():
            return tokens, module, tuple(module(tokens).shape[1:])
    shapes: dict[str, list[Shape]] = {
        "vector": [(3,), (1,)],
        "sequence": [(2, 3), (3, 2), (1, 3)],
        "image": [(2, 3, 3), (3, 1, 4), (1, 2, 1)],
    }
    shape = draw.one_of(shapes[kind])
    if draw.named({"one input": False, "two inputs": True}):
        both = (reals(*shape), reals(*shape))
        if draw.flag():
            return both, Net(lambda net, a, b: a * b.tanh()), shape
        return {"left": both[0], "right": both[1]}, Net(lambda net, left, right: left * right.tanh()), shape
    return reals(*shape), nn.Identity(), shape


def _plainly(net: Any, *args: Any, **kwargs: Any) -> Any:
    return net.body(net.entry(*args, **kwargs))


ENDS: dict[str, Callable[..., Any]] = {
    "plainly": _plainly,
    "output object": lambda net, *args, **kwargs: SimpleNamespace(logits=_plainly(net, *args, **kwargs)),
    "output dict": lambda net, *args, **kwargs: {"logits": _plainly(net, *args, **kwargs)},
}


# The oracle's side.


def oracle_case(drawn: Drawn) -> Case | None:
    """The problem as the oracle takes it; None where torch itself has no answer to compare with."""
    model = deepcopy(drawn.model).eval()
    if "layers" in drawn.options:
        chosen = drawn.options["layers"]
        every = dict(model.named_parameters(remove_duplicate=False))
        wanted = {id(p) for name, p in every.items() if any(name == c or name.startswith(f"{c}.") for c in chosen)}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in wanted)
    if not oracle.trainable(model):
        return None
    case = Case(model, _yielded(drawn), drawn.loss.given, drawn.loss.whole)
    try:
        with _without_warnings():
            parts = oracle.linearized(case)
    except Exception:
        return None
    if not parts.loss.isfinite() or max(float(j.abs().max()) for j in parts.jacobians.values() if j.numel()) > 1e6:
        return None
    if drawn.honest and not _differences_agree(case):
        # Torch's own backward is wrong for a batch of one, or there is a kink: two of each example tell which.
        case = replace(case, copies=2)
        return case if _differences_agree(case) else None
    return case


def _yielded(drawn: Drawn) -> list[Batch]:
    """What the data gives, as batches of the oracle, in float64."""
    data = drawn.form.data
    items = [data] if isinstance(data, tuple) and isinstance(data[1], Tensor) else None
    if items is None:
        if isinstance(data, torch.utils.data.Dataset):
            data = torch.utils.data.DataLoader(data, 128)
        with _kept_randomness():
            items = _same_order(data)
    return [_plain(item) for item in items]


def _same_order(data: Any) -> list[Any]:
    states = [(each, each.get_state()) for each in _generators(data)]
    items = list(data)
    for each, state in states:
        each.set_state(state)
    return items


def _plain(item: Any) -> Any:
    def one(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: one(value) for key, value in x.items()}
        if isinstance(x, tuple | list):
            return tuple(map(one, x))
        x = x.detach().clone()
        return x.double() if x.is_floating_point() else x

    return one(item) if isinstance(item, dict) else (one(item[0]), one(item[1]))


def _differences_agree(case: Case) -> bool:
    """Whether the Jacobians fit central differences along a random direction."""
    parts = oracle.linearized(case)
    model = deepcopy(case.model).double().eval()
    noise = torch.Generator().manual_seed(0)
    names = oracle.trainable(case.model)
    direction = {name: torch.randn(p.shape, generator=noise, dtype=torch.float64) for name, p in names.items()}
    found = sum(parts.jacobians[name] @ v.flatten() for name, v in direction.items())
    assert isinstance(found, Tensor)

    def at(step: float) -> Tensor:
        moved = deepcopy(model)
        with torch.no_grad():
            for name, v in direction.items():
                moved.get_parameter(name).add_(v, alpha=step)
        with _without_warnings():
            return oracle.outputs_of(case, moved, {}).detach().reshape(found.shape)

    step = 1e-5
    difference = (at(step) - at(-step)) / (2 * step)
    return bool((found - difference).abs().max() <= 1e-5 * max(1.0, float(difference.abs().max())))


@contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _kept_randomness() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


# The comparison.


def check(drawn: Drawn) -> str:
    """Compare; how it ended: ``"agrees"``, ``"refused"`` or ``"no oracle"``."""
    with _kept_randomness(), _without_warnings():
        case = oracle_case(drawn)
        if case is None:
            return "no oracle"
        before = snapshot(drawn)
        try:
            found = saltflat.compute_statistics(
                drawn.model, drawn.form.data, names=list(SWEPT), loss=drawn.loss.given, progress=False, **drawn.options
            )
            report = saltflat.measure(
                drawn.model,
                drawn.form.data,
                drawn.loss.given,
                [*MEASURES, *(SOLVED if drawn.more else ())],
                progress=False,
                certificate=False,
                **drawn.options,
            )
        except SaltflatError as error:
            if not may_be_refused(drawn):
                raise WrongError(f"refused ({type(error).__name__})", str(error)) from error
            compare_state(before, snapshot(drawn))
            return "refused"
        except Exception as error:
            raise WrongError(f"raised ({type(error).__name__})", str(error).splitlines()[0]) from error
        compare_state(before, snapshot(drawn))
        compare_statistics(drawn, case, found)
        compare_measures(drawn, case, report)
        return "agrees"


def may_be_refused(drawn: Drawn) -> bool:
    return drawn.loss.refused or drawn.form.refused or any(name in REFUSED for name in drawn.used)


def compare_statistics(drawn: Drawn, case: Case, found: saltflat.statistics.compute.Statistics) -> None:
    gradients = {name: torch.from_numpy(g) for name, g in measures.example_gradients(case).items()}
    noise = rounding(case)
    values = {name: p.detach().double() for name, p in oracle.trainable(case.model).items()}
    wanted: dict[str, dict[str, Tensor]] = {
        "curvature_diagonal": oracle.curvature_diagonal(case),
        "curvature_trace": oracle.curvature_trace(case),
        "gradient_second_moment": oracle.gradient_second_moment(case),
        "gradient_norms": {name: g.square().sum(1) for name, g in gradients.items()},
        "gradient_along_weights": {name: g @ values[name].flatten() for name, g in gradients.items()},
    }
    _same("loss", {"": number(found.loss)}, {"": oracle.loss(case)}, drawn.tolerance)
    if found.examples != len(next(iter(gradients.values()))):
        raise WrongError("wrong number of examples", f"{found.examples}")
    for name, want in wanted.items():
        got = found[name]
        if not drawn.form.ordered and name in ("gradient_norms", "gradient_along_weights"):
            got, want = _in_any_order(got), _in_any_order(want)
        _same(name, got, want, drawn.tolerance, noise[1 if name == "gradient_along_weights" else 2])
    for name in plain_weights(drawn, case):
        units = measures.unit_curvatures(case, "column")[name]
        _same("unit_forms", {name: found["unit_forms"][name]}, {name: number(units)}, drawn.tolerance, 100 * noise[2])
        trace = found["unit_trace"][name]
        wants = [unit_trace(case, name, normalize).reshape(trace.shape) for normalize in (True, False)]
        # Divided by deviations that are rounding, they are anything.
        if not any(_close(trace, each, 1e-6, noise[2]) or each.abs().max() > 1e9 for each in wants):
            raise WrongError("wrong unit_trace", f"{name}: got {trace.flatten()[:4]}, want {wants[0].flatten()[:4]}")


def compare_measures(drawn: Drawn, case: Case, report: saltflat.Report) -> None:
    traces = {name: float(value) for name, value in oracle.curvature_trace(case).items()}
    noise = rounding(case)[2]
    convex = all(float(value.min()) >= 0 for value in oracle.curvature_diagonal(case).values() if value.numel())
    for name in MEASURES:
        got = report[name].value
        if name == "kappa_trace" and not measures.weights(case):
            continue
        if not convex and name in ("parameterwise_normalized_sharpness", "fisher_rao_diagonal"):
            continue
        want = sum(traces.values()) if name == "hessian_trace" else getattr(measures, name)(case).value
        _same(name, {"": number(got)}, {"": number(want)}, 100 * drawn.tolerance, 1e6 * noise)
    if drawn.more and convex and 0 < sum(p.numel() for p in measures.weights(case).values()) <= 60:
        names = plain_weights(drawn, case)
        largest = measures.kappa(case).layers
        for name in names:
            pairs = measures.matrices(case, name)
            try:
                sharp = sum(measures.column_form(F, U) for F, U in pairs)
            except (ArithmeticError, np.linalg.LinAlgError):  # too flat for the oracle's own descent
                continue
            wants = {
                "normalized_sharpness": sharp,
                "kappa": largest[name],
                "rho": sum(measures.unit_curvatures(case, "column")[name]),
            }
            for measure, value in wants.items():
                layer = number(report[measure].layers[name])
                _same(measure, {name: layer}, {name: number(value)}, max(1e-5, 100 * drawn.tolerance), 1e6 * noise)


def plain_weights(drawn: Drawn, case: Case) -> list[str]:
    """Weights whose units are beyond dispute: those of layers that are called as they are, and only so."""
    if ODD & set(drawn.used):
        return []
    kinds = (nn.Linear, *measures.CONVOLUTIONS, *measures.TRANSPOSED)
    return [name for name in measures.weights(case) if type(measures.owner_of(case.model, name)) in kinds]


def unit_trace(case: Case, name: str, normalize: bool) -> Tensor:
    """sum_k H[(s, k), (t, k)] between output units, of inputs divided by their deviations if ``normalize``."""
    H, place = measures.block(case, name), measures.positions(case, name)
    groups, outs, ins, kernel = place.shape
    factors = np.ones(groups * ins)
    if normalize:
        try:
            spreads = np.array(measures.spreads(case, name))
        except TypeError:
            return torch.zeros((groups, outs, outs)).double()
        factors = np.divide(1, spreads, out=np.zeros_like(spreads), where=spreads > 0)
    result = np.zeros((groups, outs, outs))
    for g in range(groups):
        weight = np.repeat(factors[g * ins : (g + 1) * ins] ** 2, kernel)
        rows = place[g].reshape(outs, -1)
        for s in range(outs):
            for t in range(outs):
                result[g, s, t] = H[rows[s], rows[t]] @ weight
    return torch.from_numpy(result)


def number(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _in_any_order(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Numbers of examples, sorted by their sum over the parameters."""
    order = sum(value.double() for value in values.values()).argsort()  # type: ignore[union-attr]
    return {name: value[order] for name, value in values.items()}


def rounding(case: Case) -> dict[int, float]:
    """How far from zero what ought to be zero may be, for statistics linear and quadratic in the gradients."""
    parts = oracle.linearized(case)
    steepest = max(0.01, *(float(jacobian.abs().max()) for jacobian in parts.jacobians.values() if jacobian.numel()))
    longest = max(1.0, *(float(p.abs().max()) for p in oracle.trainable(case.model).values() if p.numel()))
    slope, bend = float(parts.slopes.abs().max()), float(parts.curvatures.abs().max())
    count = len(parts.slopes)
    return {
        1: 1e-10 * count * steepest * longest * max(slope, 1e-3),
        2: 1e-14 * count**2 * steepest**2 * max(slope**2, bend, 1e-3),
    }


def _same(
    what: str, got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float, noise: float = 0.0
) -> None:
    if got.keys() != want.keys():
        raise WrongError(f"wrong names of {what}", f"got {list(got)}, want {list(want)}")
    for name, value in want.items():
        if got[name].shape != value.shape:
            raise WrongError(f"wrong shape of {what}", f"{name}: got {got[name].shape}, want {value.shape}")
        if not _close(got[name], value, tolerance, noise):
            raise WrongError(f"wrong {what}", f"{name}: got {got[name].flatten()[:4]}, want {value.flatten()[:4]}")


def _close(got: Tensor, want: Tensor, tolerance: float, noise: float = 0.0) -> bool:
    return not want.numel() or bool((got - want).abs().max() <= tolerance * float(want.abs().max()) + noise)


# What must come back as it was.


def snapshot(drawn: Drawn) -> list[tuple[str, Any]]:
    """Everything of the user's that a call could change, by name."""
    states: list[tuple[str, Any]] = []
    roots: dict[str, Any] = {"model": drawn.model}
    if isinstance(drawn.loss.given, nn.Module):
        roots["loss"] = drawn.loss.given
    for root, top in roots.items():
        for name, module in top.named_modules():
            for key, value in vars(module).items():
                if root == "loss" and not isinstance(value, dict):
                    continue
                states += _flat(f"{root}.{name}.{key}", value)
    states += _flat("data", drawn.form.data)
    generators = [torch.default_generator, *_generators(drawn.form.data)]
    states += [(f"generator {n}", g.get_state().numpy().tobytes()) for n, g in enumerate(generators)]
    states += [("random", random.getstate()), ("numpy", repr(np.random.get_state()))]
    states += [("grad mode", torch.is_grad_enabled()), ("default dtype", torch.get_default_dtype())]
    return states


def _generators(data: Any) -> list[torch.Generator]:
    holders = [data, getattr(data, "sampler", None), getattr(getattr(data, "batch_sampler", None), "sampler", None)]
    return [g for h in holders if isinstance(g := getattr(h, "generator", None), torch.Generator)]


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Tensor):
        kept = value.detach().clone().contiguous().view(-1).view(torch.uint8) if value.numel() else value
        grad = _flat(f"{name}.grad", value.grad) if value.is_leaf and value.grad is not None else []
        kind = (
            id(value),
            value.dtype,
            value.stride(),
            value.requires_grad,
            value.is_leaf,
            kept.numpy().tobytes() if value.numel() else b"",
        )
        return [(name, kind), *grad]
    if isinstance(value, dict):
        return [(name, [str(k) for k in value]), *(each for k, v in value.items() for each in _flat(f"{name}.{k}", v))]
    if isinstance(value, list | tuple):
        return [(name, len(value)), *(each for n, v in enumerate(value) for each in _flat(f"{name}.{n}", v))]
    if isinstance(value, bool | int | float | str | type(None)):
        return [(name, value)]
    return [(name, id(value))]


def compare_state(before: list[tuple[str, Any]], after: list[tuple[str, Any]]) -> None:
    if before == after:
        return
    old, new = dict(before), dict(after)
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    raise WrongError("changed what it was given", ", ".join(changed[:4]))


def forget() -> None:
    """Let go of what the oracles keep of a problem."""
    oracle.linearized.cache_clear()
    measures.block.cache_clear()
    measures.network_hessian.cache_clear()
