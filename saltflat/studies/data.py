"""Where the examples of a study come from."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saltflat.datasets import READERS, SCALES, read_data
from saltflat.datasets.arrays import FORMATS
from saltflat.datasets.user_code import build_from_spec
from saltflat.errors import CodeNotAllowedError, DataError, StudyError, make_unknown_name_error
from saltflat.results.text import join_words


@dataclass(frozen=True)
class Examples:
    """Training and test examples of one classification problem, as tensors with examples first, on the CPU or a GPU."""

    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor

    @property
    def classes(self) -> int:
        return int(max(self.train_labels.max(), self.test_labels.max())) + 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        return tuple(self.train_inputs.shape[1:])

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Examples:
        """The same elsewhere, inputs in this precision; whole numbers, such as those of words, stay whole."""

        def move_inputs(inputs: Tensor) -> Tensor:
            return inputs.to(device, dtype) if inputs.is_floating_point() else inputs.to(device)

        return Examples(
            move_inputs(self.train_inputs),
            self.train_labels.to(device),
            move_inputs(self.test_inputs),
            self.test_labels.to(device),
        )

    def copy(self) -> Examples:
        """The same in memory of its own."""
        return Examples(
            self.train_inputs.clone(), self.train_labels.clone(), self.test_inputs.clone(), self.test_labels.clone()
        )


# What inputs and labels may be made of.
KINDS = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)


@dataclass(frozen=True)
class DataSource:
    """The data of a study, by name.

    Attributes:
        name: of a data set (``digits``, ``mnist``, ``cifar10`` ...); a file ``.npz`` or ``.safetensors`` to train on;
            or ``package.module:function`` that gives Examples, or two pairs ``(inputs, labels)``, to train on and to
            test.
        test: the file to test on, where ``name`` is a file.
        normalize: inputs of a named data set: ``"none"`` ([0, 1]), ``"half"`` ([-1, 1]) or ``"standard"``.
        train_limit: take at most so many training examples.
        test_limit: the same of the test examples.
        folder: where named data sets are. Not part of what a run is: the same data elsewhere are the same data.
    """

    name: str
    test: str | None = None
    normalize: str = "none"
    train_limit: int | None = None
    test_limit: int | None = None
    folder: str = "data"

    @classmethod
    def parse(cls, given: Any) -> DataSource:
        """The source that a study's ``data`` names."""
        if isinstance(given, DataSource):
            return given
        if isinstance(given, str):
            return cls(given).check_values()
        if not isinstance(given, Mapping):
            raise StudyError(
                "Expected a name, a function, or a mapping with a name, so that the runs can be made again, but got "
                f"data of type {type(given).__name__}. Try data='digits'; for tensors give a function of a module "
                "that returns ((inputs, labels), (test inputs, test labels)), or files .npz or .safetensors."
            )
        known = [each.name for each in fields(cls)]
        for key in given:
            if key not in known and key != "source":
                raise make_unknown_name_error("key of data", key, [*known, "source"])
        if ("name" in given) == ("source" in given):
            raise StudyError(
                f"Expected a name, once, but got data with the keys {', '.join(given) or '(none)'}. Try name: digits."
            )
        own = {("name" if key == "source" else key): value for key, value in given.items()}
        return cls(**own).check_values()

    def check_values(self) -> DataSource:
        """Itself, if its values mean something."""
        for key in ("name", "normalize", "folder"):
            if not isinstance(getattr(self, key), str) or not getattr(self, key):
                raise StudyError(f"Expected a text, but got {key}={getattr(self, key)!r} of data. Try naming it.")
        for key in ("train_limit", "test_limit"):
            value = getattr(self, key)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise StudyError(
                    f"Expected a whole number from 1, but got {key}={value!r} of data. Try leaving it out for all."
                )
        if self.normalize not in SCALES:
            raise make_unknown_name_error("normalization", self.normalize, SCALES)
        if self.is_file != (self.test is not None):
            raise StudyError(
                "Expected a second file to test on where the data is a file, and only there, but got data "
                f"{self.name!r} with test={self.test!r}. Try {{name: train.npz, test: test.npz}}."
            )
        if not self.is_file and not self.is_function and self.name not in READERS:
            raise make_unknown_name_error("data set", self.name, READERS)
        return self

    @property
    def is_file(self) -> bool:
        return Path(self.name).suffix in FORMATS

    @property
    def is_function(self) -> bool:
        return re.fullmatch(r"[\w.]+:[\w.]+", self.name) is not None

    @property
    def identity(self) -> dict[str, Any]:
        """What of it determines a training."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "folder"}

    def to_dict(self) -> dict[str, Any]:
        """What differs from the usual, and the name."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return {key: value for key, value in own.items() if key == "name" or value != _USUAL[key]}

    def examples(self, folder: str | Path | None = None, *, allow_code: bool = False) -> Examples:
        """The examples, on the CPU; from another folder if one is given.

        Args:
            folder: where named data sets are, if not where the source says.
            allow_code: import and call the function that the source names, where it names one. Only for a study you
                trust: the source of somebody else's can name any function.
        """
        where = Path(self.folder if folder is None else folder)
        if self.is_function:
            check_code_allowed([self.name], allow_code)
            found = _parse_examples(build_from_spec(self.name, "data"), self.name)
            train: Any = (found.train_inputs[: self.train_limit], found.train_labels[: self.train_limit])
            test: Any = (found.test_inputs[: self.test_limit], found.test_labels[: self.test_limit])
        elif self.is_file:
            train = read_data(self.name, where, limit=self.train_limit)
            test = read_data(str(self.test), where, limit=self.test_limit)
        else:
            train = read_data(self.name, where, "train", limit=self.train_limit, normalize=self.normalize)
            test = read_data(self.name, where, "test", limit=self.test_limit, normalize=self.normalize)
        return _check_examples(Examples(*train, *test), self.name)


