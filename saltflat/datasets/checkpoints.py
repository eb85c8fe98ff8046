"""Load and save trained weights, without running code that a file may contain."""

from __future__ import annotations

import re
import stat
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from saltflat.errors import SaltflatError
from saltflat.results.files import parse_path, replace_atomically

T = TypeVar("T")
# Keys under which training scripts save the weights beside optimizers and epochs; the first one found is used.
NESTS = ("state_dict", "model_state_dict", "model")
# The metadata key of weights whose model was folded.
FOLDED = "saltflat.folded"


class WeightsError(SaltflatError, ValueError):
    """A file without weights that can be used, or weights that do not fit the model."""


class Weights(dict[str, Tensor]):
    """Tensors by name.

    Attributes:
        notes: changes made to the names in the file.
        folded: whether they belong to a model whose BatchNorm layers were folded.
    """

    def __init__(self, tensors: Mapping[str, Tensor], notes: tuple[str, ...] = (), folded: bool = False) -> None:
        super().__init__(tensors)
        self.notes, self.folded = notes, folded


def load_weights(path: str | Path) -> Weights:
    """Return the weights in a file, on the CPU.

    ``.safetensors`` is read by safetensors, anything else by ``torch.load(weights_only=True)``: tensors and plain
    values only, and a file that needs more is rejected before any of it runs. Weights may be nested under
    ``state_dict``, ``model_state_dict`` or ``model``; what ``DataParallel`` (``module.``) and ``torch.compile``
    (``_orig_mod.``) add to the names is removed. ``notes`` mention both.
    """
    path = parse_path(path, WeightsError)
    _check_file(path)
    found = _load_safetensors(path) if path.suffix == ".safetensors" else _load_pickle(path)
    tensors, notes = _extract_state_dict(found, path)
    names = strip_wrapper_prefixes(list(tensors))
    if any(name != plain for name, plain in names.items()):
        notes = (*notes, f"Names in {path.name}: the prefixes of DataParallel or torch.compile were removed.")
    return Weights({names[name]: tensor for name, tensor in tensors.items()}, notes, is_folded(path))


def is_folded(path: str | Path) -> bool:
    """Return whether a file says that its weights belong to a folded model; see :func:`save_weights`."""
    if Path(path).suffix != ".safetensors":
        return False
    with safe_open(str(path), framework="pt") as file:
        return (file.metadata() or {}).get(FOLDED) == "true"


def save_weights(model: nn.Module, path: str | Path, folded: bool = False) -> int:
    """Write the model's weights to a ``.safetensors`` file, tied weights once, and return the number of tensors.

    Args:
        model: any module.
        path: an existing file is replaced atomically.
        folded: record in the file that the model was folded, so that a reader folds its own model, too.
    """
    tensors: dict[str, Tensor] = {}
    held: list[Tensor] = []
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise WeightsError(
                f"Expected only tensors in the state of the model, but got {name!r}, a "
                f"{type(value).__name__}. Try saving the model's state_dict with torch.save."
            )
        if not any(value is other for other in held):
            held.append(value)
            tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    metadata = {"format": "pt", **({FOLDED: "true"} if folded else {})}
    with replace_atomically(path) as part:
        save_file(tensors, part, metadata)
    return len(tensors)


