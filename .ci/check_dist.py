"""Check a built sdist and wheel: every source file and page, and nothing beside ucudnn."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

FOLDERS = {"ucudnn": "ucudnn", "solvers": "ucudnn/solvers", "cache": "ucudnn/cache"}
# In the sdist only.
BESIDE = ("docs", "tests", "examples", "benchmarks")
FILES = {"CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt", "mkdocs.yml"}


def expected_files() -> set[str]:
    """Package files as they must arrive, from the folders that hold them."""
    files = {"ucudnn/py.typed"}
    for folder, target in FOLDERS.items():
        for pattern in ("*.py", "*.c", "*.json"):
            for path in Path(folder).rglob(pattern):
                files.add(f"{target}/{path.relative_to(folder)}")
    return files


def check(folder: Path) -> None:
    """Exit with a message if the sdist or the wheel in a folder is not as it must be."""
    expected = expected_files()
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = {name for name in names if ".dist-info/" in name}
        report("wheel", expected, names - info)
        if not any(name.endswith("/licenses/LICENSE") for name in info):
            sys.exit("the wheel lacks LICENSE")
        entry = next(name for name in info if name.endswith("/entry_points.txt"))
        if "ucudnn = ucudnn.cli:main" not in archive.read(entry).decode():
            sys.exit("the wheel lacks the console script")
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
        names = {member.name.partition("/")[2] for member in members if member.isfile()}
        links = [member.name for member in members if member.issym()]
        if links:
            sys.exit(f"the sdist holds symbolic links: {links}")
        report("sdist", expected, {name for name in names if name.startswith("ucudnn/")})
        lacking = FILES - names
        if lacking:
            sys.exit(f"the sdist lacks {sorted(lacking)}")
        for beside in BESIDE:
            files = {str(path) for path in Path(beside).rglob("*") if path.is_file()}
            files = {path for path in files if "__pycache__" not in path}
            report(beside, files, {name for name in names if name.startswith(f"{beside}/")})
        outside = {name for name in names if name.startswith(("solvers/", "cache/"))}
        if outside:
            sys.exit(f"the sdist holds solvers or cache at top level: {sorted(outside)}")


def report(what: str, expected: set[str], found: set[str]) -> None:
    """Exit with the differences if there are any."""
    if expected != found:
        missing, surplus = sorted(expected - found), sorted(found - expected)
        sys.exit(f"the {what} is wrong: missing {missing}, surplus {surplus}")
    print(f"{what}: {len(found)} files, complete, nothing else")


if __name__ == "__main__":
    check(Path(sys.argv[1]))