_USUAL = {each.name: each.default for each in fields(DataSource)}


def check_code_allowed(code: Sequence[str], allow_code: bool) -> None:
    """Refuse to go on where functions that a study's files name would be imported and nobody has allowed it."""
    if code and not allow_code:
        raise CodeNotAllowedError(
            f"Expected permission to import and call {join_words(list(code))}, which the study's files name, but got "
            "none. If you trust them, try --allow-code, or allow_code=True in Python."
        )


def compute_fingerprint(examples: Examples) -> str:
    """Sixteen hexadecimal digits that change with any number in the examples."""
    found = hashlib.sha256()
    for each in (examples.train_inputs, examples.train_labels, examples.test_inputs, examples.test_labels):
        found.update(f"{tuple(each.shape)} {each.dtype}".encode())
        found.update(each.detach().cpu().contiguous().numpy().data)
    return found.hexdigest()[:16]


def _parse_examples(found: Any, name: str) -> Examples:
    if isinstance(found, Examples):
        return Examples(*(getattr(found, each.name).detach() for each in fields(found)))
    if isinstance(found, tuple | list):
        parts = [part for each in found for part in (each if isinstance(each, tuple | list) else [each])]
        if len(parts) == 4 and all(isinstance(part, Tensor) for part in parts):
            return Examples(*(part.detach() for part in parts))
    raise DataError(
        "Expected saltflat.studies.Examples, or two pairs of tensors (inputs, labels), to train on and to test on, "
        f"but got a {type(found).__name__} from {name!r}. Try returning these."
    )


def _check_examples(examples: Examples, name: str) -> Examples:
    for side in ("train", "test"):
        inputs, labels = getattr(examples, f"{side}_inputs"), getattr(examples, f"{side}_labels")
        for each in (inputs, labels):
            if each.layout is not torch.strided or each.device.type != "cpu" or each.dtype not in KINDS:
                raise DataError(
                    "Expected a plain tensor on the CPU, of "
                    f"{', '.join(str(kind).removeprefix('torch.') for kind in KINDS)}, but got a {side} tensor of "
                    f"{each.dtype}, {each.layout} on {each.device} in {name!r}. Try making it one."
                )
        if inputs.dim() < 1 or labels.dim() != 1 or len(inputs) != len(labels) or len(inputs) == 0:
            raise DataError(
                f"Expected examples first, and a class number for each, but got {side} inputs of shape "
                f"{tuple(inputs.shape)} and labels of shape {tuple(labels.shape)} in {name!r}. Try shaping them so."
            )
        if labels.dtype != torch.int64 or int(labels.min()) < 0:
            raise DataError(
                f"Expected class numbers, int64 from 0, but got {side} labels of type {labels.dtype} from "
                f"{int(labels.min())} in {name!r}. Try a study is about classification."
            )
        if inputs.is_floating_point() and not bool(inputs.isfinite().all()):
            raise DataError(
                f"Expected numbers, but got NaN or infinity in the {side} inputs of {name!r}. Try cleaning them."
            )
    if examples.train_inputs.shape[1:] != examples.test_inputs.shape[1:]:
        raise DataError(
            f"Expected the same, but got training inputs of shape {tuple(examples.train_inputs.shape[1:])} and test "
            f"inputs of shape {tuple(examples.test_inputs.shape[1:])} in {name!r}. Try shaping them alike."
        )
    return examples
