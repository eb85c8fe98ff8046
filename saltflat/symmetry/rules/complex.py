"""Complex numbers, whose two parts have one scale, and Fourier transforms."""

from __future__ import annotations

from typing import Any

from saltflat.symmetry.watch import Call, rule


@rule("complex")
def pairs(call: Call) -> Any:
    return call.scales.join(*map(call.ids, call.args[:2]))


@rule("view_as_complex")
def pairs_up(call: Call) -> Any:
    return call.scales.join_along(call.ids(call.args[0]), [-1])


@rule("view_as_real")
def takes_apart(call: Call) -> Any:
    return call.ids(call.args[0])[..., None].expand(call.out.shape)


@rule("_conj _conj_physical _neg_view")
def turns(call: Call) -> Any:
    return call.ids(call.args[0])


@rule("_fft_r2c _fft_c2r _fft_c2c")
def mixes(call: Call) -> Any:
    """Every number of the result is a sum of all along the axes."""
    return call.scales.join_along(call.ids(call.args[0]), call.args[1], keepdim=True).expand(call.out.shape)
