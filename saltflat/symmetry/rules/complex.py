"""Complex numbers, whose two parts have one scale, and Fourier transforms."""

from __future__ import annotations

from typing import Any

from saltflat.symmetry.watch import OperationCall, rule


@rule("complex")
def propagate_complex(call: OperationCall) -> Any:
    return call.scales.equate(*map(call.get_scale_ids, call.args[:2]))


@rule("view_as_complex")
def propagate_view_as_complex(call: OperationCall) -> Any:
    return call.scales.equate_along(call.get_scale_ids(call.args[0]), [-1])


@rule("view_as_real")
def propagate_view_as_real(call: OperationCall) -> Any:
    return call.get_scale_ids(call.args[0])[..., None].expand(call.out.shape)


@rule("_conj _conj_physical _neg_view")
def propagate_conjugate(call: OperationCall) -> Any:
    return call.get_scale_ids(call.args[0])


@rule("_fft_r2c _fft_c2r _fft_c2c")
def propagate_fft(call: OperationCall) -> Any:
    """Every number of the result is a sum of all along the axes."""
    return call.scales.equate_along(call.get_scale_ids(call.args[0]), call.args[1], keepdim=True).expand(call.out.shape)
