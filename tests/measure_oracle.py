"""Every measure by its textbook definition: dense, slow, float64, and sharing no code with the package.

Curvature is the Gauss-Newton matrix of the mean loss unless a measure says *Hessian*. The gradient of an example is
that of its share ``l_n`` in the loss of the data, ``L = (1/N) sum_n l_n``. *Weights* are the trainable parameters of
two and more dimensions.
"""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
from cases import Case, examples_of
from numpy.typing import NDArray
from oracle import frozen_copy, gauss_newton_block, hessian, linearized, loss_at, output_of, outputs_of, trainable
from scipy.linalg import null_space
from scipy.optimize import brentq, linprog, minimize
from scipy.special import logsumexp, softmax
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Array = NDArray[np.float64]
# A function's value, gradient and Hessian at a point.
Expansion = tuple[float, Array, Array]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Oracle:
    """What a measure has to be.

    Attributes:
        value: for the network.
        layers: by name of parameter; empty where a measure has no parts.
        units: by name of parameter; groups one after the other.
        scales: by name of parameter, the factors of a minimising rescaling; empty where the infimum is not attained.
    """

    value: float
    layers: dict[str, float] = field(default_factory=dict)
    units: dict[str, list[float]] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)


def summed(layers: dict[str, float]) -> Oracle:
    return Oracle(sum(layers.values()), layers)


# Normalized sharpness (Tsuzuku et al., 2020).


def normalized_sharpness(case: Case) -> Oracle:
    """NS_col = sum_l min_g sum_j sqrt((F' e^g)_j (U' e^-g)_j): what the bound supports."""
    return summed({name: sum(column_form(F, U) for F, U in matrices(case, name)) for name in weights(case)})


def normalized_sharpness_printed(case: Case, side: Literal["rows", "columns"] = "rows") -> Oracle:
    """NS_whole = sum_l min_g sqrt(e^g' F U' e^-g), as printed; with ``"columns"``, F' U in place of F U'."""

    def printed(F: Array, U: Array) -> float:
        M = F @ U.T if side == "rows" else F.T @ U
        unit = np.eye(len(M))
        pairs = list(product(range(len(M)), repeat=2))
        value, _ = infimum([M[i, k] for i, k in pairs], [unit[i] - unit[k] for i, k in pairs])
        return float(np.sqrt(value))

    return summed({name: sum(printed(F, U) for F, U in matrices(case, name)) for name in weights(case)})


def normalized_sharpness_arxiv(case: Case) -> Oracle:
    """NS_v1 = sum_l min_{s,t} sum_ij F_ij s_i t_j + U_ij / (s_i t_j)."""
    return summed(
        {name: sum(infimum(*row_column_program(F, U))[0] for F, U in matrices(case, name)) for name in weights(case)}
    )


def parameterwise_normalized_sharpness(case: Case) -> Oracle:
    """NS1 = sum_i sqrt(H_ii theta_i^2), over all trainable parameters."""
    return summed(
        {name: float(np.sqrt(diagonal(case, name)) @ np.abs(flat(w))) for name, w in trainable(case.model).items()},
    )


def regularized_normalized_sharpness(case: Case, grid: Sequence[float], strength: float) -> Oracle:
    """NS0 = sum_i min_{s, b in grid} H_ii e^2s + theta_i^2 e^-2s + (s - b)^2 / strength, over all parameters."""

    def best(h: float, square: float, b: float) -> float:
        def slope(s: float) -> float:
            return 2 * h * math.exp(2 * s) - 2 * square * math.exp(-2 * s) + 2 * (s - b) / strength

        # The slope rises with s without end on both sides.
        reach = 1.0
        while slope(b - reach) > 0 or slope(b + reach) < 0:
            reach *= 2
        s: float = brentq(slope, b - reach, b + reach, xtol=1e-14, rtol=1e-14)
        return h * math.exp(2 * s) + square * math.exp(-2 * s) + (s - b) ** 2 / strength

    return summed(
        {
            name: sum(
                min(best(h, square, b) for b in grid)
                for h, square in zip(diagonal(case, name).tolist(), (flat(weight) ** 2).tolist(), strict=True)
            )
            for name, weight in trainable(case.model).items()
        }
    )


