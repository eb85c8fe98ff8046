"""Trained weights from a file, without running what a file may ask for."""

from __future__ import annotations

import re
import stat
import warnings
import zipfile
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from saltflat.errors import SaltflatError

# Where training scripts keep the weights beside optimizers and epochs; the first that is there.
NESTS = ("state_dict", "model_state_dict", "model")


class WeightsError(SaltflatError, ValueError):
    """A file without weights that can be used, or weights that do not fit the model."""


class Weights(dict[str, Tensor]):
    """Tensors by name.

    Attributes:
        notes: what was done to the names in the file.
    """

    def __init__(self, tensors: Mapping[str, Tensor], notes: tuple[str, ...] = ()) -> None:
        super().__init__(tensors)
        self.notes = notes


def load_weights(path: str | Path) -> Weights:
    """The weights in a file, on the CPU.

    ``.safetensors`` is read by safetensors, anything else by ``torch.load(weights_only=True)``: tensors and plain
    values only, and a file that asks for more is refused before it does anything. Weights may be nested under
    ``state_dict``, ``model_state_dict`` or ``model``; what ``DataParallel`` (``module.``) and ``torch.compile``
    (``_orig_mod.``) add to the names is taken away. Both are said in ``notes``.
    """
    path = Path(path)
    _check_file(path)
    found = _safe(path) if path.suffix == ".safetensors" else _unpickled(path)
    tensors, notes = _unnested(found, path)
    names = plain_names(list(tensors))
    if any(name != plain for name, plain in names.items()):
        notes = (*notes, f"Names in {path.name}: the prefixes of DataParallel or torch.compile were taken away.")
    return Weights({names[name]: tensor for name, tensor in tensors.items()}, notes)


def put_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Give the model these weights, all of them, and say what was rounded; if they do not fit, it is left as it is."""
    found = fitted(model, weights)
    own = model.state_dict()
    coarse = {name: own[name].dtype for name, value in found.items() if _is_rounded(value, own[name].dtype)}
    model.load_state_dict(found)
    return tuple(
        f"Weights of type {_plain_type(kind)} were rounded to {_plain_type(to)}, the model's own."
        for kind, to in dict.fromkeys((found[name].dtype, to) for name, to in coarse.items())
    )


def _is_rounded(value: Tensor, dtype: torch.dtype) -> bool:
    return value.dtype != dtype and not torch.equal(value.to(dtype).to(value.dtype), value)


def _plain_type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fitted(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the model's own names, if names and shapes agree. A tied weight may be there once."""
    wanted = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    own = plain_names(list(wanted))
    given = {plain: weights[name] for name, plain in plain_names(list(weights)).items()}
    found: dict[str, Tensor] = {}
    for name, value in wanted.items():
        same = [own[other] for other, tensor in wanted.items() if tensor is value]
        stored = next((given[each] for each in [own[name], *same] if each in given), None)
        if stored is not None:
            found[name] = stored
    _check_fit(found, wanted, own, given)
    return found


def plain_names(names: list[str]) -> dict[str, str]:
    """Each name without what wrappers around a model put into it.

    Example:
        >>> plain_names(["module._orig_mod.0.weight", "module._orig_mod.0.bias"])
        {'module._orig_mod.0.weight': '0.weight', 'module._orig_mod.0.bias': '0.bias'}
    """
    plain = [re.sub(r"(?<![^.])_orig_mod\.", "", name) for name in names]
    # A wrapper's prefix is on every name; on some it is a layer that is called so.
    while plain and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    return dict(zip(names, plain if len(set(plain)) == len(plain) else names, strict=True))


def _check_file(path: Path) -> None:
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise WeightsError(
            f"Got {str(path)!r}, which does not exist. Want a file of weights. Do: check the path."
        ) from error
    except OSError as error:
        raise _refused(path, f"it cannot be reached ({error.strerror})", "check the path") from error
    if stat.S_ISDIR(found.st_mode):
        raise WeightsError(
            f"Got {str(path)!r}, a folder. Want a file of weights. Do: name the file in it, .safetensors or .pt."
        )
    if not stat.S_ISREG(found.st_mode):
        raise _refused(path, "it is no regular file", "save the weights into a file")
    if found.st_size == 0:
        raise _refused(path, "it is empty", "save the weights again")