def put_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Load all of these weights into the model; if they do not fit, the model is unchanged.

    Returns notes: which prefix was removed from the names or added to them, and what was rounded.
    """
    found = match_weights(model, weights)
    own = model.state_dict()
    coarse = {name: own[name].dtype for name, value in found.items() if _is_rounded(value, own[name].dtype)}
    model.load_state_dict(found)
    return found.notes + tuple(
        f"Weights of type {_format_dtype(kind)} were rounded to {_format_dtype(to)}, the model's own."
        for kind, to in dict.fromkeys((found[name].dtype, to) for name, to in coarse.items())
    )


def _is_rounded(value: Tensor, dtype: torch.dtype) -> bool:
    return value.dtype != dtype and not torch.equal(value.to(dtype).to(value.dtype), value)


def _format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def match_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Weights:
    """Return the weights under the model's own names, if names and shapes agree. A tied weight may be given once.

    A prefix that all names in the file have and the model's do not (``net.``, ``backbone.``), or vice versa, is
    removed or added if everything fits then; ``notes`` mention it.
    """
    wanted = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    own = strip_wrapper_prefixes(list(wanted))
    # A tied weight has several names; its own comes first.
    aliases = {
        name: [own[name], *(own[other] for other, tensor in wanted.items() if tensor is value)]
        for name, value in wanted.items()
    }
    given = {plain: weights[name] for name, plain in strip_wrapper_prefixes(list(weights)).items()}
    names, notes = _match_names(list(given), list(own.values()), list(aliases.values()))
    given = {names[name]: tensor for name, tensor in given.items()}
    stored = {name: [given[each] for each in others if each in given] for name, others in aliases.items()}
    found = {name: tensors[0] for name, tensors in stored.items() if tensors}
    _check_fit(found, wanted, own, given)
    _check_tied({own[name]: tensors for name, tensors in stored.items()})
    return Weights(found, notes)


def _match_names(
    given: list[str], known: list[str], aliases: list[list[str]]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Map the names in a file to those of the model, without or with a prefix that all of them have or lack."""
    same = {name: name for name in given}
    if _has_all_names(given, known, aliases):
        return same, ()
    shorter = {
        f"The prefix {prefix!r} was removed from all names in the file: the model's names do not have it.": {
            name: name.removeprefix(prefix) for name in given
        }
        for prefix in _find_common_prefixes(given)
    }
    longer = {
        f"All names in the model begin with {prefix!r}, and those in the file do not: it was put before them.": {
            name: prefix + name for name in given
        }
        for prefix in _find_common_prefixes(known)
    }
    fits = {
        note: names for note, names in {**shorter, **longer}.items() if _has_all_names(names.values(), known, aliases)
    }
    if len(fits) > 1:
        raise WeightsError(
            f"Expected names that fit the model in one way, but got weights whose names fit in {len(fits)} ways: "
            f"{' Or: '.join(fits)} Try renaming them in the file."
        )
    _check_parts(given, known, aliases)
    return next(((names, (note,)) for note, names in fits.items()), (same, ()))


def _check_parts(given: list[str], known: list[str], aliases: list[list[str]]) -> None:
    """Check that the file does not contain other weights beside those of the model, whose purpose is unknown."""
    ends = tuple(f".{name}" for name in known[:1])
    for prefix in dict.fromkeys(name.removesuffix(known[0]) for name in given if name.endswith(ends)):
        others = [name for name in given if not name.startswith(prefix)]
        if others and _has_all_names(
            (name.removeprefix(prefix) for name in given if name not in others), known, aliases
        ):
            raise WeightsError(
                f"Expected the weights of the model alone, but got weights of which those that begin with {prefix!r} "
                f"fit the model, and {len(others)} more do not belong to it: "
                f"{_format_names(list(map(repr, others)))}. Try saving those that begin with {prefix!r} in a file of "
                "their own."
            )


def _has_all_names(names: Iterable[str], known: list[str], aliases: list[list[str]]) -> bool:
    there = set(names)
    return there <= set(known) and all(any(each in there for each in others) for others in aliases)


def _find_common_prefixes(names: list[str]) -> list[str]:
    """Return the prefixes that all names share.

    >>> _find_common_prefixes(["net.body.0.weight", "net.body.1.weight"])
    ['net.', 'net.body.']
    """
    parts = names[0].split(".")[:-1] if names else []
    prefixes = [".".join(parts[:count]) + "." for count in range(1, len(parts) + 1)]
    return [prefix for prefix in prefixes if all(name.startswith(prefix) for name in names)]


def _check_tied(stored: Mapping[str, list[Tensor]]) -> None:
    """Check that tied weights have the same value, since it is unknown which of two was trained."""
    torn = [
        name
        for name, (first, *others) in stored.items()
        if any(not _has_same_values(first, other) for other in others if other is not first)
    ]
    if torn:
        raise WeightsError(
            "Expected the same values under all names of a tied weight, but got different ones for weights that are "
            f"one in the model: {_format_names(list(map(repr, torn)))}. Try untying them in the model, or saving "
            "the weights again."
        )


def strip_wrapper_prefixes(names: list[str]) -> dict[str, str]:
    """Map each name to the name without the prefixes of wrappers around a model.

    Example:
        >>> strip_wrapper_prefixes(["module._orig_mod.0.weight", "module._orig_mod.0.bias"])
        {'module._orig_mod.0.weight': '0.weight', 'module._orig_mod.0.bias': '0.bias'}
    """
    plain = [re.sub(r"(?<![^.])_orig_mod\.", "", name) for name in names]
    # A wrapper's prefix is on every name; if it is on some only, it is the name of a layer.
    while plain and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    return dict(zip(names, plain if len(set(plain)) == len(plain) else names, strict=True))


