"""The precision of float32 products: torch's settings, old and new, are read, set and restored here alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from saltflat.errors import make_unknown_name_error
from saltflat.validation import is_choice

# What torch calls them (``fp32_precision``): all 24 bits of float32, or the 11 that tensor cores multiply.
PRECISIONS = ("ieee", "tf32")
# Outputs of a deep network in TF32 differ from those in float32 by less than this fraction of the largest.
TF32_ROUNDING = 0.05
AMPERE = (8, 0)  # the first compute capability with TF32

# The precision of each kind of operation in each backend; kinds that are "none" follow "all", and backends that are
# "none" follow the generic setting.
_KINDS = [(backend, kind) for backend in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn", "all")]
_GENERIC = ("generic", "all")
# Those that torch compares with the old setting when that is read.
_PRODUCTS = (("cuda", "matmul"), ("mkldnn", "matmul"))


def parse_precision(precision: str) -> str:
    """Check the name of a precision."""
    if not is_choice(precision, PRECISIONS):
        raise make_unknown_name_error("precision", precision, PRECISIONS)
    return precision


def supports_tf32(value: Tensor) -> bool:
    """Return whether products with this tensor can be computed in TF32: in float32 on an NVIDIA GPU from Ampere on.

    Example:
        >>> supports_tf32(torch.ones(2))
        False
    """
    if value.device.type != "cuda" or value.dtype != torch.float32 or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(value.device) >= AMPERE


def make_no_effect_note(precision: str, value: Tensor) -> str:
    """Return the note that products with this tensor are computed in full precision nevertheless."""
    if value.device.type == "cuda" and value.dtype != torch.float32:
        where = f"of {str(value.dtype).removeprefix('torch.')}"
    else:
        where = f"on this device ({value.device})"
    return f"precision={precision!r} has no effect {where}: all products were computed in full precision."


def make_error_note(precision: str, errors: Mapping[str, float], examples: int) -> str:
    """Return the note on the relative differences that a precision made."""
    said = ", ".join(f"{name} by {error:.1e}" for name, error in errors.items())
    return (
        f"The sweep's products were computed in {precision.upper()}, which keeps three digits. On the first {examples} "
        f"examples this changes {said}, relative to full precision."
    )


@contextmanager
def use_full_precision(model: nn.Module) -> Iterator[None]:
    """Run convolutions and matrix products in full float32 precision: TF32 keeps three digits, bfloat16 two."""
    # cuDNN's recurrent kernels have no backward pass in eval mode.
    cudnn, recurrent = torch.backends.cudnn, any(isinstance(module, nn.RNNBase) for module in model.modules())
    enabled, back = cudnn.enabled, snapshot_precision()
    try:
        set_precision("ieee")
        if recurrent:
            cudnn.enabled = False
        yield
    finally:
        cudnn.enabled = enabled
        back()


@contextmanager
def use_precision(precision: str) -> Iterator[None]:
    """Run convolutions and matrix products in this precision, inside of :func:`use_full_precision`."""
    if precision == "ieee":
        yield
        return
    try:
        set_precision(precision)
        yield
    finally:
        set_precision("ieee")


def snapshot_precision() -> Callable[[], None]:
    """Return a function that restores torch's precision settings, old and new, in whatever order they were set.

    The new settings (torch 2.9, ``fp32_precision``) show the effective value, not the one that was set, and the old
    ones (``allow_tf32``, ``set_float32_matmul_precision``) cannot be read while the new ones contradict them. So the
    settings are read from the outermost inward, and each one is cleared before the next is read.
    """
    kept: dict[tuple[str, str], str] = {}
    if _has_new_settings():
        for key in [_GENERIC, *reversed(_KINDS)]:
            kept[key] = torch._C._get_fp32_precision_getter(*key)
            torch._C._set_fp32_precision_setter(*key, "none")
        for key in _PRODUCTS:  # full precision contradicts no old setting; "none" follows a default of torch's
            torch._C._set_fp32_precision_setter(*key, "ieee")
    products = _read_products()
    try:
        allowed = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # it is set, and contradicts the new settings, which have just been cleared
        allowed = True

    def restore_precision() -> None:
        # Each of these also writes to the new settings.
        _write_products(products)
        torch.backends.cudnn.allow_tf32 = allowed
        for key, value in kept.items():
            torch._C._set_fp32_precision_setter(*key, value)

    restore_precision()
    return restore_precision


def set_precision(precision: str) -> None:
    """Set all of torch's precision settings: ``"ieee"`` for full float32, ``"tf32"`` for three digits on a GPU."""
    _write_products("highest" if precision == "ieee" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "ieee"
    if _has_new_settings():
        for backend, kind in _KINDS:
            if precision == "ieee" or backend == "cuda":
                torch._C._set_fp32_precision_setter(backend, kind, precision)


def _read_products() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it contradicts a setting of another backend than CUDA
        return "high" if torch.backends.cuda.matmul.allow_tf32 else "highest"


def _write_products(products: str) -> None:
    """Set the precision of matrix products the old way, and if possible no new setting but CUDA's.

    ``set_float32_matmul_precision`` writes to the settings of other backends too. If these are not set back, torch
    refuses to read the old setting once the user has changed it for CUDA alone (``allow_tf32``).
    """
    if products == "medium":
        torch.set_float32_matmul_precision(products)
    else:
        torch.backends.cuda.matmul.allow_tf32 = products == "high"


def _has_new_settings() -> bool:
    """Return whether this torch has settings by backend and operation (from 2.9 on)."""
    return hasattr(torch._C, "_get_fp32_precision_getter") and hasattr(torch._C, "_set_fp32_precision_setter")
