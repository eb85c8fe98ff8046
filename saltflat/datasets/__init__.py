"""Read data by name, from files, or from a user's function.

Public are :func:`read_data`, and for data sets of your own :class:`Reader`, :func:`register_reader`,
:func:`find_reader` and the registry ``READERS``; ``SPLITS`` and ``SCALES`` list the valid options. Weights are read and
written by :mod:`saltflat.datasets.checkpoints`. All other modules are internal.

A named data set has one registered reader::

    register_reader(Reader("mnist", "...", read=..., top=255, mean=(0.1307,), std=(0.3081,)))

``read(folder, split)`` returns the contents of the files: integer inputs from 0 to ``top``, and class numbers.
Selecting examples and scaling inputs is done here, once for all data sets.
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
DATA_FOLDER = "data"  # of named data sets, unless SALTFLAT_DATA names another
SCALES = ("none", "half", "standard")


@dataclass(frozen=True)
class Reader:
    """A named data set.

    Attributes:
        name: the name passed to :func:`read_data`.
        meaning: a description of the data.
        read: ``read(folder, split)`` returns inputs as stored, examples first, and labels (int64).
        top: the largest possible input value; inputs are divided by it.
        mean: the mean of each channel over the training inputs, after that division.
        std: the standard deviation of each channel, likewise.
    """

    name: str
    meaning: str
    read: Callable[[Path, str], tuple[Tensor, Tensor]]
    top: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


READERS: dict[str, Reader] = {}


def register_reader(reader: Reader) -> Reader:
    """Add a reader to the registry, and return it."""
    READERS[reader.name] = reader
    return reader


def find_data_folder() -> Path:
    """Return the folder of named data sets where none is given: that of ``SALTFLAT_DATA``, or ``data``."""
    return Path(os.environ.get("SALTFLAT_DATA") or DATA_FOLDER)


def find_reader(name: str) -> Reader:
    """Return the reader with this name."""
    if name not in READERS:
        raise make_unknown_name_error("data set", name, READERS)
    return READERS[name]


def read_data(
    source: str,
    folder: str | Path | None = None,
    split: str | None = None,
    skip: int = 0,
    limit: int | None = None,
    normalize: str = "none",
) -> Any:
    """Return data to measure on.

    Args:
        source: the name of a data set (``digits``, ``mnist``, ``fashion-mnist``, ``cifar10``, ``cifar100``); a file
            ``.npz`` or ``.safetensors`` with the arrays ``inputs`` (or ``x``) and ``targets`` (or ``y``); or
            ``package.module:factory``, a callable that returns any data :func:`saltflat.measure` accepts.
        folder: the folder of named data sets, laid out as by torchvision (its ``root``); if None, the one that the
            environment variable ``SALTFLAT_DATA`` names, or ``data``.
        split: ``"train"`` (if None) or ``"test"``, for a named data set.
        skip: the number of examples to skip at the beginning.
        limit: the largest number of examples to return after that; all if None.
        normalize: how to scale the inputs of a named data set, which are in [0, 1]: ``"none"``; ``"half"``,
            (x - 0.5) / 0.5, so that they are in [-1, 1]; or ``"standard"``, minus the mean of the channel over the
            training set and divided by its standard deviation, both as given by the reader.

    Returns:
        ``(inputs, targets)``, float32 and int64 for a named data set; or the factory's return value.
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
            f"Expected a file that ends in {' or '.join(FORMATS)}, or the name of a data set, but got the file "
            f"{source!r}. Try saving the arrays 'inputs' and 'targets' with numpy.savez."
        )
    named = find_reader(source)
    if split is not None and split not in SPLITS:
        raise make_unknown_name_error("split", split, SPLITS)
    inputs, labels = select_examples(named.read(Path(folder or find_data_folder()), split or "train"), skip, limit)
    return _scale_inputs(inputs, named, normalize), labels


def _is_factory(source: str) -> bool:
    return re.fullmatch(r"[\w.]+:[\w.]+", source) is not None


def _check_unnamed_options(source: str, split: str | None, normalize: str) -> None:
    if split is not None or normalize != "none":
        option = f"split={split!r}" if split is not None else f"normalize={normalize!r}"
        raise OptionError(
            f"Expected {option.partition('=')[0]} for named data sets only, but got {option} for {source!r}, whose "
            "splits and scales are unknown. Try leaving it out, and split and scale the data where it is created."
        )


def _scale_inputs(inputs: Tensor, named: Reader, normalize: str) -> Tensor:
    """Return inputs as float32 in [0, 1], or shifted and scaled from there."""
    # Division rounds correctly, multiplication by 1/255 does not. In place, since all of CIFAR is 600 MB of float32.
    scaled = inputs.to(torch.float32).div_(named.top)
    if normalize == "half":
        return scaled.sub_(0.5).div_(0.5)
    if normalize == "standard":
        shape = (1, -1, *[1] * (inputs.dim() - 2))
        return scaled.sub_(torch.tensor(named.mean).view(shape)).div_(torch.tensor(named.std).view(shape))
    return scaled


for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