def fisher_rao_diagonal(case: Case) -> Oracle:
    """FR = sum_i H_ii theta_i^2, over all trainable parameters."""
    return summed({name: float(diagonal(case, name) @ flat(w) ** 2) for name, w in trainable(case.model).items()})


# Reparameterization-invariant flatness (Petzka et al., 2019) and relative flatness (2021).


def kappa(case: Case) -> Oracle:
    """The sum over layers of |w|^2 lambda_max(H_l)."""
    return summed({name: squared(w) * top(block(case, name)) for name, w in weights(case).items()})


def kappa_max(case: Case) -> Oracle:
    layers = kappa(case).layers
    return Oracle(max(layers.values()), layers)


def kappa_trace(case: Case) -> Oracle:
    """The sum over layers of |w|^2 tr(H_l)."""
    return summed({name: squared(w) * float(np.trace(block(case, name))) for name, w in weights(case).items()})


def kappa_trace_max(case: Case) -> Oracle:
    layers = kappa_trace(case).layers
    return Oracle(max(layers.values()), layers)


def rho(case: Case, axis: Literal["column", "row"] = "column") -> Oracle:
    """The sum over all units of w(j)' H_jj w(j), with w(j) a column or a row of the weight matrix."""
    units = unit_curvatures(case, axis)
    layers = {name: sum(values) for name, values in units.items()}
    return Oracle(sum(layers.values()), layers, units)


def rho_max(case: Case, axis: Literal["column", "row"] = "column") -> Oracle:
    units = unit_curvatures(case, axis)
    layers = {name: max(values) for name, values in units.items()}
    return Oracle(max(layers.values()), layers, units)


def unit_curvatures(case: Case, axis: Literal["column", "row"]) -> dict[str, list[float]]:
    units: dict[str, list[float]] = {}
    for name, weight in weights(case).items():
        w, H = flat(weight), block(case, name)
        owned = positions(case, name).transpose((0, 2, 1, 3) if axis == "column" else (0, 1, 2, 3))
        units[name] = [
            float(w[mine] @ H[np.ix_(mine, mine)] @ w[mine])
            for group in owned
            for mine in group.reshape(len(group), -1)
        ]
    return units


def relative_flatness(case: Case, normalize: bool = True) -> Oracle:
    """The sum over layers of sum_st <w_s, w_t> tr(H_st), with w_s the rows.

    Normalized, each input feature is first divided by its standard deviation over the data and its column multiplied
    by it. A feature that is zero everywhere drops out; one that is constant otherwise stays as it is.
    """
    layers = {}
    for name, weight in weights(case).items():
        w, H, place = flat(weight).copy(), block(case, name).copy(), positions(case, name)
        if normalize:
            for spread, mine in zip(
                spreads(case, name), place.transpose(0, 2, 1, 3).reshape(-1, *place.shape[1::2]), strict=True
            ):
                w[mine] *= spread
                H[mine.ravel()] *= 1 / spread if spread else 0
                H[:, mine.ravel()] *= 1 / spread if spread else 0
        layers[name] = sum(
            float(w[s.ravel()] @ w[t.ravel()] * H[s.ravel(), t.ravel()].sum())
            for rows in place
            for s, t in product(rows, repeat=2)
        )
    return summed(layers)


# Minimum sharpness (Ibayashi et al., 2021).


