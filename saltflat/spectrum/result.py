"""The spectrum of a network's curvature, with everything needed to read, plot and repeat it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import t

from saltflat._late import load_later
from saltflat.engine.noise import compute_mean_and_error
from saltflat.errors import OptionError, make_unknown_name_error
from saltflat.results.display import Displayable
from saltflat.results.files import SPECTRUM, JsonFile
from saltflat.results.json_codec import MAPPING, check_structure, to_plain_types
from saltflat.results.text import make_printable
from saltflat.validation import check_positive

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Array = NDArray[np.float64]

WIDTH = 0.02  # of the Gaussian that smooths a density, relative to the width of the spectrum
POINTS = 1000  # of a grid
REACH = 4  # widths beyond the outermost eigenvalues


@dataclass(frozen=True)
class Eigenvalue:
    """An eigenvalue found by a search.

    Attributes:
        value: the eigenvalue.
        residual: the norm of A v - value v for the computed unit eigenvector v: an eigenvalue lies within it.
        bound: the largest possible error of ``value``: the residual, or its square over the distance to the nearest
            other eigenvalue found, whichever is smaller.
        converged: whether the bound is within the tolerance.
    """

    value: float
    residual: float
    bound: float
    converged: bool


@dataclass(frozen=True)
class Density:
    """A smoothed spectral density on a grid: its integral over a range is the fraction of eigenvalues there.

    Attributes:
        grid: the points.
        value: the density at these points.
        low: the lower end of the 95 % interval at each point.
        high: the upper end. The interval covers the random probes, by Student's t; it covers neither the finite number
            of steps nor the choice of the data.
        width: the standard deviation of the smoothing Gaussian.
    """

    grid: Array
    value: Array
    low: Array
    high: Array
    width: float


@dataclass(frozen=True)
class Block:
    """The spectrum of one symmetric matrix.

    Attributes:
        name: the name of the parameter, or ``"network"``.
        parameters: the number of eigenvalues.
        largest: the largest eigenvalues, in descending order.
        smallest: the smallest eigenvalues, in ascending order.
        complete: whether a second search confirmed that none was missed.
        exact: the eigenvalues that enter the density as they are; random probes represent the others.
        nodes: the nodes of each probe's quadrature.
        weights: the weights of each probe's quadrature, which sum to one.
    """

    name: str
    parameters: int
    largest: tuple[Eigenvalue, ...]
    smallest: tuple[Eigenvalue, ...]
    complete: bool
    exact: tuple[float, ...]
    nodes: tuple[tuple[float, ...], ...]
    weights: tuple[tuple[float, ...], ...]

    @property
    def pairs(self) -> tuple[Eigenvalue, ...]:
        """The computed eigenvalues with their errors, in descending order."""
        return (*self.largest, *reversed(self.smallest))

    @property
    def eigenvalues(self) -> Array:
        """The computed eigenvalues, in descending order."""
        return np.array([pair.value for pair in self.pairs])

    @property
    def has_density(self) -> bool:
        """Whether the density of all eigenvalues was estimated."""
        return bool(self.nodes) or len(self.exact) == self.parameters

    @property
    def trace(self) -> float:
        """The sum of all eigenvalues: an unbiased estimate, exact if all were computed, nan without a density."""
        return self._estimate_trace()[0]

    @property
    def trace_stderr(self) -> float:
        """The standard error of the trace over the probes: trace +- 1.96 stderr is a 95 % interval."""
        return self._estimate_trace()[1]

    def _estimate_trace(self) -> tuple[float, float]:
        if not self.has_density:
            return float("nan"), float("nan")
        rest = self.parameters - len(self.exact)
        sums = [rest * float(np.dot(n, w)) for n, w in zip(self.nodes, self.weights, strict=True)]
        mean, error = compute_mean_and_error(sums) if sums else (0.0, 0.0)
        return float(np.sum(self.exact)) + mean, error

    def density(self, grid: ArrayLike | None = None, width: float | None = None) -> Density:
        """Return the density of all eigenvalues, smoothed by a Gaussian.

        Args:
            grid: the points; 1000 points over the whole spectrum if None.
            width: the standard deviation of the Gaussian; 1/50 of the width of the spectrum if None.
        """
        if not self.has_density:
            raise OptionError(
                "Expected a spectrum with a density, but got one computed with density=False. Try density=True."
            )
        low, high = self.ends
        if width is None:
            # If all eigenvalues are equal, any width will do.
            width = WIDTH * (high - low) or WIDTH * abs(high) or WIDTH
        check_positive(width=width)
        if grid is None:
            grid = np.linspace(low - REACH * width, high + REACH * width, POINTS)
        at = _check_grid(grid)
        exact = _sum_gaussians(at, self.exact, np.ones(len(self.exact)), width) / self.parameters
        share = 1 - len(self.exact) / self.parameters
        each = [share * _sum_gaussians(at, n, w, width) for n, w in zip(self.nodes, self.weights, strict=True)]
        if not each:
            return Density(at, exact, exact, exact, float(width))
        mean, count = np.mean(each, 0), len(each)
        error = t.ppf(0.975, count - 1) * np.std(each, 0, ddof=1) / count**0.5
        return Density(at, exact + mean, exact + np.maximum(mean - error, 0), exact + mean + error, float(width))

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest eigenvalue or node."""
        seen = [*(pair.value for pair in self.pairs), *(node for each in self.nodes for node in each)]
        return min(seen), max(seen)


