"""Options of `serve`: the command line over the file over defaults; names of other engines; refusals before loading."""

from __future__ import annotations

import subprocess
import sys

import pytest

from replayssm.cli.parser import build_parser
from replayssm.cli.serve_options import GROUPS, OPTIONS
from replayssm.cli.serve_request import ServeRequest
from replayssm.engine.options import EngineOptions
from replayssm.errors import DtypeError, OptionError, ReplayError
from replayssm.server.options import ServerOptions


def parsed(*words) -> ServeRequest:
    args = build_parser().parse_args(["serve", *map(str, words)])
    return args.request(args)


@pytest.fixture
def file(tmp_path):
    def write(text: str):
        made = tmp_path / "serve.yaml"
        made.write_text(text, encoding="utf-8")
        return made

    return write


def test_defaults_are_those_of_the_parts(monkeypatch):
    monkeypatch.delenv("REPLAYSSM_API_KEY", raising=False)
    found = parsed()
    assert (found.model, found.dtype, found.device) == ("gdn", "float32", None)
    assert found.server == ServerOptions()
    assert found.server.host == "127.0.0.1"
    assert found.engine == EngineOptions()


def test_every_option_arrives():
    found = parsed(
        "kda", "--served-name", "k", "--dtype", "auto", "--device", "cpu", "--host", "::1", "--port", 0, "--api-key",
        "s", "--max-queue", 3, "--max-body", "1MiB", "--drain-seconds", 5, "--ring-len", 4, "--mode", "replay",
        "--state-dtype", "bf16", "--memory", "3GiB", "--max-requests", 7, "--context", 512, "--page-size", 32,
        "--preempt", "recompute", "--prefix-policy", "truncate", "--prefix-strategy", "extra_buffer", "--prefix-cache",
        "--prefix-interval", 32, "--prefix-share", 0.2, "--chunk-tokens",
        99, "--no-graphs", "--overlap",
    )  # fmt: skip
    assert found.model == "kda"
    assert (found.dtype, found.device) == ("auto", "cpu")
    assert found.server == ServerOptions("::1", 0, "s", "k", None, 3, 2**20, 5)
    assert found.engine == EngineOptions(
        ring_len=4, mode="replay", state_dtype="bfloat16", memory=3 * 2**30, max_requests=7, context=512, page_size=32,
        preempt="recompute", prefix_policy="truncate", prefix_strategy="extra_buffer",
        prefix_cache=True, prefix_interval=32, prefix_share=0.2, chunk_tokens=99, graphs=False,
        overlap=True,
    )  # fmt: skip


def test_the_command_line_is_stronger_than_the_file(file):
    made = file("model: kda\nport: 9000\nmax_requests: 5\nprefix-cache: true\nstate-dtype: fp16\n")
    found = parsed("--config", made)
    assert (found.model, found.server.port) == ("kda", 9000)
    assert (found.engine.max_requests, found.engine.prefix_cache, found.engine.state_dtype) == (5, True, "float16")
    found = parsed("gdn", "--config", made, "--port", 1, "--no-prefix-cache", "--state-dtype", "fp32")
    assert (found.model, found.server.port, found.engine.prefix_cache) == ("gdn", 1, False)
    assert (found.engine.max_requests, found.engine.state_dtype) == (5, "float32")
    assert parsed("--config", file("")).model == "gdn"


def test_drafts_arrive_with_a_ring_that_suits_them(file):
    words = ("--spec", "mtp", "--spec-tokens", 2, "--spec-state", "fold", "--no-spec-adaptive")
    assert parsed(*words).engine == EngineOptions(
        spec="mtp", spec_tokens=2, spec_state="fold", spec_adaptive=False
    )  # fmt: skip
    assert parsed("--spec", "ngram").engine == EngineOptions(spec="ngram", ring_len=16)
    assert parsed("--spec", "ngram", "--linear-replayssm-cache-len", 7).engine.ring_len == 7
    made = file("spec: ngram\nspec-tokens: 6\nspec_adaptive: false\n")
    engine = EngineOptions(spec="ngram", spec_tokens=6, spec_adaptive=False, ring_len=32)
    assert parsed("--config", made).engine == engine
    assert parsed("--config", made, "--spec-tokens", 1, "--spec-adaptive").engine == EngineOptions(
        spec="ngram", spec_tokens=1
    )


