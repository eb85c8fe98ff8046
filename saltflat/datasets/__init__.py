"""Data by name, from files, or from a function of the user's; one file per data set.

A named data set says where torchvision puts it and how its numbers are scaled:

    register_reader(Reader("mnist", "...", read=..., top=255, mean=(0.1307,), std=(0.3081,)))

``read(folder, split)`` gives what the files hold: integer inputs of 0 to ``top``, and class numbers. Everything else
(which examples, which scale) is done here, once for all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch
from torch import Tensor

from saltflat.datasets.arrays import FORMATS, is_existing_file
from saltflat.datasets.user_code import build_from_spec
from saltflat.engine.read_data import check_skip_and_limit, select_examples
from saltflat.errors import DataError, OptionError, make_unknown_name_error
from saltflat.results.files import parse_path

SPLITS = ("train", "test")
SCALES = ("none", "half", "standard")


@dataclass(frozen=True)
class Reader:
    """A data set that has a name.

    Attributes:
        name: how it is asked for.
        meaning: what it holds.
        read: ``read(folder, split)`` gives inputs as stored, examples first, and labels (int64).
        top: the largest value an input can have; inputs are divided by it.
        mean: of each channel over the training inputs, after that division.
        std: their standard deviation.
    """

    name: str
    meaning: str
    read: Callable[[Path, str], tuple[Tensor, Tensor]]
    top: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


READERS: dict[str, Reader] = {}


def register_reader(each: Reader) -> Reader:
    READERS[each.name] = each
    return each


def find_reader(name: str) -> Reader:
    """The reader of this name."""
    if name not in READERS:
        raise make_unknown_name_error("data set", name, READERS)
    return READERS[name]


def read_data(
    source: str,
    folder: str | Path = "data",
    split: str | None = None,
    skip: int = 0,
    limit: int | None = None,
    normalize: str = "none",
) -> Any:
    """Data to measure on.

    Args:
        source: the name of a data set (``digits``, ``mnist``, ``fashion-mnist``, ``cifar10``, ``cifar100``); a file
            ``.npz`` or ``.safetensors`` with the arrays ``inputs`` (or ``x``) and ``targets`` (or ``y``); or
            ``package.module:factory``, a callable that returns any data :func:`saltflat.measure` takes.
        folder: where named data sets are, laid out as torchvision does (its ``root``).
        split: ``"train"`` (if None) or ``"test"``, of a named data set.
        skip: leave out so many examples at the beginning.
        limit: then take at most so many; all if None.
        normalize: what is done with the inputs of a named data set, which are in [0, 1]: ``"none"``; ``"half"``,
            (x - 0.5) / 0.5, so that they are in [-1, 1]; or ``"standard"``, less the mean of their channel over the
            training set and divided by its standard deviation, both as the data set's file here states them.

    Returns:
        ``(inputs, targets)``, float32 and int64 for a named data set; or what the factory gave.
    """
    check_skip_and_limit(skip, limit)
    parse_path(source, DataError)
    source = os.fspath(source)
    if normalize not in SCALES:
        raise make_unknown_name_error("normalization", normalize, SCALES)
    if Path(source).suffix in FORMATS or _is_factory(source):
        _check_unnamed_options(source, split, normalize)
        found = (
            FORMATS[Path(source).suffix](Path(source))
            if Path(source).suffix in FORMATS
            else build_from_spec(source, "data")
        )
        return select_examples(found, skip, limit)
    if is_existing_file(Path(source)):
        raise DataError(
            f"Expected one that ends in {' or '.join(FORMATS)}, or the name of a data set, but got the file "
            f"{source!r}. Try saving the arrays 'inputs' and 'targets' with numpy.savez."
        )
    named = find_reader(source)
    if split is not None and split not in SPLITS:
        raise make_unknown_name_error("split", split, SPLITS)
    inputs, labels = select_examples(named.read(Path(folder), split or "train"), skip, limit)
    return _scale_inputs(inputs, named, normalize), labels


def _is_factory(source: str) -> bool:
    return re.fullmatch(r"[\w.]+:[\w.]+", source) is not None


def _check_unnamed_options(source: str, split: str | None, normalize: str) -> None:
    if split is not None or normalize != "none":
        option = f"split={split!r}" if split is not None else f"normalize={normalize!r}"
        raise OptionError(
            f"Expected it for a named data set only, but got {option} for {source!r}, whose splits and scales are "
            "not known. Try leaving it out, and split and scale where the data is made."
        )


def _scale_inputs(inputs: Tensor, named: Reader, normalize: str) -> Tensor:
    """Inputs as float32 in [0, 1], or moved and stretched from there."""
    # A division rounds correctly, a product with 1/255 does not; in place, since all of CIFAR is 600 MB of float32.
    scaled = inputs.to(torch.float32).div_(named.top)
    if normalize == "half":
        return scaled.sub_(0.5).div_(0.5)
    if normalize == "standard":
        shape = (1, -1, *[1] * (inputs.dim() - 2))
        return scaled.sub_(torch.tensor(named.mean).view(shape)).div_(torch.tensor(named.std).view(shape))
    return scaled


for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