def minimum_sharpness(case: Case, chain: Sequence[tuple[str, str | None]]) -> Oracle:
    """The least trace of the curvature that multiplying whole layers can reach.

    Args:
        case: with parameters of which only those of the chain count.
        chain: the names of each layer's weight and bias, first layer first.

    Returns:
        ``scales``: each weight's factor; ``layers``: each parameter's share of the minimum.
    """
    last = len(chain) - 1
    # The logarithms of all factors but the last as rows of a matrix; the last factor makes the product one.
    logs = np.vstack([np.eye(last), -np.ones(last)])
    names, exponents = [], []
    for d, (weight, bias) in enumerate(chain):
        names.append(weight)
        exponents.append(-2 * logs[d])
        if bias is not None:
            names.append(bias)
            exponents.append(-2 * logs[: d + 1].sum(0))
    traces = [float(np.trace(block(case, name))) for name in names]
    value, at = infimum(traces, exponents)
    if at is None:
        return Oracle(value)
    shares = {name: trace * float(np.exp(a @ at)) for name, trace, a in zip(names, traces, exponents, strict=True)}
    scales = {weight: float(np.exp(log @ at)) for (weight, _), log in zip(chain, logs, strict=True)}
    return Oracle(value, shares, scales=scales)


def minimum_unit_sharpness(case: Case, chain: Sequence[tuple[str, str | None]]) -> Oracle:
    """The least trace of the curvature that multiplying hidden units can reach.

    Args:
        case: with parameters of which only those of the chain count.
        chain: the names of each layer's weight and bias, first layer first.

    Returns:
        ``layers``: each parameter's share of the minimum; empty where it is only approached.
    """
    places = [positions(case, weight) for weight, _ in chain]
    widths = [place.shape[0] * place.shape[1] for place in places]
    # The logarithms of the units' sizes as rows of a matrix, layer by layer; inputs and outputs of the network have 0.
    hidden = np.split(np.eye(sum(widths[:-1])), np.cumsum(widths[:-1]))[:-1]
    ends = [*hidden, np.zeros((widths[-1], sum(widths[:-1])))]
    exponents: dict[str, Array] = {}
    for d, (weight, bias) in enumerate(chain):
        groups, out, into, kernel = places[d].shape
        before = ends[d - 1] if d else np.zeros((groups * into, sum(widths[:-1])))
        # After a flattened image, a unit is a channel and owns a run of inputs.
        before = before.repeat(groups * into // len(before), axis=0)
        each = ends[d].reshape(groups, out, 1, 1, -1) - before.reshape(groups, 1, into, 1, -1)
        logs = np.empty((places[d].size, each.shape[-1]))
        logs[places[d]] = each.repeat(kernel, axis=3)
        exponents[weight] = -2 * logs
        if bias is not None:
            exponents[bias] = -2 * ends[d]
    coefficients = np.concatenate([diagonal(case, name) for name in exponents])
    value, at = infimum(coefficients.tolist(), list(np.concatenate(list(exponents.values()))))
    if at is None:
        return Oracle(value)
    return Oracle(value, {name: float(diagonal(case, name) @ np.exp(A @ at)) for name, A in exponents.items()})


# Fisher information (Jia and Su, 2020; Liang et al., 2019), over all trainable parameters.


def fisher_logdet(case: Case, subsets: Sequence[Sequence[int]]) -> Oracle:
    """The mean over subsets S of ln det J_S J_S', with the gradients of the examples of S as rows of J_S."""
    J = gradients(case)
    # An example without gradient makes it minus infinity.
    with np.errstate(divide="ignore"):
        return Oracle(float(np.mean([2 * np.log(np.linalg.svd(J[list(S)], compute_uv=False)).sum() for S in subsets])))


def fisher_determinant(case: Case, jitter: float = 0.0) -> Oracle:
    """ln det of the observed Fisher information I = (1/N) sum_n g_n g_n', plus ``jitter`` on its diagonal.

    Minus infinity for more parameters than examples, unless there is jitter.
    """
    J = gradients(case)
    eigenvalues = np.zeros(J.shape[1])
    eigenvalues[: min(J.shape)] = np.linalg.svd(J, compute_uv=False) ** 2 / len(J)
    with np.errstate(divide="ignore"):
        return Oracle(float(np.log(eigenvalues + jitter).sum()))


def fisher_trace(case: Case) -> Oracle:
    """(1/N) sum_n |g_n|^2."""
    return summed({name: float((g**2).sum(1).mean()) for name, g in example_gradients(case).items()})


def fisher_frobenius(case: Case) -> Oracle:
    """(1/N) sum_n |g_n g_n'|_F^2."""
    return Oracle(float(np.mean([(np.outer(g, g) ** 2).sum() for g in gradients(case)])))


def fisher_spectral_radius(case: Case, subsets: Sequence[Sequence[int]]) -> Oracle:
    """The mean over subsets S of the largest eigenvalue of J_S' J_S."""
    J = gradients(case)
    return Oracle(float(np.mean([np.linalg.norm(J[list(S)], 2) ** 2 for S in subsets])))


def fisher_rao_norm(case: Case) -> Oracle:
    """(1/N) sum_n <theta, g_n>^2."""
    return Oracle(float(np.mean((gradients(case) @ point(case)) ** 2)))


def input_robustness(case: Case) -> Oracle:
    """The mean over examples of the squared spectral norm of the input Jacobian of the softmax of the outputs."""
    model, parameters = frozen_copy(case.model)
    norms = []
    for example in examples_of(case.batches):
        assert isinstance(example, tuple)
        inputs, targets = example
        assert isinstance(inputs, Tensor)
        x = inputs.clone().requires_grad_()
        p = output_of(model, parameters, (x, targets)).squeeze(0).softmax(0)
        rows = [torch.autograd.grad(number, x, retain_graph=True)[0].flatten() for number in p]
        norms.append(np.linalg.norm(torch.stack(rows).numpy(), 2) ** 2)
    return Oracle(float(np.mean(norms)))


def path_norm(case: Case) -> Oracle:
    """The sum over paths of a chain: squared Jacobians and biases of its layers, applied to ones."""
    assert isinstance(case.model, nn.Sequential)
    example = examples_of(case.batches)[0]
    assert isinstance(example, tuple)
    assert isinstance(example[0], Tensor)
    sums = torch.ones_like(example[0], dtype=torch.float64)
    for layer in deepcopy(case.model).double():
        if not list(layer.parameters()):
            sums = sums if isinstance(layer, nn.ReLU | nn.LeakyReLU) else layer(sums)
            continue
        zero = torch.zeros_like(sums)
        bias = layer(zero).detach()
        jacobian: Tensor = torch.autograd.functional.jacobian(layer, zero).reshape(bias.numel(), zero.numel())
        sums = (jacobian.square() @ sums.flatten()).reshape(bias.shape) + bias.square()
    return Oracle(float(sums.sum()))


def input_margin(case: Case, quantile: float = 0.5) -> Oracle:
    """A quantile over examples of (own logit - largest other) / the length of the gradient of the difference."""
    model, parameters = frozen_copy(case.model)
    margins = []
    for example in examples_of(case.batches):
        assert isinstance(example, tuple)
        inputs, targets = example
        assert isinstance(inputs, Tensor)

        def run(x: Tensor, labels: Tensor = targets) -> Tensor:
            return output_of(model, parameters, (x, labels)).squeeze(0)

        own, logits = int(targets), run(inputs).detach()
        other = max((k for k in range(len(logits)) if k != own), key=lambda k: float(logits[k]))
        rows: Tensor = torch.autograd.functional.jacobian(run, inputs)
        margins.append(float(logits[own] - logits[other]) / float(torch.linalg.vector_norm(rows[own] - rows[other])))
    below, part = divmod(quantile * (len(margins) - 1), 1)
    ordered = [*sorted(margins), 0.0]
    return Oracle(ordered[int(below)] * (1 - part) + ordered[int(below) + 1] * part)


# The Hessian of the whole network, over all trainable parameters, and norms.


def hessian_trace(case: Case) -> Oracle:
    H, place = network_hessian(case), slices(case)
    return summed({name: float(np.trace(H[own, own])) for name, own in place.items()})


def hessian_top_eigenvalue(case: Case) -> Oracle:
    return Oracle(top(network_hessian(case)))


def squared_norm(case: Case) -> Oracle:
    return summed({name: squared(w) for name, w in weights(case).items()})


def quotient_sharpness(case: Case, curvature: Literal["hessian", "gauss_newton"] = "hessian") -> Oracle:
    """lambda_max(D^1/2 H D^1/2), with D the squared norm of each parameter tensor."""
    H = network_hessian(case) if curvature == "hessian" else network_gauss_newton(case)
    root = np.concatenate([np.full(p.numel(), np.sqrt(squared(p))) for p in trainable(case.model).values()])
    return Oracle(top(root[:, None] * H * root))


def adaptive_sharpness_limit(case: Case, kind: Literal["average", "worst"], radius: float) -> Oracle:
    """How far L rises under perturbations relative to |w|, L being replaced by its expansion to second order.

    Average, over d_i of variance (radius w_i)^2: (radius^2 / 2) sum_i H_ii w_i^2. Worst, over |d / w| <= radius: the
    maximum of <g, d> + d'Hd / 2, which is radius |g w| to first order and (radius^2 / 2) lambda_max(w H w) where g = 0.
    """
    w = point(case)
    H = w[:, None] * network_hessian(case) * w
    if kind == "average":
        return Oracle(radius**2 / 2 * float(np.trace(H)))
    return Oracle(ball_maximum(w * gradients(case).mean(0), H, radius))


def ball_maximum(slope: Array, H: Array, radius: float) -> float:
    """The maximum of <slope, u> + u'Hu / 2 over the ball |u| <= radius."""
    values, vectors = np.linalg.eigh(H)
    g = vectors.T @ slope

    def too_long(multiplier: float) -> float:
        return float(np.linalg.norm(g / (multiplier - values))) - radius

    sharpest = float(values[-1])
    assert sharpest > 0
    # At the maximum, (multiplier - H) u = slope on the sphere, with a multiplier above all of H.
    low, high = sharpest * (1 + 1e-14), (sharpest + float(np.linalg.norm(g)) / radius) * (1 + 1e-12)
    if too_long(low) > 0:
        u = g / (brentq(too_long, low, high, xtol=1e-15 * high, rtol=1e-14) - values)
        return float(g @ u + values @ u**2 / 2)
    # No slope along the sharpest direction: the length that the others leave goes there.
    others = values < sharpest * (1 - 1e-12)
    u = g[others] / (sharpest - values[others])
    return float(g[others] @ u + (values[others] @ u**2 + sharpest * (radius**2 - u @ u)) / 2)


# Parameters as arrays.


def weights(case: Case) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in trainable(case.model).items() if parameter.ndim >= 2}