def test_the_key_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("REPLAYSSM_API_KEY", "hidden")
    assert parsed().server.api_key == "hidden"
    assert parsed("--api-key", "said").server.api_key == "said"


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--enable-linear-replayssm"], "mode", "replay"),
        (["--no-enable-linear-replayssm"], "mode", "packed"),
        (["--linear-replayssm-cache-len", 16], "ring_len", 16),
        (["--linear-replayssm-cache-len", 16, "--ring-len", 16], "ring_len", 16),
        (["--mamba-ssm-dtype", "bfloat16"], "state_dtype", "bfloat16"),
        (["--mamba-ssm-dtype", "bf16", "--state-dtype", "bfloat16"], "state_dtype", "bfloat16"),
        (["--mem-fraction-static", 0.7], "memory_fraction", 0.7),
        (["--mamba-scheduler-strategy", "no_buffer"], "prefix_strategy", "no_buffer"),
        (["--mamba-scheduler-strategy", "extra_buffer", "--prefix-cache"], "prefix_strategy", "extra_buffer"),
        (["--linear-attn-decode-backend", "triton"], "mode", "auto"),
    ],
)
def test_names_of_other_engines(words, field, value):
    assert getattr(parsed(*words).engine, field) == value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--linear-replayssm-cache-len", 16, "--ring-len", 8],
            "--linear-replayssm-cache-len 16 contradicts --ring-len 8",
        ),
        (["--mamba-ssm-dtype", "fp16", "--state-dtype", "fp32"], "contradicts --state-dtype float32"),
        (["--enable-linear-replayssm", "--mode", "packed"], "--enable-linear-replayssm .* contradicts --mode packed"),
        (["--mamba-scheduler-strategy", "extra_buffer"], "--prefix-strategy extra_buffer has no effect without"),
        (["--mamba-scheduler-strategy", "lazy"], "'lazy' has no counterpart; use one of no_buffer, extra_buffer"),
        (["--linear-attn-decode-backend", "flashinfer"], "'flashinfer' has no counterpart"),
        (["--mem-fraction-static", 1.5], "--memory-fraction 1.5 is outside"),
        (["--mamba-ssm-dtype", "int8"], "int8"),
        (["--linear-replayssm-cache-len", 65], "ring length 65 is outside 1…64"),
        (["--port", 65536], "--port 65536 is outside 0…65535"),
        (["--port", "x"], "invalid int value"),
        (["--max-queue", -1], "--max-queue -1 is below 0"),
        (["--max-body", "10"], "no.*size with a unit|not a size with a unit"),
        (["--max-body", "10B"], "--max-body 10 is below 1024"),
        (["--drain-seconds", -1], "--drain-seconds -1"),
        (["--host", ""], "--host '' is empty"),
        (["--api-key", " "], "--api-key ' ' is empty"),
        (["--chat-template", "/no/such"], "--chat-template /no/such is no file"),
        (["--memory", "1GB", "--memory-fraction", 0.5], "drop one"),
        (["--prefix-interval", 8], "no effect without --prefix-cache"),
        (["--mode", "packed", "--ring-len", 4], "--ring-len 4 has no effect"),
        (["--mode", "fast"], "invalid choice"),
        (["--spec", "oracle"], "invalid choice: 'oracle'"),
        (["--spec-tokens", 2], "--spec-tokens 2 has no effect without --spec ngram or mtp"),
        (["--spec-adaptive"], "--spec-adaptive has no effect without"),
        (["--spec", "ngram", "--spec-tokens", 0], "--spec-tokens 0 is below 1"),
        (["--spec", "ngram", "--ring-len", 4], "ring of 4; use --ring-len 6 or more, or --spec-tokens up to 2"),
        (
            ["--spec", "ngram", "--spec-state", "snapshot", "--ring-len", 8],
            "--ring-len 8 has no effect with --spec-state",
        ),
        (["--spec", "ngram", "--mode", "packed"], "--spec-state 'ring' needs a ring, and mode 'packed' has none"),
        (
            ["--spec", "ngram", "--prefix-cache", "--prefix-policy", "truncate"],
            "--prefix-policy 'truncate' .*materialize",
        ),
        (["--config", "/no/such"], "/no/such cannot be read"),
    ],
)
def test_refusals(words, said):
    with pytest.raises(ReplayError, match=said):
        parsed(*words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 1", "'prot' is no option; did you mean 'port'"),
        ("zzz: 1", "'zzz' is no option; see"),
        ("port: x", "port 'x' is no whole number"),
        ("port: true", "port True is no whole number"),
        ("port: [1]", r"port \[1\] is no whole number"),
        ("spec: oracle", "spec 'oracle' is unknown; use one of ngram, mtp"),
        ("spec: ngram\nspec-tokens: two", "spec-tokens 'two' is no whole number"),
        ("prefix-cache: 1", "prefix-cache 1 is no true or false"),
        ("mode: fast", "mode 'fast' is unknown; use one of auto, replay, packed"),
        ("max-requests: 1\nmax_requests: 2", "twice"),
        ("- port", "has no options"),
        ("a: [", "is not YAML"),
        ("config: x", "'config' is no option"),
        ("port: 70000", "--port 70000 is outside"),
    ],
)
def test_mistakes_in_the_file(file, text, said):
    with pytest.raises(OptionError, match=said):
        parsed("--config", file(text))


def test_a_dtype_in_the_file_is_checked(file):
    with pytest.raises(DtypeError):
        parsed("--config", file("state-dtype: int8"))


def test_help_is_grouped_and_has_every_option(capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help"])
    text = capsys.readouterr().out
    for title, options in GROUPS.items():
        assert f"\n{title}:" in text
        for option in options:
            assert f"--{option.name}" in text.partition(f"\n{title}:")[2]
    assert len(OPTIONS) == sum(map(len, GROUPS.values()))


def test_options_are_refused_without_torch():
    code = (
        "import sys; from replayssm.cli import main; code = main(['serve', '--port', '70000']);"
        "print(code, 'torch' in sys.modules, 'fastapi' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["2", "False", "False"]
    assert done.stderr.startswith("error: --port 70000")


def test_without_the_packages_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"replayssm\[serve\]"):
        parsed()
