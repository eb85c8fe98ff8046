"""The spectrum of a network's curvature, with everything needed to read, draw and repeat it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import t

from saltflat._late import load_later
from saltflat.engine.noise import compute_mean_and_error
from saltflat.errors import OptionError, ReportError, make_unknown_name_error
from saltflat.results.display import Displayable
from saltflat.results.files import SPECTRUM, check_schema, read_json, write_json
from saltflat.results.json_codec import MAPPING, check_structure, decode_nonfinite, encode_nonfinite, to_plain_types
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
    """An eigenvalue that was searched for.

    Attributes:
        value: the eigenvalue.
        residual: |A v - value v| for the unit vector v that was found: there is an eigenvalue within this distance.
        bound: how far the eigenvalue may be from ``value``: the residual, or its square over the distance to the
            nearest other eigenvalue seen, whichever is smaller.
        converged: whether the bound is within the tolerance.
    """

    value: float
    residual: float
    bound: float
    converged: bool


@dataclass(frozen=True)
class Density:
    """A smoothed spectral density on a grid: its integral over a range is the share of eigenvalues there.

    Attributes:
        grid: where.
        value: the density.
        low: lower end of the 95 % interval at each point.
        high: upper end. Both cover the choice of the random probes, by Student's t over them; neither the finite number
            of steps nor the choice of the data.
        width: standard deviation of the Gaussian that smooths it.
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
        name: of the parameter, or ``"network"``.
        parameters: how many eigenvalues there are.
        largest: the largest ones, in descending order.
        smallest: the smallest ones, in ascending order.
        complete: whether a second search confirmed that none beyond these was missed.
        exact: the eigenvalues that the density holds as they are; random probes stand for the others.
        nodes: of each probe's quadrature, the places.
        weights: of each probe's quadrature, the weights, which sum to one.
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
        """All eigenvalues that were searched for, in descending order."""
        return (*self.largest, *reversed(self.smallest))

    @property
    def eigenvalues(self) -> Array:
        """Their values, in descending order."""
        return np.array([pair.value for pair in self.pairs])

    @property
    def has_density(self) -> bool:
        """Whether anything is known of the eigenvalues that were not searched for."""
        return bool(self.nodes) or len(self.exact) == self.parameters

    @property
    def trace(self) -> float:
        """The sum of all eigenvalues; unbiased, and exact if all were searched for. Nan without a density."""
        return self._estimate_trace()[0]

    @property
    def trace_stderr(self) -> float:
        """Its standard error over the probes, such that trace +- 1.96 stderr is a 95 % interval."""
        return self._estimate_trace()[1]

    def _estimate_trace(self) -> tuple[float, float]:
        if not self.has_density:
            return float("nan"), float("nan")
        rest = self.parameters - len(self.exact)
        sums = [rest * float(np.dot(n, w)) for n, w in zip(self.nodes, self.weights, strict=True)]
        mean, error = compute_mean_and_error(sums) if sums else (0.0, 0.0)
        return float(np.sum(self.exact)) + mean, error

    def density(self, grid: ArrayLike | None = None, width: float | None = None) -> Density:
        """The density of all eigenvalues, each a Gaussian of this width.

        Args:
            grid: where; 1000 points over the whole spectrum if None.
            width: standard deviation of the Gaussian; a fiftieth of the width of the spectrum if None.
        """
        if not self.has_density:
            raise OptionError(
                "Expected its density, but got a spectrum that was made with density=False. Try making it with "
                "density=True."
            )
        low, high = self.ends
        if width is None:
            # Where all eigenvalues are alike, any width will do.
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
        """The smallest and the largest eigenvalue seen anywhere."""
        seen = [*(pair.value for pair in self.pairs), *(node for each in self.nodes for node in each)]
        return min(seen), max(seen)


