"""What ``import saltflat`` gives, and what it costs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import saltflat

ROOT = Path(saltflat.__file__).parents[1]
MODULES = (
    *("audit", "bounds", "datasets", "errors", "integrations", "landscape", "layers", "measures", "render", "results"),
    *("spectrum", "statistics", "studies", "symmetry", "training"),
)


def run_python(*words: str) -> str:
    """What a new process prints."""
    found = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    assert sorted(dir(saltflat)) == sorted([*saltflat.__all__, *MODULES, "__version__"])
    code = "import saltflat; print(*dir(saltflat))"
    assert run_python("-c", code).split() == dir(saltflat), "the names do not depend on what is loaded"


@pytest.mark.parametrize("name", saltflat.__all__)
def test_public_names_are_reachable(name: str) -> None:
    value = getattr(saltflat, name)
    assert callable(value)
    assert value.__name__ == name


def test_modules_are_reachable_after_importing_the_package() -> None:
    code = "import saltflat; [getattr(saltflat, name) for name in dir(saltflat)]; print(saltflat.training.__name__)"
    assert run_python("-c", code) == "saltflat.training\n"


def test_other_names_are_no_attributes() -> None:
    with pytest.raises(AttributeError, match="no attribute 'mesure'"):
        _ = saltflat.mesure


def public_names() -> Iterator[tuple[str, str]]:
    for package in ("saltflat", *(f"saltflat.{name}" for name in MODULES)):
        for name in getattr(import_module(package), "__all__", ()):
            yield package, name


def test_no_public_name_is_both_a_module_and_something_else() -> None:
    both = [
        f"{package}.{name}"
        for package, name in public_names()
        if not isinstance(getattr(import_module(package), name), ModuleType)
        and hasattr(import_module(package), "__path__")
        and find_spec(f"{package}.{name}") is not None
    ]
    assert both == []
    hidden = [f"{p}.{n}" for p, n in public_names() if isinstance(getattr(import_module(p), n), ModuleType)]
    assert hidden == [], "modules are not listed in __all__, or have replaced what was"


def test_importing_the_package_and_printing_help_need_no_torch() -> None:
    code = "import sys, saltflat; print([name for name in ('torch', 'numpy', 'scipy') if name in sys.modules])"
    assert run_python("-c", code) == "[]\n"
    for words in ([], ["measure"], ["study", "run"]):
        code = (
            f"import sys; sys.argv = ['saltflat', *{words!r}, '--help']\n"
            "from saltflat.cli import main\n"
            "try:\n    main()\nfinally:\n"
            "    print('loaded:', [name for name in ('torch', 'numpy', 'scipy') if name in sys.modules])"
        )
        assert run_python("-c", code).endswith("loaded: []\n"), words


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert saltflat.__version__ == project["version"]