# Weights of no layer of torch: an einsum multiplies the first axis by the inputs, and only then the second, so that
# pairs of the others are what it feeds.
BY_HAND: dict[tuple[str, str], Callable[[NDArray[np.intp]], NDArray[np.intp]]] = {
    ("leaf_module_of_a_user", "0.core"): lambda index: index.reshape(1, 3, 12, 1).swapaxes(1, 2)
}


def positions(case: Case, name: str) -> NDArray[np.intp]:
    """Where the entries of a weight lie in its flattened block, as ``(groups, out, in, kernel positions)``."""
    shape = tuple(case.model.get_parameter(name).shape)
    index = np.arange(int(np.prod(shape)))
    if (case.name, name) in BY_HAND:
        return BY_HAND[case.name, name](index.reshape(shape))
    owner = owner_of(case.model, name)
    groups = int(getattr(owner, "groups", 1))
    grouped = index.reshape(groups, shape[0] // groups, shape[1], -1)
    return grouped.swapaxes(1, 2) if isinstance(owner, (*TRANSPOSED, nn.Embedding, nn.EmbeddingBag)) else grouped


def owner_of(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def matrices(case: Case, name: str) -> list[tuple[Array, Array]]:
    """Each group's curvature F and squared weights U, ``(out, in)``, summed over kernel positions."""
    F, U = diagonal(case, name), flat(case.model.get_parameter(name)) ** 2
    return [(F[group].sum(2), U[group].sum(2)) for group in positions(case, name)]


def spreads(case: Case, name: str) -> list[float]:
    """What each input feature of a layer is divided by: its standard deviation over examples and positions."""
    model = deepcopy(case.model).double().eval()
    layer = owner_of(model, name)
    if not isinstance(layer, (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)):
        raise TypeError(f"the inputs of {name} are not features")
    # Counted from behind: a convolution may be given a single image without an axis for the batch.
    features_at = -1 if isinstance(layer, nn.Linear) else -1 - len(layer.kernel_size)
    seen: list[Array] = []

    def see(module: nn.Module, args: Any) -> None:
        seen.append(args[0].detach().movedim(features_at, -1).numpy().copy())

    layer.register_forward_pre_hook(see)
    for example in examples_of(case.batches):
        output_of(model, {}, example)
    if not seen:
        raise TypeError(f"the layer of {name} was given no inputs")
    features = np.concatenate([inputs.reshape(-1, inputs.shape[-1]) for inputs in seen])
    return [float(f.std()) if len(f) and f.max() > f.min() else float(f.any()) for f in features.T]


def diagonal(case: Case, name: str) -> Array:
    """Of the curvature, never negative; rounding alone can make it so for convex losses."""
    return np.maximum(np.diag(block(case, name)), 0)


@cache
def block(case: Case, name: str) -> Array:
    return array(gauss_newton_block(case, name))


def example_gradients(case: Case) -> dict[str, Array]:
    """Per parameter ``(N, P)``."""
    parts = linearized(case)
    shares = len(parts.slopes) * parts.slopes
    return {name: array(torch.einsum("nkp,nk->np", jacobian, shares)) for name, jacobian in parts.jacobians.items()}


def gradients(case: Case) -> Array:
    return np.concatenate(list(example_gradients(case).values()), 1)


def network_gauss_newton(case: Case) -> Array:
    parts = linearized(case)
    jacobian = torch.cat(list(parts.jacobians.values()), 2)
    return array((jacobian.mT @ parts.curvatures @ jacobian).sum(0))


@cache
def network_hessian(case: Case) -> Array:
    model, parameters = frozen_copy(case.model)
    names = trainable(case.model)

    def loss(whole: Tensor) -> Tensor:
        values = whole.split([parameters[name].numel() for name in names])
        moved = {name: value.view_as(parameters[name]) for name, value in zip(names, values, strict=True)}
        return loss_at(case, outputs_of(case, model, parameters | moved))

    # The fused attention kernels cannot be differentiated twice.
    with sdpa_kernel(SDPBackend.MATH):
        H = array(hessian(loss, torch.from_numpy(point(case))))
    return (H + H.T) / 2


def slices(case: Case) -> dict[str, slice]:
    ends = np.cumsum([p.numel() for p in trainable(case.model).values()])
    return {
        name: slice(end - p.numel(), end) for end, (name, p) in zip(ends, trainable(case.model).items(), strict=True)
    }


def point(case: Case) -> Array:
    return np.concatenate([flat(p) for p in trainable(case.model).values()])


def array(tensor: Tensor) -> Array:
    numbers: Array = tensor.detach().double().numpy()
    return numbers


def flat(tensor: Tensor) -> Array:
    return array(tensor).ravel()


def squared(tensor: Tensor) -> float:
    return float((flat(tensor) ** 2).sum())


def top(matrix: Array) -> float:
    """The largest eigenvalue, not the largest in size."""
    return float(np.linalg.eigvalsh(matrix)[-1])


# Geometric programs: least values of sums of products of powers.


def row_column_program(F: Array, U: Array) -> tuple[list[float], list[Array]]:
    """The terms F_ij s_i t_j and U_ij / (s_i t_j) in the logarithms of s and t."""
    rows, columns = np.eye(sum(F.shape))[: len(F)], np.eye(sum(F.shape))[len(F) :]
    exponents = [row + column for row in rows for column in columns]
    return [*F.ravel(), *U.ravel()], [*exponents, *(-a for a in exponents)]


def column_form(F: Array, U: Array) -> float:
    """min_g sum_j sqrt((F' e^g)_j (U' e^-g)_j)."""
    coefficients, exponents = row_column_program(F, U)
    kept = lasting(np.array(coefficients), np.array(exponents))
    if not kept.any():
        return 0.0
    kept_F, kept_U = kept.reshape(2, *F.shape)
    # A row or column that lasts has both kinds of entries: F alone and U alone could be scaled away.
    alive = np.ix_(kept_F.any(1), kept_F.any(0))
    still = null_space(np.array(exponents)[kept])[: len(F)][kept_F.any(1)]
    with np.errstate(divide="ignore"):
        log_F, log_U = np.log(np.where(kept_F, F, 0)[alive]), np.log(np.where(kept_U, U, 0)[alive])

    def logarithm(g: Array) -> Expansion:
        up, down = log_F + g[:, None], log_U - g[:, None]
        p, q = softmax(up, 0), softmax(down, 0)
        terms = (logsumexp(up, 0) + logsumexp(down, 0)) / 2
        slopes, r = (p - q) / 2, softmax(terms)
        slope = slopes @ r
        bends = np.diag((p + q) @ r / 2) - (p * r) @ p.T / 2 - (q * r) @ q.T / 2
        return float(logsumexp(terms)), slope, bends + (slopes * r) @ slopes.T - np.outer(slope, slope)

    return float(np.exp(logarithm(minimizer(logarithm, still))[0]))


def infimum(coefficients: Sequence[float], exponents: Sequence[Array]) -> tuple[float, Array | None]:
    """The infimum over z of sum_k c_k exp(<a_k, z>), and where it is attained; None where it is only approached."""
    c, A = np.array(coefficients), np.array(exponents)
    kept = lasting(c, A)
    attained = bool((kept == (c > 0)).all())
    if not kept.any():
        return 0.0, np.zeros(A.shape[1]) if attained else None
    c, A = c[kept], A[kept]

    def logarithm(z: Array) -> Expansion:
        terms = np.log(c) + A @ z
        p = softmax(terms)
        slope = p @ A
        return float(logsumexp(terms)), slope, (A.T * p) @ A - np.outer(slope, slope)

    at = minimizer(logarithm, null_space(A))
    return float(np.exp(logarithm(at)[0])), at if attained else None


def lasting(c: Array, A: Array) -> NDArray[np.bool_]:
    """Which terms c_k exp(<a_k, z>) of a sum cannot be made to vanish at no cost to the others.

    A term vanishes along a direction d with <a_k, d> < 0 if no other term grows along d. Sums and multiples of such
    directions are such directions, so one of them, found by a linear program, has <a_k, d> <= -1 for every term that
    can vanish.
    """
    present = c > 0
    terms, size = A[present].shape
    if not terms:
        return present
    drops = linprog(
        np.r_[np.zeros(size), -np.ones(terms)],
        A_ub=np.hstack([A[present], np.eye(terms)]),
        b_ub=np.zeros(terms),
        bounds=[(None, None)] * size + [(0, 1)] * terms,
    )
    assert drops.x is not None, drops.message
    kept = present.copy()
    kept[present] = drops.x[size:] < 0.5
    return kept


def minimizer(function: Callable[[Array], Expansion], still: Array) -> Array:
    """Where a convex function is least.

    Args:
        function: attains its minimum, at one point but for the directions of ``still``.
        still: columns span the directions along which the function is constant; the point returned has no part in them.
    """

    def pinned(z: Array) -> Expansion:
        value, slope, bend = function(z)
        along = still.T @ z
        return value + float(along @ along) / 2, slope + still @ along, bend + still @ still.T

    def value_of(z: Array) -> float:
        return pinned(z)[0]

    def slope_of(z: Array) -> Array:
        return pinned(z)[1]

    z: Array = minimize(value_of, np.zeros(len(still)), jac=slope_of, method="L-BFGS-B").x
    for _ in range(100):
        value, slope, bend = pinned(z)
        step = -np.linalg.solve(bend, slope)
        gain = float(-slope @ step)
        # Half of this is how much lower the minimum lies, up to higher orders. Less than rounding cannot be gained.
        if abs(gain) < 1e-15 * max(1.0, abs(value)):
            return z + step
        length = 1.0
        while pinned(z + length * step)[0] > value - 0.25 * length * gain + 1e-15 * abs(value) and length > 1e-9:
            length /= 2
        z = z + length * step
    raise ArithmeticError(f"no minimum found: still {gain} to gain")
