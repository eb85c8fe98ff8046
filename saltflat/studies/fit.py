"""Whether the runs of a study can be done with its examples; asked before any work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from saltflat.errors import SaltflatError, format_error_line
from saltflat.problem import Problem
from saltflat.studies.building import build_network
from saltflat.studies.canonical import dump_canonical_json
from saltflat.studies.examples import Examples
from saltflat.studies.grid import make_recipe, raise_problems
from saltflat.studies.precision import DTYPES
from saltflat.studies.recipe import SETTINGS, Recipe

if TYPE_CHECKING:
    from saltflat.studies.study import Study

# What of a recipe beside its architecture can make building fail.
BUILDING = ("network", "init", "dropout", "dtype")


def check_fit(study: Study, runs: Mapping[str, Mapping[str, Any]], examples: Examples) -> None:
    """Refuse a study that its examples do not allow, with all that is wrong."""
    if study.train is not None:
        return
    recipes = [make_recipe(config) for config in runs.values()]
    sizes = dict.fromkeys((r.train_size, r.confusion, r.batch, r.nesterov, r.momentum, r.optimizer) for r in recipes)
    problems = [text for each in sizes for text in _find_size_problems(*each, len(examples.train_inputs))]
    if len(examples.shape) != 3:
        problems += [
            f"Got augment={kind!r} for inputs of shape {examples.shape}. Want images: channels, height, width. "
            "Do: leave augment out."
            for kind in dict.fromkeys(recipe.augment for recipe in recipes if recipe.augment != "none")
        ]
    structures = {
        dump_canonical_json([{name: getattr(r, name) for name in BUILDING}, r.architecture]): r for r in recipes
    }
    # An epoch that ends in a single example: BatchNorm has nothing to take a variance of.
    lonely = {_compute_last_batch_size(recipe, examples): recipe for recipe in recipes}.get(1)
    problems += [
        text for recipe in structures.values() for text in _find_structure_problems(study, recipe, examples, lonely)
    ]
    raise_problems(problems, f"the study {study.name!r}")


def _find_size_problems(
    train_size: int | None, confusion: int, batch: int, nesterov: bool, momentum: float, optimizer: str, there: int
) -> Iterator[str]:
    taken = there - confusion if train_size is None else train_size
    if taken < 1 or taken + confusion > there:
        wanted = "all" if train_size is None else f"{train_size:,}"
        yield (
            f"Got train_size={wanted} and confusion={confusion:,} of {there:,} training examples. Want both to fit in. "
            "Do: lower one of them."
        )
    elif batch > taken + confusion:
        yield (
            f"Got batch={batch:,} for {taken + confusion:,} training examples. Want at most these. "
            "Do: lower the batch, or take more examples."
        )
    if nesterov and momentum == 0 and optimizer == "sgd":
        yield "Got nesterov=True with momentum=0. Want momentum to look ahead by. Do: give momentum."


def _compute_last_batch_size(recipe: Recipe, examples: Examples) -> int:
    """How many examples the last step of an epoch has."""
    there = len(examples.train_inputs)
    taken = there if recipe.train_size is None else recipe.train_size + recipe.confusion
    return taken % recipe.batch or recipe.batch


def _find_structure_problems(study: Study, recipe: Recipe, examples: Examples, lonely: Recipe | None) -> Iterator[str]:
    """Build the network once, run it on two examples, and see that the layers to measure are there."""
    told = ", ".join(f"{name}={value!r}" for name, value in recipe.architecture.items()) or "no arguments"
    network = f"the network {recipe.network!r} with {told}"
    try:
        model = build_network(recipe, examples.shape, examples.classes)
        inputs = examples.train_inputs[:2]
        inputs = inputs.to(DTYPES[recipe.dtype]) if inputs.is_floating_point() else inputs
        with torch.no_grad():
            outputs = model(inputs)
    except SaltflatError as error:  # says itself what is wrong
        yield str(error)
        return
    except Exception as error:  # a network of the user's, or sizes that do not fit, can fail in any way
        yield (
            f"Got {format_error_line(error)} from {network} on inputs of shape {examples.shape}. Want a network that "
            "takes them. Do: change its arguments, or the data."
        )
        return
    if tuple(outputs.shape) != (len(inputs), examples.classes):
        yield (
            f"Got outputs of shape {tuple(outputs.shape)} for {len(inputs)} examples from {network}. "
            f"Want {(len(inputs), examples.classes)}. Do: make it end in one output per class."
        )
        return
    if lonely is not None:
        try:
            with torch.no_grad():
                model.train()(inputs[:1])
        except Exception as error:
            yield (
                f"Got batch={lonely.batch}, with which an epoch ends in a single example, and {network} cannot be "
                f"trained on one ({format_error_line(error)}). Want another batch. Do: change batch or train_size."
            )
            return
        finally:
            model.eval()
    layers = study.measure.get("layers")
    if layers is not None:
        try:
            Problem.build(model, (inputs, examples.train_labels[:2]), layers=layers)
        except Exception as error:
            yield str(error)


assert set(BUILDING) <= set(SETTINGS)
