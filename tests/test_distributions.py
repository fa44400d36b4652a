"""The distributions as they are released: one version, exact pins of each other, whole wheels made from sdists."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.campaigns.distributions import ROOT, build, name_of, packages

PROJECTS = {
    name_of(package): tomllib.loads((package / "pyproject.toml").read_text())["project"] for package in packages()
}


def requirements(project: dict[str, object]) -> list[str]:
    extras = project.get("optional-dependencies", {})
    assert isinstance(extras, dict)
    needed = project.get("dependencies", [])
    assert isinstance(needed, list)
    return [*needed, *(one for names in extras.values() for one in names)]


def test_all_distributions_have_one_version() -> None:
    assert len(PROJECTS) == 7
    assert len({project["version"] for project in PROJECTS.values()}) == 1


@pytest.mark.parametrize("name", sorted(PROJECTS))
def test_other_distributions_are_required_in_the_same_version(name: str) -> None:
    own = [one for one in requirements(PROJECTS[name]) if one.startswith("lockstep")]
    assert all(one.endswith(f"=={PROJECTS[name]['version']}") for one in own), own


def test_every_distribution_is_installed_by_the_first_one() -> None:
    reached, new = set[str](), {"lockstep"}
    while new:
        reached |= new
        needed = {one.split("==")[0].split("[")[0] for name in new for one in requirements(PROJECTS[name])}
        new = (needed & set(PROJECTS)) - reached
    assert reached == set(PROJECTS)


@pytest.mark.parametrize("package", packages(), ids=name_of)
def test_a_wheel_has_every_file_of_its_package(package: Path, tmp_path: Path) -> None:
    sdist, wheel = build(package, tmp_path)
    listed = subprocess.run(
        ["git", "ls-files", "src"], cwd=package, capture_output=True, text=True, check=False
    ).stdout.split()
    sources = {path.removeprefix("src/") for path in listed}
    if not sources:
        pytest.skip("the checkout has no git repository to list its files")
    with zipfile.ZipFile(wheel) as file:
        packed = {name for name in file.namelist() if ".dist-info/" not in name}
    assert packed == sources
    assert ("lockstep/__init__.py" in packed) == (package.name == "lockstep")
    with tarfile.open(sdist) as file:
        assert any(name.endswith("/PKG-INFO") for name in file.getnames())


def test_the_version_is_shown() -> None:
    done = subprocess.run([sys.executable, "dev.py", "version"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == PROJECTS["lockstep"]["version"]
