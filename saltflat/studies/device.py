"""The device that a study works on."""

from __future__ import annotations

import torch

from saltflat.errors import DeviceError, first_line


def device_for(name: str, here: bool = True) -> str:
    """The device of this name; ``"auto"`` is a GPU if there is one. Looked for only where this process will use it."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if here:
            torch.empty(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceError(
            f"Got the device {name!r}, which cannot be used here ({first_line(error)}). "
            "Want one that torch can reach. Do: use 'cpu', or 'auto'."
        ) from error
    return name
