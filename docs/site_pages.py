"""Hook of mkdocs: the pages that are made when the site is built, and links out of docs/.

README.md, CHANGELOG.md and CONTRIBUTING.md become pages; the references of the Python API and of
the command line are made from docstrings and from the commands. Pages link to files of the
repository that are not part of the site, for readers of a checkout; in the site such a link becomes
the path of the file.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# Documents beside docs/, by the address of their page.
DOCUMENTS = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
MODULES = ("ucudnn", "ucudnn.types", "ucudnn.errors", "ucudnn.distributed", "ucudnn.nn")
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")
# A comment that tells the tests what to do with the block below it.
_MARK = re.compile(r"^<!-- .* -->\n", re.M)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made."""
    # Tests import this module where mkdocs is not installed.
    from mkdocs.structure.files import File

    for address, text in pages().items():
        files.append(File.generated(config, address, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite the links of a page for the site."""
    address = page.file.src_uri
    source = ROOT / DOCUMENTS[address] if address in DOCUMENTS else DOCS / address
    return relinked(markdown, source.parent, address)


def pages() -> dict[str, str]:
    """Markdown of the pages that are made, by address."""
    made = {address: (ROOT / path).read_text("utf-8") for address, path in DOCUMENTS.items()}
    made["cli.md"] = command_line()
    made |= {f"api/{module}.md": interface(module) for module in MODULES}
    return made


def relinked(markdown: str, folder: Path, address: str) -> str:
    """A page without marks, whose links lead to pages or are paths of the repository.

    Args:
        markdown: the page as it is written.
        folder: where its file lies, from which its links start.
        address: of the page in the site.
    """
    pages_by_file = {(ROOT / path).resolve(): page for page, path in DOCUMENTS.items()}

    def rewritten(link: re.Match[str]) -> str:
        file = Path(os.path.normpath(folder / link["target"]))
        if not file.exists():
            # Code that looks like a link; or a broken link, which mkdocs reports.
            return link[0]
        if file in pages_by_file:
            target = pages_by_file[file]
        elif file.is_relative_to(DOCS) and file.is_file() and file.suffix != ".py":
            target = file.relative_to(DOCS).as_posix()
        else:
            path, text = file.relative_to(ROOT).as_posix(), link["text"]
            return f"`{path}`" if text.strip("/") == path else f"{text} (`{path}`)"
        target = os.path.relpath(target, Path(address).parent)
        # Readers of a checkout look for files, those of the site for pages.
        text = title_of(file) if link["text"].endswith(".md") else link["text"]
        return f"[{text}]({target}{link['anchor'] or ''})"

    return _LINK.sub(rewritten, _MARK.sub("", markdown))


def title_of(file: Path) -> str:
    """The first heading of a page."""
    headings = re.findall(r"^# (.+)$", file.read_text("utf-8"), re.M)
    return headings[0] if headings else file.name


def interface(module: str) -> str:
    """The page of a module: its docstring, and an entry for each public name."""
    entries = "".join(f"\n::: {module}.{name}\n" for name in public_names(module))
    options = (
        "    options: {members: false, show_root_heading: false, show_root_toc_entry: false}\n"
    )
    return f"# {module}\n\n::: {module}\n{options}{entries}"


def public_names(module: str) -> list[str]:
    """Names that a module has for others, in its own order, read without importing it.

    They are in `__all__`; or, where that is not written out, the imports `X as X` and the classes.
    """
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text("utf-8"))
    names: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name("__all__")], value=ast.List() as written):
                return list(ast.literal_eval(written))
            case ast.ImportFrom(names=imported):
                names += [alias.name for alias in imported if alias.asname == alias.name]
            case ast.ClassDef(name=name) if not name.startswith(("_", "Abstract")):
                names.append(name)
    return names


def command_line() -> str:
    """The page of all commands, from the application that runs them."""
    import typer.main

    from ucudnn import cli

    parts = [
        "# Command line",
        "This page is what `--help` prints.",
        "[Settings and commands](reference.md#commands) has a summary, and the exit statuses.",
    ]
    application = typer.main.get_command(cli.app)
    for path, command in commands(application, ("ucudnn",)):
        context = typer.Context(command, info_name=" ".join(path))
        usage = " ".join(command.collect_usage_pieces(context))
        parts += [
            f"## {' '.join(path)}",
            textwrap.dedent(command.help or ""),
            f"```\n{' '.join(path)} {usage}\n```",
            "\n".join(
                # A bracket would begin a link.
                f"* `{flag}`: {text.replace('[', '&#91;')}"
                for flag, text in (
                    parameter.get_help_record(context) or ("", "")
                    for parameter in command.get_params(context)
                )
                if flag
            ),
        ]
    return "\n\n".join(parts) + "\n"


def commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A command and all below it, with the words that call them."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))