def _safe(path: Path) -> Any:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise _refused(path, f"it is no whole safetensors file ({error})", "save the weights again") from error


def _unpickled(path: Path) -> Any:
    if _is_script(path):
        raise _refused(
            path,
            "it is a TorchScript archive, a program with weights",
            "save the weights alone, torch.save(model.state_dict(), path)",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unusual files, in torch's words; what comes of them is said below
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file that torch did not write, or not to its end, can fail in any way
        # Torch says of a name that it did not follow: "... GLOBAL os.system was not ..."
        asked = re.search(r"GLOBAL (\S+\w)\s", str(error))
        if asked is not None:
            raise _refused(
                path,
                f"it asks for {asked[1]}, which is more than tensors and could do anything; nothing of it was run",
                "save the weights alone, torch.save(model.state_dict(), path)",
            ) from error
        raise _refused(path, "it is damaged, or torch did not write it", "save the weights again") from error


def _is_script(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError) as error:
        raise _refused(path, f"it is a damaged archive ({error})", "save the weights again") from error


def _unnested(found: Any, path: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    notes: tuple[str, ...] = ()
    nest = next((key for key in NESTS if isinstance(found, Mapping) and isinstance(found.get(key), Mapping)), None)
    if nest is not None:
        others = sorted(str(key) for key in found if key != nest)
        notes = (
            f"Weights are those under {nest!r} in {path.name}" + (f", beside {', '.join(others)}." if others else "."),
        )
        found = found[nest]
    if not isinstance(found, Mapping):
        raise _refused(path, f"it holds a {type(found).__name__}", "save a dict of tensors, model.state_dict()")
    wrong = [str(name) for name, value in found.items() if not (isinstance(name, str) and isinstance(value, Tensor))]
    if wrong or not found:
        got = f"it holds other things than tensors: {_listed(wrong)}" if wrong else "it holds no tensors"
        raise _refused(path, got, "save a dict of tensors, model.state_dict()")
    return dict(found), notes


def _check_fit(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], own: Mapping[str, str], given: Mapping[str, Tensor]
) -> None:
    known = set(own.values())
    unexpected = [name for name in given if name not in known]
    missing = []
    for name in (own[name] for name in wanted if name not in found):
        near = get_close_matches(name, unexpected, n=1, cutoff=0.5)
        missing.append(f"{name!r}" + (f" (nearest there: {near[0]!r})" if near else ""))
    shapes = [
        f"{own[name]!r} is {tuple(tensor.shape)} there and {tuple(wanted[name].shape)} in the model"
        for name, tensor in found.items()
        if not is_lazy(wanted[name]) and tensor.shape != wanted[name].shape
    ]
    kinds = [f"{own[name]!r} is {kind}" for name, tensor in found.items() if (kind := _odd_kind(tensor)) is not None]
    problems = {
        "missing": missing,
        "unexpected": [repr(name) for name in unexpected],
        "of another shape": shapes,
        "of a kind that cannot be measured": kinds,
    }
    if any(problems.values()):
        told = "; ".join(f"{len(names)} {kind}: {_listed(names)}" for kind, names in problems.items() if names)
        raise WeightsError(
            f"Got weights that do not fit the model. {told}. Want every weight of the model once, dense and real, "
            "in its shape. Do: check that the file belongs to this model, and that it is made as it was for training."
        )


def _odd_kind(tensor: Tensor) -> str | None:
    odd = {
        "complex": tensor.is_complex(),
        "quantized": tensor.is_quantized,
        "sparse": tensor.layout != torch.strided,
        "on the meta device, without numbers": tensor.is_meta,
    }
    return next((kind for kind, is_so in odd.items() if is_so), None)


def _listed(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")


def _refused(path: Path, why: str, advice: str) -> WeightsError:
    return WeightsError(
        f"Got {str(path)!r}, which cannot be used: {why}. Want tensors by name (.safetensors, or a state_dict saved by "
        f"torch). Do: {advice}."
    )
