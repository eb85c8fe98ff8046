"""What torch is set to, for all code in the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from saltflat.loan import snapshot_precision


@contextmanager
def preserve_torch_state() -> Iterator[None]:
    """Whatever code inside of it sets, such as the default dtype, is as before afterwards."""
    dtype, device, threads = torch.get_default_dtype(), _get_default_device(), torch.get_num_threads()
    gradients, anomaly = torch.is_grad_enabled(), torch.is_anomaly_enabled()
    deterministic, warn = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    cudnn, precision_back = torch.backends.cudnn, snapshot_precision()
    flags = cudnn.enabled, cudnn.benchmark, cudnn.deterministic
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if _get_default_device() != device:
            # None where it was the usual one: naming that, too, would slow every call of torch down.
            torch.set_default_device(None if device.type == "cpu" else device)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_grad_enabled(gradients)
        torch.autograd.set_detect_anomaly(anomaly)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn)
        precision_back()
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = flags


def _get_default_device() -> torch.device:
    try:
        return torch.get_default_device()
    except AttributeError:  # torch 2.6, once the default was set to None
        return torch.device("cpu")
