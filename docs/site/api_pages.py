"""The pages of the API reference, made from the public names of the package."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import saltflat
from saltflat.measures.registry import MEASURES

# The functions of the top level by what they are for; those that are in no group come last.
GROUPS = {
    "Measure": ("measure", "plan", "Meter", "Report", "compare", "list_measures", "certify"),
    "Statistics and eigenvalues": ("compute_statistics", "compute_eigenvalues", "compute_spectrum"),
    "Rescalings": ("audit_invariance", "find_symmetries", "rescale", "rebalance", "fold"),
    "The loss around the weights": ("compute_landscape", "feature_robustness"),
    "Bounds": ("certify_error", "compute_bounds"),
    "Studies": ("Study",),
    "Errors": ("SaltflatError",),
}
GROUPS["More"] = tuple(sorted({*saltflat.__all__} - {name for names in GROUPS.values() for name in names}))

# Public packages, and names of them that their modules define.
PACKAGES: dict[str, tuple[str, ...]] = {
    "results": (),
    "measures": (),
    "statistics": ("saltflat.engine.context.Context", "saltflat.engine.context.StatisticResult"),
    "layers": (
        "saltflat.layers.layer",
        "saltflat.layers.Geometry",
        "saltflat.gradients.FactoredGradient",
        "saltflat.gradients.DenseGradient",
        "saltflat.gradients.OuterProductGradient",
        "saltflat.gradients.RowSparseGradient",
    ),
    "symmetry": ("saltflat.symmetry.group.Symmetries",),
    "audit": (),
    "bounds": (
        "saltflat.bounds.registry.bound",
        "saltflat.bounds.evidence.Evidence",
        "saltflat.bounds.distributions.Gaussian",
        "saltflat.bounds.robustness_result.FeatureRobustness",
    ),
    "landscape": (),
    "spectrum": (),
    "training": (),
    "integrations": (
        "saltflat.integrations.lightning.FlatnessCallback",
        "saltflat.integrations.huggingface.FlatTraining",
    ),
    "datasets": (
        "saltflat.datasets.read_data",
        "saltflat.datasets.Reader",
        "saltflat.datasets.register_reader",
        "saltflat.datasets.find_reader",
    ),
    "studies": (
        "saltflat.studies.networks.register_network",
        "saltflat.studies.rebuild.load_trained_network",
        "saltflat.studies.scores.score",
    ),
    "errors": (),
}


def make_api_pages() -> Iterator[tuple[Path, str]]:
    """Yield the place and the text of every page of the reference."""
    yield Path("api/index.md"), make_index()
    yield Path("api/saltflat.md"), make_top_page()
    for package, extra in PACKAGES.items():
        yield Path(f"api/{package}.md"), make_package_page(package, extra)


def make_index() -> str:
    """Return the list of all pages and names."""
    lines = ["# API reference", "", "The functions of `saltflat`:", ""]
    lines += ["| name | what it does |", "| --- | --- |"]
    for names in GROUPS.values():
        for name in names:
            lines.append(f"| {{py:obj}}`saltflat.{name}` | {describe(getattr(saltflat, name))} |")
    lines += ["", "Its packages, which also hold the types of results and what extensions use:", ""]
    lines += ["| package | contents |", "| --- | --- |"]
    for package in PACKAGES:
        module = importlib.import_module(f"saltflat.{package}")
        lines.append(f"| [saltflat.{package}]({package}.md) | {describe(module)} |")
    listed = "\n".join(["saltflat", *PACKAGES])
    return "\n".join([*lines, "", "```{toctree}", ":hidden:", "", listed, "```", ""])


def make_top_page() -> str:
    """Return the page of the names in ``saltflat.__all__``."""
    lines = ["# saltflat", ""]
    for title, names in GROUPS.items():
        if not names:
            continue
        lines += [f"## {title}", "", *(line for name in names for line in make_directive(f"saltflat.{name}"))]
    return "\n".join(lines)


def make_package_page(package: str, extra: Iterable[str]) -> str:
    """Return the page of one package: its public names that are not documented with those of the top level."""
    module = importlib.import_module(f"saltflat.{package}")
    listed = getattr(module, "__all__", ())
    if package == "errors":
        listed = [name for name, each in vars(module).items() if inspect.isclass(each) and issubclass(each, Exception)]
    top = [getattr(saltflat, name) for name in saltflat.__all__]
    names = [f"{module.__name__}.{name}" for name in listed if not _is_any(getattr(module, name), top)]
    lines = [f"# saltflat.{package}", "", f"{inspect.getdoc(module).splitlines()[0]}".replace("``", "`"), ""]
    also = [f"{{py:obj}}`saltflat.{name}`" for name in listed if _is_any(getattr(module, name), top)]
    if also:
        lines += [f"See also {', '.join(also)}.", ""]
    for name in [*names, *extra]:
        lines += make_directive(name)
    if package == "measures":
        functions = [each.function for each in MEASURES.values()]
        for home, members in groupby(functions, key=lambda each: each.__module__):
            lines += [
                f"## {home}",
                "",
                *(line for each in members for line in make_directive(f"{home}.{each.__name__}")),
            ]
    return "\n".join(lines)


def make_directive(name: str) -> list[str]:
    """Return the lines that document one function or class; none for constants."""
    home, _, last = name.rpartition(".")
    value = getattr(importlib.import_module(home), last)
    if inspect.isclass(value):
        foreign = sorted({base.__name__ for base in value.__mro__ if not base.__module__.startswith("saltflat")})
        options = [":members:", ":show-inheritance:"] if issubclass(value, Exception) else [":members:"]
        options += [] if issubclass(value, Exception) else [f":inherited-members: {', '.join(foreign)}"]
        return ["```{eval-rst}", f".. autoclass:: {name}", *(f"   {each}" for each in options), "```", ""]
    if inspect.isfunction(value):
        return ["```{eval-rst}", f".. autofunction:: {name}", "```", ""]
    return []


def describe(value: object) -> str:
    """Return the first sentence of a docstring, for a cell of a table."""
    text = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
    text = re.sub(r":(func|class|mod|meth|data):`~?([^`]*)`", r"`\2`", text)
    return text.replace("``", "`").replace("|", "\\|")


def _is_any(value: object, those: Iterable[object]) -> bool:
    return any(value is each for each in those)
