"""Draw the picture of docs/architecture.md: the rooms of the package and who imports whom.

    python docs/make_architecture.py docs/architecture.svg

Rows and rooms are those of the import contract in pyproject.toml; what each room imports is read
from the source, without what follows from other imports.
The same file comes out every time; a test compares it with the committed one.
"""

from __future__ import annotations

import ast
import os
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
VALUES = "values"
# One line for each room; a room without one cannot be drawn.
ROLE_BY_ROOM = {
    "__main__": "python -m ucudnn",
    "cli": "commands: they parse, call one function and print",
    "check": "is a plan still true here?",
    "convert": "swaps the layers of a model",
    "distributed": "one plan for all ranks of a job",
    "doctor": "describes this machine",
    "frameworks": "trainers of Lightning and Transformers follow a plan",
    "unchanged": "plans the model of a script that is not changed",
    "types": "names of types, for annotations",
    "nn": "layers that follow a plan",
    "steps": "a whole step becomes a plan: its convolutions, its memory, its segments, "
    "and what it gains",
    "kernels": "many candidates become the plan of a kernel: what to measure next, which "
    "splits, who wins",
    "benchmark": "times one candidate; decides nothing",
    "execution": "runs a plan: the one loop over the parts of a split, autograd, the override of "
    "torch's operators",
    "backends": "what a device can compute: candidates, operands, time and memory",
    "cache": "measurements on disk",
    "reports": "plans as text and HTML",
    "solvers": "exact search over integers",
    VALUES: "frozen values that every part may use: ",
}
# The way of the data: what happens, and in which room.
WAY = (
    ("steps", "A model runs once on fake tensors. Each of its convolutions becomes a Problem."),
    ("kernels", "The scheduler takes the problem with most to gain and lists its candidates."),
    ("cache", "What was measured before is read; what is measured now is added."),
    ("benchmark", "A candidate that may be part of the best split is timed and its memory read."),
    ("solvers", "The fastest split of every batch is found, or what to time next."),
    (VALUES, "The splits of all problems make a Plan, which can be saved and sent."),
    ("convert", "The layers of the model are swapped for those of nn, which hold the plan."),
    ("execution", "A call looks its split up and runs each chunk by its algorithm of the backend."),
)
WIDTH, MARGIN, GAP = 960, 20, 12
ROW, BOX, LINE = 86, 70, 13
TOP = 20
BORDER = 'rx="5" fill="#f4f7fb" stroke="#345"'
GREY = 'text-anchor="middle" fill="#567" font-style="italic" font-size="10"'


def layers() -> list[list[str]]:
    """The rooms by rows, the outermost first; the last row is the values."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = settings["tool"]["importlinter"]["contracts"]
    rows = [[name.strip() for name in row.split("|")] for row in contract["layers"][:-1]]
    return [*rows, [VALUES]]


def values() -> list[str]:
    """The modules and folders on the last line of the contract."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = settings["tool"]["importlinter"]["contracts"]
    return [name.strip() for name in contract["layers"][-1].split(":")]


def imports(package: Path) -> dict[str, set[str]]:
    """The rooms that each room imports, inside functions too, but not for type checkers alone."""
    inner = set(values())
    uses: dict[str, set[str]] = {room: set() for row in layers() for room in row}
    for folder, _, files in os.walk(package, followlinks=True):
        for path in (Path(folder, file) for file in files if file.endswith(".py")):
            parts = path.relative_to(package).with_suffix("").parts
            # the package's own __init__ only passes names on
            if parts != ("__init__",):
                room = VALUES if parts[0] in inner else parts[0]
                found = set(_imported(ast.parse(path.read_text(encoding="utf-8"))))
                uses[room] |= {VALUES if name in inner else name for name in found} - {room}
    return uses


def _imported(node: ast.AST) -> Iterator[str]:
    """The parts of ucudnn that statements load, each by its first name."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (
            alias.name.split(".")[1] for alias in node.names if alias.name.startswith("ucudnn.")
        )
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        head, *rest = node.module.split(".")
        if head == "ucudnn":
            named = rest[:1] or [alias.name for alias in node.names]
            # `from ucudnn import __version__` is a name of the package, not a room
            yield from (name for name in named if not name.startswith("__"))
    for child in ast.iter_child_nodes(node):
        yield from _imported(child)


def reduced(uses: dict[str, set[str]]) -> dict[str, set[str]]:
    """The imports that do not follow from others: without a -> c where a -> b -> c."""
    reached: dict[str, set[str]] = {}
    for room in TopologicalSorter(uses).static_order():
        reached[room] = set(uses[room]).union(*(reached[other] for other in uses[room]))
    return {
        room: {name for name in names if not any(name in reached[other] for other in names)}
        for room, names in uses.items()
    }


def places() -> dict[str, tuple[float, float, float]]:
    """Left, top and width of each room's box: a row shares the width."""
    found = {}
    for number, row in enumerate(layers()):
        width = min((WIDTH - 2 * MARGIN - GAP * (len(row) - 1)) / len(row), 460)
        if row == [VALUES]:
            width = WIDTH - 2 * MARGIN
        left = (WIDTH - width * len(row) - GAP * (len(row) - 1)) / 2
        for place, room in enumerate(row):
            found[room] = (left + place * (width + GAP), TOP + number * ROW, width)
    return found


def text(left: float, top: float, words: str, style: str = 'text-anchor="middle"') -> str:
    return f'<text x="{left:.1f}" y="{top:.1f}" {style}>{words}</text>'


def box(room: str, uses: set[str], place: tuple[float, float, float]) -> list[str]:
    """A rectangle with the room's name, its role and what it imports."""
    left, top, width = place
    role = ROLE_BY_ROOM[room] + (", ".join(values()) if room == VALUES else "")
    words = textwrap.wrap(role, int(width / 6.6))
    middle = left + width / 2
    return [
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{BOX}" {BORDER}/>',
        text(middle, top + 17, room, 'text-anchor="middle" font-weight="bold" font-size="14"'),
        *(text(middle, top + 32 + LINE * at, line) for at, line in enumerate(words)),
        *([text(middle, top + BOX - 6, f"imports {', '.join(sorted(uses))}", GREY)] * bool(uses)),
        *badges(room, left, top),
    ]


def badges(room: str, left: float, top: float) -> list[str]:
    """The numbers of the steps of the data's way that happen in a room."""
    lines = []
    for number, (where, _) in enumerate(WAY, start=1):
        if where == room:
            lines.append(f'<circle cx="{left:.1f}" cy="{top}" r="10" fill="#b3261e"/>')
            style = 'text-anchor="middle" fill="#fff" font-weight="bold"'
            lines.append(text(left, top + 4, str(number), style))
    return lines


def draw(package: Path) -> str:
    """The whole picture as SVG."""
    boxes = places()
    uses = reduced(imports(package))
    bottom = TOP + len(layers()) * ROW + 5
    legend = [
        text(MARGIN, bottom + 18 * at, f"{at + 1}  {words}", 'font-size="13"')
        for at, (_, words) in enumerate(WAY)
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 18 * len(WAY)}">',
        '<g font-family="sans-serif" font-size="11" fill="#222">',
        "<title>Parts of ucudnn: each imports only parts below it</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        *(line for room, place in boxes.items() for line in box(room, uses[room], place)),
        *legend,
        "</g>",
        "</svg>\n",
    ]
    return "\n".join(parts)


def main(path: str) -> None:
    Path(path).write_text(draw(ROOT / "ucudnn"), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