@dataclass(frozen=True, eq=False, repr=False)
class Spectrum(Displayable, JsonFile, Mapping[str, Block]):
    """The spectrum of the curvature of the mean loss, of the whole network or of each layer.

    It is a mapping from names of blocks to :class:`Block`. If there is only one block, such as that of the whole
    network, ``eigenvalues``, ``largest``, ``smallest``, ``density``, ``trace`` and ``trace_stderr`` are those of the
    block.

    Attributes:
        blocks: by name: ``"network"``, or the names of parameters.
        model: class name and number of parameters.
        examples: the number of examples.
        loss: the mean loss.
        settings: the options it was computed with.
        versions: of saltflat, torch, numpy and python.
        seconds: the time it took.
        notes: remarks for the reader.
        created: the time in UTC, in ISO format.
    """

    renderer = ("spectrum", "SpectrumRenderable", "format_spectrum_html")
    file_format = SPECTRUM

    blocks: Mapping[str, Block]
    model: str
    examples: int
    loss: float
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    seconds: float
    notes: tuple[str, ...]
    created: str

    def __post_init__(self) -> None:
        self._convert_fields(blocks=dict(self.blocks))

    def __getitem__(self, name: str) -> Block:
        if name not in self.blocks:
            raise make_unknown_name_error("block", name, self.blocks)
        return self.blocks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def only_block(self) -> Block:
        """The only block; raises an error if there are several."""
        if len(self.blocks) != 1:
            some = next(iter(self.blocks))
            raise OptionError(
                f"Expected a spectrum of one block, but got one of {len(self.blocks)} layers. Try spectrum[{some!r}]."
            )
        return next(iter(self.blocks.values()))

    @property
    def eigenvalues(self) -> Array:
        """The computed eigenvalues, in descending order."""
        return self.only_block.eigenvalues

    @property
    def largest(self) -> tuple[Eigenvalue, ...]:
        """The largest eigenvalues with their errors, in descending order."""
        return self.only_block.largest

    @property
    def smallest(self) -> tuple[Eigenvalue, ...]:
        """The smallest eigenvalues with their errors, in ascending order."""
        return self.only_block.smallest

    @property
    def complete(self) -> bool:
        """Whether a second search confirmed for every block that no eigenvalue was missed."""
        return all(block.complete for block in self.blocks.values())

    @property
    def trace(self) -> float:
        """The sum of all eigenvalues, estimated from the probes."""
        return self.only_block.trace

    @property
    def trace_stderr(self) -> float:
        """The standard error of the trace over the probes."""
        return self.only_block.trace_stderr

    def density(self, grid: ArrayLike | None = None, width: float | None = None) -> Density:
        """Return the smoothed density of all eigenvalues; see :meth:`Block.density`."""
        return self.only_block.density(grid, width)

    def __repr__(self) -> str:
        what = "the network" if self.settings.get("per") == "network" else f"{len(self)} layers"
        return f"<Spectrum of {what}, {make_printable(self.model)}; print() describes it, .plot() draws it>"

    def plot(self, width: float | None = None) -> Figure:
        """Return a ``matplotlib`` Figure: the density on a logarithmic scale with its interval, eigenvalues as marks.

        Args:
            width: the standard deviation of the Gaussian that smooths the density.
        """
        figure: Figure = load_later("render.spectrum").plot_spectrum(self, width)
        return figure

    def _encode_parts(self) -> dict[str, Any]:
        return {"blocks": [to_plain_types(asdict(block), "a block") for block in self.values()]}

    @classmethod
    def _decode_parts(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {"blocks": {block.name: block for block in map(_decode_block, given.pop("blocks"))}}

    def _check_content(self) -> None:
        check_structure(self.settings, MAPPING, "the settings")
        if not self.blocks:
            raise TypeError("there are no blocks")
        for block in self.values():
            _check_block(block)


def _decode_block(given: Mapping[str, Any]) -> Block:
    ends = {key: tuple(Eigenvalue(**each) for each in given[key]) for key in ("largest", "smallest")}
    lists = {key: tuple(map(tuple, given[key])) for key in ("nodes", "weights")}
    return Block(**{**given, **ends, **lists, "exact": tuple(given["exact"])})


def _check_block(block: Block) -> None:
    """Raise an error if something is wrong with a block that was read from a file."""
    check_structure(block.name, str, "the name of a block")
    check_structure(block.parameters, int, "the number of parameters of a block")
    check_structure(block.complete, bool, "whether a block is complete")
    check_structure([pair.converged for pair in block.pairs], [bool], "whether eigenvalues have converged")
    if not 0 < block.parameters < 2**63:
        raise ValueError(f"a block has {block.parameters} parameters")
    numbers = [*block.exact, *(value for pair in block.pairs for value in (pair.value, pair.residual, pair.bound))]
    numbers += [value for part in (*block.nodes, *block.weights) for value in part]
    if not block.largest or not all(type(value) is float and isfinite(value) for value in numbers):
        raise ValueError("a block has no eigenvalues, or one that is no finite number")
    if len(block.exact) > block.parameters or len(block.pairs) > block.parameters:
        raise ValueError("a block has more eigenvalues than parameters")
    if [*map(len, block.nodes)] != [*map(len, block.weights)] or len(block.nodes) == 1:
        raise ValueError("the quadratures have other numbers of nodes than of weights, or there is one only")
    if any(abs(sum(part) - 1) > 1e-6 for part in block.weights):
        raise ValueError("the weights of a quadrature do not sum to one")


def _check_grid(given: ArrayLike) -> Array:
    try:
        grid = np.array(given, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        grid = np.empty(0)
    if grid.ndim != 1 or not len(grid) or not np.isfinite(grid).all():
        raise OptionError(
            "Expected a one-dimensional grid of finite numbers, but got something else. Try "
            "grid=numpy.linspace(-1, 10, 500)."
        )
    return grid


def _sum_gaussians(grid: Array, centers: ArrayLike, weights: ArrayLike, width: float) -> Array:
    apart = (grid[:, None] - np.asarray(centers, dtype=np.float64)) / width
    found: Array = np.exp(-(apart**2) / 2) @ np.asarray(weights, dtype=np.float64) / (width * (2 * np.pi) ** 0.5)
    return found
