"""`ucudnn doctor`, `ucudnn cache info`, and the command line as a whole."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import torch


def test_doctor_says_what_a_plan_depends_on(ucudnn, tmp_path):
    done = ucudnn("doctor", "--cache", tmp_path / "new")
    assert done.status == 0, done.err
    for said in (torch.__version__, "threads", "malloc", "filling 64 MiB", str(tmp_path / "new")):
        assert said in done.out
    assert not (tmp_path / "new").exists()


def test_doctor_json(ucudnn):
    found = json.loads(ucudnn("doctor", "--json").out)
    assert found["conditions"]["threads"] == torch.get_num_threads()
    assert found["fresh_ns"] > 0
    assert isinstance(found["advice"], list)


def test_doctor_advises_a_writable_cache(ucudnn, tmp_path):
    (tmp_path / "file").write_text("")
    done = ucudnn("doctor", "--cache", tmp_path / "file" / "cache")
    assert done.status == 0
    assert "cannot be written" in done.out


def test_tuning_goes_on_where_the_cache_cannot_be_written(ucudnn, table, tmp_path):
    (tmp_path / "file").write_text("")
    cache = tmp_path / "file" / "cache"
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        done = ucudnn("tune", table(), "--policy", "undivided", "--cache", cache, "--json")
    assert done.err.count("ucudnn: warning: ") == 1
    assert "cannot be written" in done.err
    assert done.status == 0
    assert json.loads(done.out)["measured"] > 0


def test_an_environment_variable_of_mu_cudnn_is_refused_in_a_sentence(ucudnn, table, monkeypatch):
    monkeypatch.setenv("UCUDNN_DATABASE", "x.sqlite")
    done = ucudnn("tune", table())
    assert done.status == 2
    assert "UCUDNN_DATABASE is not supported" in done.err


def test_help_of_every_command_is_light():
    """`ucudnn --help` loads no framework."""
    program = (
        "import sys; sys.argv = ['ucudnn', '--help']\n"
        "from ucudnn.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'h5py', 'pulp') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert "tune" in done.stdout
