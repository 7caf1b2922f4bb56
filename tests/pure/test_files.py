"""Files are written whole or not at all: full disks, kills, and folders of other users."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ucudnn.errors import PlanError
from ucudnn.system import files


def put(path: Path, content: bytes) -> None:
    with files.replacing(path) as stream:
        stream.write(content)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that a write replaces."""
    path = tmp_path / "plan.json"
    path.write_bytes(b"old")
    return path


def is_untouched(path: Path) -> bool:
    """Whether the old file is there, and nothing else."""
    return path.read_bytes() == b"old" and list(path.parent.iterdir()) == [path]


def test_a_file_is_there_with_the_end_of_the_block_and_alone(path: Path, tmp_path: Path) -> None:
    with files.replacing(path) as stream:
        stream.write(b"new")
        assert path.read_bytes() == b"old"
        (other,) = (one for one in tmp_path.iterdir() if one != path)
        assert other.name.startswith(".new-")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # Both ends, so that opening it does not wait.
    end = os.open(pipe, os.O_RDWR)
    try:
        put(pipe, b"content")
        assert os.read(end, 100) == b"content"
    finally:
        os.close(end)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_the_contents_reach_the_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noting(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*arguments: object) -> object:
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode)
            done.append("fsync of the folder" if is_folder else name)
            return original(*arguments)

        return wrapper

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, noting(name, getattr(os, name)))
    put(tmp_path / "plan.json", b"new")
    assert done == ["fsync", "replace", "fsync of the folder"]


FULL = """
import resource, signal
from pathlib import Path
from ucudnn.system import files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with files.replacing(Path("plan.json")) as stream:
        stream.write(bytes(5000))
except OSError as error:
    print(error.strerror)
"""


def test_a_disk_without_room_leaves_the_old_file_and_no_other(path, python):
    """The system itself refuses here: no file of this process may be larger than 1000 bytes."""
    assert python("-c", FULL, cwd=path.parent).stdout == "File too large\n"
    assert is_untouched(path)


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_any_step_that_fails_leaves_the_old_file_and_no_other(
    name: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(PlanError, match="cannot write the plan to .*: No space left on device; "):
        files.write(path, b"new", "the plan")
    assert is_untouched(path)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_block_leaves_the_old_file_and_is_passed_on(
    error: type[BaseException], path: Path
) -> None:
    def interrupted() -> None:
        with files.replacing(path) as stream:
            stream.write(b"ne")
            raise error

    with pytest.raises(error):
        interrupted()
    assert is_untouched(path)


KILLED = """
import os, signal
from pathlib import Path
from ucudnn.system import files
with files.replacing(Path("plan.json")) as stream:
    stream.write(b"ne")
    stream.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_writer_killed_in_the_middle_leaves_the_old_file_and_a_name_to_clean_up_by(
    path, python, tmp_path
):
    python("-c", KILLED, cwd=tmp_path, status=-signal.SIGKILL)
    assert path.read_bytes() == b"old"
    (left,) = (one for one in tmp_path.iterdir() if one != path)
    assert left.name.startswith(".new-")
    put(path, b"new")
    assert path.read_bytes() == b"new"


# The superuser may write everywhere, so the child becomes nobody where the tests run as root.
AS_NOBODY = """
import os
from pathlib import Path
from ucudnn.errors import PlanError
from ucudnn.system import files
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    files.write("plan.json", b"new", "the plan")
except PlanError as error:
    print(error)
"""


def test_a_folder_that_may_not_be_written_is_named(path, python, tmp_path):
    tmp_path.chmod(0o555)
    try:
        done = python("-c", AS_NOBODY, cwd=tmp_path)
    finally:
        tmp_path.chmod(0o755)
    sentence = "cannot write the plan to plan.json: Permission denied; choose another path\n"
    assert done.stdout == sentence
    assert is_untouched(path)


def test_a_folder_that_may_be_written_and_not_listed_will_do(python, tmp_path):
    tmp_path.chmod(0o333)
    try:
        done = python("-c", AS_NOBODY, cwd=tmp_path)
    finally:
        tmp_path.chmod(0o755)
    assert done.stdout == ""
    assert (tmp_path / "plan.json").read_bytes() == b"new"


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_umask_says_who_may_read_the_file(mask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        put(tmp_path / "plan.json", b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "plan.json").stat().st_mode) == mode


def test_a_long_name_is_written_too(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    put(path, b"new")
    assert path.read_bytes() == b"new"


def test_folders_are_made_unless_something_is_in_the_way(tmp_path: Path) -> None:
    files.make_folder(tmp_path / "a" / "b")
    files.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        files.make_folder(tmp_path / "file" / "b")


def test_a_file_system_that_cannot_sync_folders_will_do_and_a_broken_disk_will_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 22

    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    files.sync_folder(tmp_path)
    number = 5
    with pytest.raises(OSError, match="Input/output error"):
        files.sync_folder(tmp_path)


@pytest.mark.parametrize(
    ("text", "value"), [("[" * 32 + "]" * 32, None), ('{"a": "[[[{{{"}', {"a": "[[[{{{"})]
)
def test_json_of_at_most_32_levels_is_read(text: str, value: object) -> None:
    read = files.parse_json(text)
    assert value is None or read == value


@pytest.mark.parametrize("text", ["[" * 33 + "]" * 33, '{"a":' * 100_000, '"\\"' + "[" * 33])
def test_json_that_would_exhaust_the_stack_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="32 levels|Unterminated|Invalid"):
        files.parse_json(text)