@dataclass(frozen=True, eq=False, repr=False)
class Spectrum(Displayable, Mapping[str, Block]):
    """The spectrum of the curvature of the mean loss, over the whole network or of each layer.

    It is a mapping from names of blocks to :class:`Block`. If there is one block only, such as that of the whole
    network, ``eigenvalues``, ``largest``, ``smallest``, ``density``, ``trace`` and ``trace_stderr`` are its own.

    Attributes:
        blocks: by name: ``"network"``, or the names of parameters.
        model: class name and number of parameters.
        examples: how many examples the mean loss is over.
        loss: the mean loss.
        settings: how it was made.
        versions: of saltflat, torch, numpy and python.
        seconds: how long it took.
        notes: what a reader should know besides.
        created: when, ISO time in UTC.
    """

    renderer = ("spectrum", "SpectrumRenderable", "format_spectrum_html")

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
        tidy: dict[str, Any] = {
            "blocks": dict(self.blocks),
            "model": str(self.model),
            "examples": int(self.examples),
            "loss": float(self.loss),
            "settings": to_plain_types(self.settings, "the settings"),
            "versions": {str(name): str(each) for name, each in self.versions.items()},
            "seconds": float(self.seconds),
            "notes": tuple(str(note) for note in self.notes),
            "created": str(self.created),
        }
        for key, value in tidy.items():
            object.__setattr__(self, key, value)

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
        """The only block; an error if there are several."""
        if len(self.blocks) != 1:
            some = next(iter(self.blocks))
            raise OptionError(
                f"Expected one of them, but got a spectrum of {len(self.blocks)} layers. Try spectrum[{some!r}], or "
                "another."
            )
        return next(iter(self.blocks.values()))

    @property
    def eigenvalues(self) -> Array:
        """The eigenvalues that were searched for, in descending order."""
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
        """Whether a second search confirmed of every block that none beyond these was missed."""
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
        """The smoothed density of all eigenvalues; see :meth:`Block.density`."""
        return self.only_block.density(grid, width)

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, Spectrum) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        what = "the network" if self.settings.get("per") == "network" else f"{len(self)} layers"
        return f"<Spectrum of {what}, {make_printable(self.model)}; print() describes it, .plot() draws it>"

    def plot(self, width: float | None = None) -> Figure:
        """A ``matplotlib`` Figure: density on a logarithmic scale with its band, and the eigenvalues as marks.

        Args:
            width: standard deviation of the Gaussian that smooths the density.
        """
        figure: Figure = load_later("render.spectrum").plot_spectrum(self, width)
        return figure

    def to_dict(self) -> dict[str, Any]:
        """As strict JSON has it; numbers that are not finite are coded, see ``saltflat.results.json_codec``."""
        parts = {
            each.name: encode_nonfinite(to_plain_types(getattr(self, each.name), each.name))
            for each in fields(self)[1:]
        }
        blocks = [
            {each.name: _encode_field(getattr(block, each.name)) for each in fields(block)} for block in self.values()
        ]
        return {"schema": SPECTRUM.schema, "blocks": blocks, **parts}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Spectrum:
        """The spectrum that ``to_dict`` was called on."""
        return cls._parse_dict(given, "a mapping")

    @classmethod
    def _parse_dict(cls, given: Mapping[str, Any], source: str) -> Spectrum:
        check_schema(given, source, SPECTRUM)
        try:
            blocks = [_decode_block(each) for each in given["blocks"]]
            rest = {key: decode_nonfinite(value) for key, value in given.items() if key not in ("schema", "blocks")}
            found = cls(blocks={block.name: block for block in blocks}, **rest)
            # Reading is lenient: what does not come out again as it went in was not written by us.
            if found.to_dict() != given or not blocks:
                raise TypeError("a field has a value of another kind")
            check_structure(found.settings, MAPPING, "the settings")
            for block in blocks:
                _check_block(block)
        except (TypeError, ValueError, AttributeError, OverflowError, RecursionError, LookupError) as problem:
            raise ReportError(
                f"Expected what Spectrum.to_dict gives, but got {source}, a spectrum that cannot be understood "
                f"({type(problem).__name__}: {problem}). Try making it again, or taking the file from a backup."
            ) from problem
        return found

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON and give the path back; a file that was there is replaced, whole or not at all."""
        return write_json(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Spectrum:
        """The spectrum that was saved there."""
        return cls._parse_dict(read_json(path, SPECTRUM), f"the file {os.fspath(path)!r}")


def _encode_field(value: Any) -> Any:
    if isinstance(value, tuple) and value and isinstance(value[0], Eigenvalue):
        return [{each.name: getattr(pair, each.name) for each in fields(pair)} for pair in value]
    return to_plain_types(value, "a block")


def _decode_block(given: Mapping[str, Any]) -> Block:
    ends = {key: tuple(Eigenvalue(**each) for each in given[key]) for key in ("largest", "smallest")}
    lists = {key: tuple(map(tuple, given[key])) for key in ("nodes", "weights")}
    return Block(**{**given, **ends, **lists, "exact": tuple(given["exact"])})


def _check_block(block: Block) -> None:
    """Raise an error that says what is wrong with a block that was read from a file, if anything is."""
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
            "Expected the places at which to take the density, but got a grid that is no row of finite numbers. Try "
            "grid=numpy.linspace(-1, 10, 500)."
        )
    return grid


def _sum_gaussians(grid: Array, centers: ArrayLike, weights: ArrayLike, width: float) -> Array:
    apart = (grid[:, None] - np.asarray(centers, dtype=np.float64)) / width
    found: Array = np.exp(-(apart**2) / 2) @ np.asarray(weights, dtype=np.float64) / (width * (2 * np.pi) ** 0.5)
    return found
