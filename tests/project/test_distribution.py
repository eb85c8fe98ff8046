"""The package builds, installs and runs without the repository, and what describes it agrees."""

import email
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import saltflat

ROOT = Path(__file__).parent.parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TRY = """
import torch
import saltflat
print(saltflat.__file__)
model, data = torch.nn.Linear(3, 2), (torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))
report = saltflat.measure(model, data, measures="hessian_trace")
report.to_html("report.html")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the source distribution, and the wheel that is built from it."""
    pytest.importorskip("hatchling", reason="needs the dev extra")
    folder = tmp_path_factory.mktemp("package")
    run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)], ROOT)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    source = next(path for path in folder.iterdir() if path.is_dir())
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], source)
    return folder


def run(command: list[str], folder: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_source_distribution_has_everything_that_is_tracked(built: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    source = next(path for path in built.iterdir() if path.is_dir())
    tracked = run(["git", "ls-files", "-z"], ROOT).rstrip("\0").split("\0")
    assert [name for name in tracked if (ROOT / name).exists() and not (source / name).exists()] == []


def test_the_wheel_has_the_package_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    there = {path for path in (ROOT / "saltflat").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert set(names) == {path.relative_to(ROOT).as_posix() for path in there}


def test_the_wheel_installs_and_runs_where_there_is_no_repository(built: Path, tmp_path: Path) -> None:
    pytest.importorskip("pip", reason="installs with pip")
    target = tmp_path / "installed"
    options = ["--no-deps", "--no-index", "--no-compile", "--quiet", "--target", str(target)]
    run([sys.executable, "-m", "pip", "install", *options, str(next(built.glob("*.whl")))], tmp_path)
    printed = run([sys.executable, "-c", TRY], tmp_path, PYTHONPATH=str(target))
    assert printed.strip() == str(target / "saltflat" / "__init__.py")
    assert "hessian_trace" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_readme_of_the_package_has_no_relative_links(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    text = str(metadata.get_payload())
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", text)
    url = PROJECT["urls"]["Repository"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert len(links) > 20
    for image, link in links:
        path = link.removeprefix(f"{url}/{'raw' if image else 'blob'}/main/")
        assert (ROOT / path).is_file(), link
        assert path != link, link


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert PROJECT["version"] == citation["version"] == saltflat.__version__
    assert citation["license"] == PROJECT["license"]
    # What the format requires.
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_addresses_of_the_project_are_in_one_place() -> None:
    urls = PROJECT["urls"]
    assert [url for url in urls.values() if not url.startswith(urls["Repository"])] == []
    pages = [*ROOT.glob("*.md"), *ROOT.glob("*.cff"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/**/*.yml")]
    assert [path.name for path in pages if urls["Repository"] in path.read_text(encoding="utf-8")] == []


def test_continuous_integration_runs_on_every_python_that_is_named() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    named = [each.rpartition(" :: ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert job["strategy"]["matrix"]["python"] == named
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