def _check_file(path: Path) -> None:
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise WeightsError(
            f"Expected a file of weights, but got {str(path)!r}, which does not exist. Try checking the path."
        ) from error
    except OSError as error:
        raise _make_file_error(path, f"it cannot be reached ({error.strerror})", "checking the path") from error
    if stat.S_ISDIR(found.st_mode):
        raise WeightsError(
            f"Expected a file of weights, but got {str(path)!r}, a folder. Try naming the file in it, .safetensors "
            "or .pt."
        )
    if not stat.S_ISREG(found.st_mode):
        raise _make_file_error(path, "it is no regular file", "saving the weights into a file")
    if found.st_size == 0:
        raise _make_file_error(path, "it is empty", "saving the weights again")


def _load_safetensors(path: Path) -> Any:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise _make_file_error(
            path, f"it is no whole safetensors file ({error})", "saving the weights again"
        ) from error


def _load_pickle(path: Path) -> Any:
    if _is_script(path):
        raise _make_file_error(
            path,
            "it is a TorchScript archive, a program with weights",
            "saving the weights alone, torch.save(model.state_dict(), path)",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unusual files; problems are reported below
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a foreign or truncated file can fail in any way
        # Torch reports a rejected name as "... GLOBAL os.system was not ..."
        asked = re.search(r"GLOBAL (\S+\w)\s", str(error))
        if asked is not None:
            raise _make_file_error(
                path,
                f"it needs {asked[1]}, which is not a tensor and could run any code; nothing of it was run",
                "saving the weights alone, torch.save(model.state_dict(), path)",
            ) from error
        raise _make_file_error(path, "it is damaged, or torch did not write it", "saving the weights again") from error


def _is_script(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError) as error:
        raise _make_file_error(path, f"it is a damaged archive ({error})", "saving the weights again") from error


def _extract_state_dict(found: Mapping[str, Any] | T, path: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    notes: tuple[str, ...] = ()
    nest = next((key for key in NESTS if isinstance(found, Mapping) and isinstance(found.get(key), Mapping)), None)
    if nest is not None and isinstance(found, Mapping):
        others = sorted(str(key) for key in found if key != nest)
        notes = (
            f"Weights are those under {nest!r} in {path.name}" + (f", beside {', '.join(others)}." if others else "."),
        )
        found = found[nest]
    if not isinstance(found, Mapping):
        raise _make_file_error(
            path, f"it holds a {type(found).__name__}", "saving a dict of tensors, model.state_dict()"
        )
    wrong = [str(name) for name, value in found.items() if not (isinstance(name, str) and isinstance(value, Tensor))]
    if wrong or not found:
        got = f"it holds other things than tensors: {_format_names(wrong)}" if wrong else "it holds no tensors"
        raise _make_file_error(path, got, "saving a dict of tensors, model.state_dict()")
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
    kinds = [
        f"{own[name]!r} is {kind}"
        for name, tensor in found.items()
        if (kind := _find_unmeasurable_kind(tensor) or _find_integer_kind(tensor, wanted[name])) is not None
    ]
    problems = {
        "missing": missing,
        "unexpected": [repr(name) for name in unexpected],
        "of another shape": shapes,
        "of a kind that cannot be measured": kinds,
    }
    if any(problems.values()):
        told = "; ".join(f"{len(names)} {kind}: {_format_names(names)}" for kind, names in problems.items() if names)
        raise WeightsError(
            "Expected every weight of the model once, dense and real, in its shape, but got weights that do not fit "
            f"the model. {told}. Try checking that the file belongs to this model, and that the model is built as for "
            "training."
        )


def _has_same_values(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and _find_unmeasurable_kind(two) is None and torch.equal(one.double(), two.double())


def _find_integer_kind(tensor: Tensor, wanted: Tensor) -> str | None:
    """Describe integers (of a quantized network) or flags that take the place of real weights; None for others."""
    if is_lazy(wanted) or not wanted.is_floating_point() or tensor.is_floating_point():
        return None
    return f"{_format_dtype(tensor.dtype)} there and {_format_dtype(wanted.dtype)} in the model"


def _find_unmeasurable_kind(tensor: Tensor) -> str | None:
    odd = {
        "complex": tensor.is_complex(),
        "quantized": tensor.is_quantized,
        "sparse": tensor.layout != torch.strided,
        "on the meta device, without numbers": tensor.is_meta,
    }
    return next((kind for kind, is_so in odd.items() if is_so), None)


def _format_names(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")


def _make_file_error(path: Path, why: str, advice: str) -> WeightsError:
    return WeightsError(
        f"Expected tensors by name (.safetensors, or a state_dict saved by torch), but got {str(path)!r}, which "
        f"cannot be used: {why}. Try {advice}."
    )
