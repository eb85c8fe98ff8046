"""Where in the user's code something happened."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn

LIBRARY = str(Path(__file__).parents[1]) + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep  # not torchvision


class CodeLocation(NamedTuple):
    """The innermost module of the model, and the innermost line of code that is not torch's."""

    module: str
    line: str


def find_code_location(names: Mapping[int, str]) -> CodeLocation:
    """Where the forward pass of a model with these modules is just now."""
    frame: FrameType | None = sys._getframe(1)
    module, line = None, ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(LIBRARY) and module is not None:
            break  # whoever called the model
        owner = frame.f_locals.get("self")
        if module is None and isinstance(owner, nn.Module):
            module = names.get(id(owner))
        if not line and not file.startswith((LIBRARY, TORCH, "<frozen")):
            text = linecache.getline(file, frame.f_lineno).strip()
            line = f"{Path(file).name}:{frame.f_lineno}" + (f": {text}" if text else "")
        frame = frame.f_back
    return CodeLocation(module or "", line)
