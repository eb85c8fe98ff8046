"""Options that more than one command has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Model: TypeAlias = Annotated[
    str, typer.Option(help="package.module:function that makes the model; modules in this folder are found.")
]
Data: TypeAlias = Annotated[
    str,
    typer.Option(
        help="digits, mnist, fashion-mnist, cifar10, cifar100; a file .npz or .safetensors with inputs (or x) and "
        "targets (or y); or package.module:function that makes the data."
    ),
]
ModelArgs: TypeAlias = Annotated[str, typer.Option(help="Arguments of that function, as a JSON object.")]
Weights: TypeAlias = Annotated[
    Path | None, typer.Option(help="Trained weights: .safetensors, or a state_dict saved by torch.")
]
DataDir: TypeAlias = Annotated[
    Path, typer.Option(envvar="SALTFLAT_DATA", help="Where named data sets are, as torchvision lays them out.")
]
Split: TypeAlias = Annotated[str | None, typer.Option(help="train (if not given) or test, of a named data set.")]
Skip: TypeAlias = Annotated[int, typer.Option(help="Leave out so many examples at the beginning.")]
Limit: TypeAlias = Annotated[int | None, typer.Option(help="Take at most so many examples.")]
Normalize: TypeAlias = Annotated[
    str, typer.Option(help="Inputs of a named data set: none ([0, 1]), half ([-1, 1]) or standard.")
]
Loss: TypeAlias = Annotated[str, typer.Option(help="cross_entropy, mse or bce_with_logits.")]
Measures: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="Names, with commas or one by one; quick (if not given: what one sweep over the data gives), invariant "
        "(what rescaling leaves unchanged) or all."
    ),
]
Columns: TypeAlias = Annotated[str, typer.Option(help="exact, top (top:5) or sampled (sampled:16).")]
Layers: TypeAlias = Annotated[list[str] | None, typer.Option(help="Names of modules or parameters; all if not given.")]
Device: TypeAlias = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")]
Memory: TypeAlias = Annotated[str, typer.Option(help="Working memory beyond the model and the results.")]
Seed: TypeAlias = Annotated[
    int, typer.Option(help="Of random columns, and of weights that the model's function draws.")
]
Logits: TypeAlias = Annotated[
    str, typer.Option(help="none; std or l2 to bring each example's outputs to one scale first.")
]
Diagonal: TypeAlias = Annotated[
    str, typer.Option(help="exact, finite_difference, finite_difference_printed or hutchinson.")
]
Initial: TypeAlias = Annotated[Path | None, typer.Option(help="Weights before training, for distances from them.")]
Html: TypeAlias = Annotated[
    Path | None, typer.Option(help="Write it to this file as one page for a browser, which loads nothing.")
]
Quiet: TypeAlias = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
Traceback: TypeAlias = Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")]
