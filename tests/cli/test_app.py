"""Help, exit codes, and one line for every failure."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from replayssm.cli import app, main

SRC = Path(__file__).resolve().parents[2] / "src"


def run_process(*words, **kwargs):
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    return subprocess.run([sys.executable, "-m", "replayssm.cli", *words], env=env, timeout=120, **kwargs)


def test_help_is_instant_and_loads_no_torch():
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    code = (
        "import sys; from replayssm.cli import main\n"
        "for words in (['--help'], ['generate', '--help'], ['check', '--help'], ['env', '--help']):\n"
        "    assert main(words) == 0\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules\n"
        "import time; assert time.process_time() < 0.5"
    )
    subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("words", [["--help"], ["generate", "--help"], ["check", "--help"], ["env", "--help"]])
def test_help_has_examples(cli, words):
    result = cli(*words)
    assert result.code == 0
    assert "examples:\n  " in result.out
    assert "  replayssm " in result.out.split("examples:")[1]


def test_version(cli):
    import replayssm

    assert cli("--version").out.strip() == f"replayssm {replayssm.__version__}"


def test_no_command_and_unknown_words(refused):
    assert "COMMAND" in refused()
    assert "'fly'" in refused("fly")
    assert "--speed" in refused("generate", "--speed", "9")
    assert "--ring-len" in refused("generate", "--ring-len", "many")
    assert "replayssm generate --help" in refused("generate", "--dtype", "int8")


def test_debug_shows_the_traceback(cli):
    result = cli("generate", "no-such-model", "--debug")
    assert result.code == 2
    assert "Traceback" in result.err
    assert result.err.splitlines()[-1].startswith("error: model 'no-such-model'")


def test_internal_errors_are_one_line_with_their_own_code(cli, monkeypatch):
    monkeypatch.setattr(app, "import_module", lambda name: 1 / 0)
    result = cli("env")
    assert result.code == 70
    assert result.err == "error: unexpected ZeroDivisionError: division by zero (--debug shows where)\n"


def test_interrupt(cli, monkeypatch):
    def interrupt(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "import_module", interrupt)
    assert cli("env").code == 130


def test_broken_pipe_is_quiet():
    read, write = os.pipe()
    os.close(read)
    done = run_process("env", stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.returncode == 0
    assert done.stderr == b""


def test_output_that_is_not_utf8():
    env = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "replayssm.cli", "generate", "--ring-len", "0"], env=env, capture_output=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.rstrip() == b"error: ring length 0 is outside 1?64; 8 suits most models"


def test_main_takes_the_process_arguments(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["replayssm", "--version"])
    assert main() == 0
    assert "replayssm" in capsys.readouterr().out


def test_a_reader_of_the_progress_that_goes_away_loses_no_result(saved):
    command = f"{sys.executable} -m replayssm.cli generate {saved} --max-tokens 8 --json 2> >(exec true)"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert json.loads(done.stdout)["generated_tokens"] == 8


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_output_error():
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m replayssm.cli env --json > /dev/full"], capture_output=True, text=True
    )
    assert done.returncode == 74
    assert "cannot be written" in done.stderr
