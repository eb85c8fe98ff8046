"""The examples of a study, and where they come from."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saltflat.datasets import DATA_FOLDER, READERS, SCALES, find_data_folder, read_data
from saltflat.datasets.arrays import FORMATS
from saltflat.datasets.user_code import build_from_spec
from saltflat.errors import CodeNotAllowedError, DataError, StudyError, make_unknown_name_error
from saltflat.results.text import join_words
from saltflat.studies.canonical import JsonLike


@dataclass(frozen=True)
class Examples:
    """Training and test examples of one classification problem, as tensors with examples first, on the CPU or a GPU."""

    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor

    @property
    def classes(self) -> int:
        """The number of classes."""
        return int(max(self.train_labels.max(), self.test_labels.max())) + 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train_inputs.shape[1:])

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Examples:
        """Return the examples on a device, inputs in this precision; integer inputs, such as tokens, stay integers."""

        def move_inputs(inputs: Tensor) -> Tensor:
            return inputs.to(device, dtype) if inputs.is_floating_point() else inputs.to(device)

        return Examples(
            move_inputs(self.train_inputs),
            self.train_labels.to(device),
            move_inputs(self.test_inputs),
            self.test_labels.to(device),
        )

    def copy(self) -> Examples:
        """Return a copy with tensors of its own."""
        return Examples(
            self.train_inputs.clone(), self.train_labels.clone(), self.test_inputs.clone(), self.test_labels.clone()
        )


# Allowed dtypes of inputs and labels.
KINDS = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)


@dataclass(frozen=True)
class DataSource:
    """The data of a study, by name.

    Attributes:
        name: name of a data set (``digits``, ``mnist``, ``cifar10`` ...); a file ``.npz`` or ``.safetensors`` with
            training examples; or ``package.module:function`` that returns Examples, or two pairs ``(inputs, labels)``,
            for training and for testing.
        test: file with test examples, if ``name`` is a file.
        normalize: range of the inputs of a named data set: ``"none"`` ([0, 1]), ``"half"`` ([-1, 1]) or ``"standard"``.
        train_limit: maximum number of training examples.
        test_limit: maximum number of test examples.
        held_out: the number of training examples, the last ones, that take the place of the test examples, so that
            settings can be chosen without them; None for none.
        folder: folder of named data sets; by default the one that the environment variable ``SALTFLAT_DATA`` names, or
            ``data``. It is not part of a run's identity.
    """

    name: str
    test: str | None = None
    normalize: str = "none"
    train_limit: int | None = None
    test_limit: int | None = None
    held_out: int | None = None
    folder: str = DATA_FOLDER

    @classmethod
    def parse(cls, given: JsonLike | DataSource) -> DataSource:
        """Return the source for a study's ``data``."""
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
        own: dict[str, Any] = {("name" if key == "source" else key): value for key, value in given.items()}
        return cls(**own).check_values()

    def check_values(self) -> DataSource:
        """Check the values, and return the source."""
        for key in ("name", "normalize", "folder"):
            if not isinstance(getattr(self, key), str) or not getattr(self, key):
                raise StudyError(f"Expected a string, but got {key}={getattr(self, key)!r} of data. Try a name.")
        for key in ("train_limit", "test_limit", "held_out"):
            value = getattr(self, key)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise StudyError(
                    f"Expected a whole number from 1, but got {key}={value!r} of data. Try leaving it out."
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
        """Whether the examples are in files."""
        return Path(self.name).suffix in FORMATS

    @property
    def is_function(self) -> bool:
        """Whether a function returns the examples."""
        return re.fullmatch(r"[\w.]+:[\w.]+", self.name) is not None

    @property
    def identity(self) -> dict[str, Any]:
        """The attributes that determine a training; without ``held_out`` if none are, as in earlier versions."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "folder"}
        return {key: value for key, value in own.items() if key != "held_out" or value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return the name, and the attributes that differ from their defaults."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return {key: value for key, value in own.items() if key == "name" or value != _USUAL[key]}

    def examples(self, folder: str | Path | None = None, *, allow_code: bool = False) -> Examples:
        """Return the examples, on the CPU.

        Args:
            folder: folder of named data sets, if not the one of the source.
            allow_code: whether to import and call the function that the source names, if it names one. Only for studies
                you trust: a source can name any function.
        """
        own = find_data_folder() if self.folder == DATA_FOLDER else self.folder
        where = Path(own if folder is None else folder)
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
        return _check_examples(self._hold_out(Examples(*train, *test)), self.name)

    def _hold_out(self, examples: Examples) -> Examples:
        """Return the examples with the last training examples as test examples, if some are held out."""
        if self.held_out is None:
            return examples
        kept = len(examples.train_inputs) - self.held_out
        if kept < 1:
            raise DataError(
                f"Expected at most {kept + self.held_out - 1:,}, fewer than there are training examples, but got "
                f"held_out={self.held_out:,} of {self.name!r}. Try a smaller number."
            )
        inputs, labels = examples.train_inputs, examples.train_labels
        held_out = (inputs[kept:][: self.test_limit], labels[kept:][: self.test_limit])
        return Examples(inputs[:kept], labels[:kept], *held_out)


_USUAL = {each.name: each.default for each in fields(DataSource)}


def check_code_allowed(code: Sequence[str], allow_code: bool) -> None:
    """Check that importing the functions that a study's files name is allowed."""
    if code and not allow_code:
        raise CodeNotAllowedError(
            f"Expected permission to import and call {join_words(list(code))}, which the study's files name, but got "
            "none. If you trust them, try --allow-code, or allow_code=True in Python."
        )


def compute_fingerprint(examples: Examples) -> str:
    """Return sixteen hexadecimal digits that identify the examples."""
    found = hashlib.sha256()
    for each in (examples.train_inputs, examples.train_labels, examples.test_inputs, examples.test_labels):
        found.update(f"{tuple(each.shape)} {each.dtype}".encode())
        found.update(each.detach().cpu().contiguous().numpy().data)
    return found.hexdigest()[:16]


def _parse_examples(found: Examples | Sequence[Tensor | Sequence[Tensor]], name: str) -> Examples:
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
                f"{tuple(inputs.shape)} and labels of shape {tuple(labels.shape)} in {name!r}. Try reshaping them."
            )
        if labels.dtype != torch.int64 or int(labels.min()) < 0:
            raise DataError(
                f"Expected class numbers, int64 from 0, but got {side} labels of type {labels.dtype} from "
                f"{int(labels.min())} in {name!r}. Try labels of a classification problem."
            )
        if inputs.is_floating_point() and not bool(inputs.isfinite().all()):
            raise DataError(
                f"Expected finite numbers, but got NaN or infinity in the {side} inputs of {name!r}. Try cleaning them."
            )
    if examples.train_inputs.shape[1:] != examples.test_inputs.shape[1:]:
        raise DataError(
            "Expected inputs of one shape, but got training inputs of shape "
            f"{tuple(examples.train_inputs.shape[1:])} and test inputs of shape "
            f"{tuple(examples.test_inputs.shape[1:])} in {name!r}. Try reshaping them."
        )
    return examples
