"""Read data from one file of arrays, and files checked against their published checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from saltflat.errors import DataError


def read_verified_bytes(path: Path, md5: str) -> bytes:
    """Return the contents of a file with this md5. Detects damage, not forgery: md5 collisions are easy to make."""
    content = read_file_bytes(path)
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise DataError(
            f"Expected the md5 {md5} of the published file, but got {str(path)!r} with the md5 {found} "
            f"({len(content):,} bytes), which is damaged, incomplete or another file. Try to delete it and download it "
            "again."
        )
    return content


def read_file_bytes(path: Path) -> bytes:
    """Return the contents of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise _make_unreadable_error(path, error) from error


def is_existing_file(path: Path) -> bool:
    """Return whether the file exists; raise an error for a name that no file can have."""
    try:
        return path.is_file()
    except OSError as error:
        raise _make_unreadable_error(path, error) from error


def _make_unreadable_error(path: Path, error: OSError) -> DataError:
    return DataError(
        f"Expected a readable file, but got {str(path)!r}, which cannot be read ({error.strerror}). Try checking the "
        "folder and its permissions."
    )


def make_missing_file_error(path: Path, dataset: str) -> DataError:
    """Return the error for a missing file of a data set; ``dataset`` is torchvision's name for it."""
    return DataError(
        f"Expected {dataset} as torchvision lays it out, but got no file {str(path)!r}. Try naming the folder it is "
        f"in (SALTFLAT_DATA or --data-dir), or download it there with torchvision.datasets.{dataset}(folder, "
        "download=True)."
    )


NAMES = {"inputs": ("inputs", "x"), "targets": ("targets", "y")}


def read_npz(path: Path) -> tuple[Tensor, Tensor]:
    """Return inputs and targets written by ``numpy.savez``; pickled objects are rejected."""
    try:
        with path.open("rb") as stream:  # numpy does not close a file that it fails to read
            found = np.load(stream, allow_pickle=False)
            if not isinstance(found, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array without a name")
            one, two = (_make_tensor(found[name], name) for name in _find_array_names(found.files, path))
            return _prepare_pair(one, two)
    except Exception as error:  # a foreign or truncated file can fail in any way
        raise _make_array_file_error(path, error) from error


def read_safetensors(path: Path) -> tuple[Tensor, Tensor]:
    """Return inputs and targets written by safetensors."""
    try:
        with safe_open(str(path), framework="pt") as file:
            one, two = (file.get_tensor(name) for name in _find_array_names(file.keys(), path))
        return _prepare_pair(one, two)
    except (OSError, ValueError, SafetensorError) as error:
        raise _make_array_file_error(path, error) from error


FORMATS: dict[str, Callable[[Path], tuple[Tensor, Tensor]]] = {".npz": read_npz, ".safetensors": read_safetensors}


def _make_tensor(array: np.ndarray[Any, Any] | bytes, name: str) -> Tensor:
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name!r} is not an array")
    # Torch supports the native byte order only.
    array = array.astype(array.dtype.newbyteorder("="))
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise ValueError(f"{name!r} holds {array.dtype}, which are not numbers") from error


def _find_array_names(names: Collection[str], path: Path) -> list[str]:
    found = [[name for name in known if name in names] for known in NAMES.values()]
    if any(len(each) != 1 for each in found):
        raise DataError(
            "Expected 'inputs' or 'x', and 'targets' or 'y', one of each, but got the arrays "
            f"{', '.join(sorted(names)) or '(none)'} in {str(path)!r}. Try saving them under these names."
        )
    return [each[0] for each in found]


def _prepare_pair(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Scale bytes, which are pixels, to [0, 1]; convert other integers to int64; keep real numbers."""
    for name, values in {"inputs": inputs, "targets": targets}.items():
        if values.dim() == 0 or values.is_complex():
            raise ValueError(f"the {name} are {'complex' if values.is_complex() else 'one number'}")
    if inputs.dtype == torch.uint8:
        inputs = inputs.to(torch.float32).div_(255)
    return _widen_dtype(inputs), _widen_dtype(targets)


def _widen_dtype(values: Tensor) -> Tensor:
    if values.dtype in (torch.float16, torch.bfloat16):
        return values.float()
    if values.is_floating_point():
        return values
    whole = values.to(torch.int64)
    if values.dtype == torch.uint64 and bool((whole < 0).any()):
        raise ValueError("there are whole numbers of 2^63 and more")
    return whole


def _make_array_file_error(path: Path, error: Exception) -> DataError:
    if isinstance(error, DataError):
        return error
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error).strip()
    why = said.splitlines()[0][:300] if said else type(error).__name__
    return DataError(
        f"Expected a whole {path.suffix} file of plain arrays, but got {str(path)!r}, which cannot be read ({why}). "
        "Try checking the path, or write the file again."
    )
