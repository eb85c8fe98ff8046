"""The device that a study works on, and what a task needs for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from saltflat.errors import DeviceError, format_error_line


def resolve_device(name: str, here: bool = True) -> str:
    """The device of this name; ``"auto"`` is a GPU if there is one. Looked for only where this process will use it."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if here:
            torch.empty(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceError(
            f"Got the device {name!r}, which cannot be used here ({format_error_line(error)}). "
            "Want one that torch can reach. Do: use 'cpu', or 'auto'."
        ) from error
    return name


def resolve_resources(executor: str, device: str, given: Mapping[str, float]) -> dict[str, float]:
    """What one task asks of the executor: on a cluster a GPU, where the study works on one, unless it is said.

    Example:
        >>> resolve_resources("ray", "cuda", {"cpus": 2}), resolve_resources("ray", "cuda", {"gpus": 0.5})
        ({'gpus': 1, 'cpus': 2}, {'gpus': 0.5})
        >>> resolve_resources("ray", "cpu", {}), resolve_resources("processes", "cuda", {})
        ({}, {})
    """
    place = torch.device(device)
    if executor != "ray" or place.type != "cuda":
        return dict(given)
    found = {"gpus": 1, **given}
    # A task sees the GPUs that Ray gave it and no others, counted from 0.
    if (place.index or 0) >= max(1, found["gpus"]):
        raise DeviceError(
            f"Got the device {device!r} with the executor 'ray', which gives each task a GPU of its own. "
            "Want no number. Do: use 'cuda'."
        )
    return found
