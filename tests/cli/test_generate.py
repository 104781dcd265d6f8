"""`replayssm generate` on a random model of bytes: text, numbers, comparison, and what it refuses."""

import json
import re

import pytest

from replayssm import ops
from replayssm.cli import decoding, generate, routes
from replayssm.cli.generate_request import sampling_params
from replayssm.engine import runner
from replayssm.engine.options import EngineOptions
from replayssm.spec import packed_traffic
from tests.cli.conftest import CONTEXT, byte_tokenizer, edit_config, save_model

N = 10
RING = ("--ring-len", 4)


def test_summary(cli, saved):
    result = cli("generate", saved, "--prompt", "hello", "--max-tokens", N, *RING)
    assert result.code == 0, result
    assert result.out.startswith("hello")
    for pattern in (
        r"prompt +5 ",
        rf"generated +{N} ",
        r"bytes per token +replay \(counted\) +packed \(counted\) +ratio",
        r"state written",
        r"ring read",
        rf"state flushes +2 in {N - 1} steps",
        r"peak memory +[\d.]+ [MG]iB \(process\)",
        rf"against packed decode +OK, all {N} tokens equal",
        rf"against stock transformers +OK, all {N} tokens equal",
        r"state float32 \(default\), ring of 4, model float32, greedy",
    ):
        assert re.search(pattern, result.out), pattern
    assert "loading" in result.err
    assert "checking against stock transformers" in result.err
    summary = result.out[result.out.index("tokens   seconds") :]
    assert "\x1b" not in summary + result.err  # plain, since this is no terminal


def test_json_numbers(cli, saved):
    result = cli("generate", saved, "--prompt", "hello", "--max-tokens", N, *RING, "--json", "--quiet")
    assert result.err == ""
    assert len(result.out.splitlines()) == 1
    data = result.json
    assert data["prompt_tokens"] == 5
    assert data["generated_tokens"] == len(data["token_ids"]) == N
    assert data["text"] == byte_tokenizer().decode(data["token_ids"])
    assert data["finish_reason"] == "length"
    assert data["check"]["packed"]["ok"]
    assert data["check"]["stock"]["ok"]
    assert data["flushes"] == (N - 1) // 4
    for key in ("prompt_tokens_per_second", "generated_tokens_per_second", "peak_memory_bytes"):
        assert data[key] > 0

    traffic = data["traffic_bytes_per_token"]
    specs = decoding.load(str(saved), "float32", "cpu").specs
    size = sum(packed_traffic(spec).read for spec in specs)
    record = sum(spec.record_bytes("float32") for spec in specs)
    steps, flushes = N - 1, (N - 1) // 4
    in_ring = sum(n % 4 for n in range(steps))
    assert traffic["packed"]["state_read"] == traffic["packed"]["state_written"] == size
    assert traffic["packed"]["ring_read"] == traffic["packed"]["ring_written"] == 0
    assert traffic["replay"]["state_read"] == size
    assert traffic["replay"]["state_written"] == pytest.approx(size * flushes / steps)
    assert traffic["replay"]["ring_read"] == pytest.approx(record * in_ring / steps)
    assert traffic["replay"]["ring_written"] == pytest.approx(record * (steps - flushes) / steps)
    assert traffic["ratio"] == pytest.approx(traffic["replay"]["total"] / traffic["packed"]["total"])


def test_quiet_is_the_text_only(cli, saved):
    result = cli("generate", saved, "--prompt", "hello", "--max-tokens", N, *RING, "--quiet", "--no-check")
    tokens = cli("generate", saved, "--prompt", "hello", "--max-tokens", N, *RING, "--quiet", "--json").json[
        "token_ids"
    ]
    assert result.out == byte_tokenizer().decode(tokens) + "\n"
    assert result.err == ""


def test_without_check_packed_bytes_are_computed(cli, saved):
    counted = cli("generate", saved, "--max-tokens", 4, "--json", "--quiet").json
    result = cli("generate", saved, "--max-tokens", 4, "--json", "--no-check")
    assert "packed (computed)" in result.err
    assert "left out (--no-check)" in result.err
    assert result.json["check"] is None
    for part in ("state_read", "state_written", "ring_read", "ring_written", "total"):
        assert (
            result.json["traffic_bytes_per_token"]["packed"][part] == counted["traffic_bytes_per_token"]["packed"][part]
        )


def test_no_replay_runs_packed(cli, saved):
    replay = cli("generate", saved, "--max-tokens", N, *RING, "--json", "--quiet").json
    result = cli("generate", saved, "--max-tokens", N, *RING, "--json", "--no-replay")
    data = result.json
    assert data["route"] == "packed"
    assert data["token_ids"] == replay["token_ids"]
    assert list(data["check"]) == ["stock"]
    assert "replay" not in data["traffic_bytes_per_token"]
    assert "no ring" in result.err


def test_seed_decides_and_all_routes_draw_alike(cli, saved):
    words = ("generate", saved, "--max-tokens", N, *RING, "--temperature", 1.5, "--top-k", 100, "--json", "--quiet")
    first, again, other = (cli(*words, "--seed", seed).json for seed in (1, 1, 2))
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]
    for data in (first, other):
        assert all(verdict["ok"] for verdict in data["check"].values())


def test_one_token_needs_no_decode_step(cli, saved):
    data = cli("generate", saved, "--max-tokens", 1, "--json").json
    assert data["generated_tokens"] == 1
    assert data["generated_tokens_per_second"] is None
    assert data["flushes"] == 0


def test_json_is_all_there_is_on_standard_output(cli, saved):
    result = cli("generate", saved, "--max-tokens", N, *RING, "--json")
    assert json.loads(result.out)["generated_tokens"] == int(N)
    assert "tokens   seconds" in result.err


def test_end_token(cli, copy):
    words = ("generate", copy, "--max-tokens", N, *RING, "--json")
    free = cli(*words, "--quiet", "--no-check").json["token_ids"]
    end = free[5]
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    result = cli(*words)
    assert result.code == 0
    assert result.json["finish_reason"] == "stop"
    assert result.json["token_ids"] == free[: free.index(end) + 1]
    assert re.search("ended by +the end token", result.err)
    result = cli(*words, "--ignore-eos")
    assert result.code == 0
    assert result.json["token_ids"] == free


def test_wrong_end_token(refused, copy):
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": ["end"]}))
    assert "'end'" in refused("generate", copy)


def test_stop_text(cli, saved):
    words = ("generate", saved, "--max-tokens", N, *RING, "--json")
    free = cli(*words, "--quiet", "--no-check").json
    stop = free["text"][4:6]
    at = free["text"].index(stop)
    result = cli(*words, "--stop", "never", "--stop", stop)
    assert result.code == 0
    assert result.json["text"] == free["text"][:at]
    assert result.json["token_ids"] == free["token_ids"][: len(result.json["token_ids"])]
    assert f"--stop {stop!r}" in result.err
    assert all(verdict["tokens"] < N for verdict in result.json["check"].values())


def test_the_checkpoints_own_sampling_does_not_slip_in(cli, copy):
    words = ("generate", copy, "--max-tokens", N, *RING, "--json", "--quiet")
    free = cli(*words).json["token_ids"]
    (copy / "generation_config.json").write_text(json.dumps({"repetition_penalty": 9.0, "do_sample": True}))
    result = cli(*words)
    assert result.code == 0
    assert result.json["token_ids"] == free


@pytest.mark.parametrize(
    "words",
    [
        ("--temperature", 1.2, "--top-p", 0.9, "--seed", 5),
        ("--min-p", 0.05, "--presence-penalty", 0.5, "--frequency-penalty", 0.5),
        ("--repetition-penalty", 1.5),
    ],
)
def test_every_sampling_option_is_checked_against_stock(cli, saved, words):
    result = cli("generate", saved, "--max-tokens", N, *RING, *words, "--json")
    assert result.code == 0
    assert len(set(result.json["token_ids"])) > 4  # greedily this model repeats itself
    assert {verdict["status"] for verdict in result.json["check"].values()} == {"equal"}
    for word in map(str, words):
        assert word.removeprefix("--").replace("-pen", " pen") in result.err


def test_logprobs(cli, saved, refused):
    data = cli("generate", saved, "--max-tokens", 3, "--logprobs", 2, "--json", "--quiet", "--no-check").json
    assert [one["token"] for one in data["logprobs"]] == data["token_ids"]
    for one in data["logprobs"]:
        assert one["top"][0] == [one["token"], one["logprob"]]
        assert len(one["top"]) == 2
    assert "--logprobs 2" in refused("generate", saved, "--logprobs", 2)


def test_memory_split(cli, saved, refused):
    result = cli("generate", saved, "--prompt", "hello", "--max-tokens", 2, "--no-check", "--memory", "64MiB")
    for name in ("memory 64.0 MiB", "weights", "recurrent state", "ring", "conv windows", "keys and values"):
        assert re.search(rf"^{name} .*B$|^{name}$", result.err, re.M), name
    assert "slots 1, tokens 16, maximum concurrency at 7 tokens each: 1" in result.err
    assert "memory of" in refused("generate", saved, "--max-tokens", 2, "--memory", "1MB")
    assert "--context is 6" in refused("generate", saved, "--prompt", "hello", "--max-tokens", 2, "--context", 6)


def test_text_comes_while_it_is_made(saved, monkeypatch):
    loaded = decoding.load(str(saved), "float32", "cpu")
    prompt, params = decoding.encode(loaded, "hello", N), sampling_params({"max_tokens": N})
    pieces: list[str] = []
    run = routes.run(loaded, prompt, "replay", EngineOptions(), params, on_text=pieces.append)
    assert len(pieces) == N
    assert "".join(pieces) == run.text

    def gone(text):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        routes.run(loaded, prompt, "replay", EngineOptions(), params, on_text=gone)


def test_a_failure_in_the_engine_is_not_a_short_text(cli, saved, monkeypatch):
    monkeypatch.setattr(runner, "sample", lambda *args: 1 / 0)
    result = cli("generate", saved, "--max-tokens", 2)
    assert result.code == 70
    assert "ZeroDivisionError" in result.err


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_two_byte_state(cli, saved, dtype):
    data = cli("generate", saved, "--max-tokens", N, *RING, "--state-dtype", dtype, "--json", "--quiet").json
    half = data["traffic_bytes_per_token"]["packed"]["state_read"]
    full = cli("generate", saved, "--max-tokens", N, *RING, "--json", "--quiet").json
    assert full["traffic_bytes_per_token"]["packed"]["state_read"] == 2 * half
    assert data["state_dtype_source"] == "option"


def test_environment_chooses_the_state_dtype(cli, saved, monkeypatch, refused):
    monkeypatch.setenv("REPLAYSSM_STATE_DTYPE", "fp16")
    data = cli("generate", saved, "--max-tokens", 2, "--json", "--quiet", "--no-check").json
    assert (data["state_dtype"], data["state_dtype_source"]) == ("float16", "environment REPLAYSSM_STATE_DTYPE")
    monkeypatch.setenv("REPLAYSSM_STATE_DTYPE", "fp8")
    assert "'fp8' from environment REPLAYSSM_STATE_DTYPE" in refused("generate", saved, "--max-tokens", 2)


# Mutations: the command must notice a wrong decode, and say where.


def replay_that(monkeypatch, change):
    original = ops.fused_recurrent_linear_replayssm_decode

    def wrong(mixed_qkv, a, b, A_log, dt_bias, scale, state, d, k, g, out, slots, write_pos, force=None, **kind):
        mixed_qkv = change(mixed_qkv, d, slots, write_pos, force)
        return original(mixed_qkv, a, b, A_log, dt_bias, scale, state, d, k, g, out, slots, write_pos, force, **kind)

    monkeypatch.setattr(ops, "fused_recurrent_linear_replayssm_decode", wrong)


def scaled(mixed_qkv, d, slots, write_pos, force):
    return mixed_qkv * 1.5


def without_ring_at_a_fold(mixed_qkv, d, slots, write_pos, force):
    folds = write_pos == d.shape[2] - 1
    if force is not None:
        folds = folds | (force != 0)
    d[slots[folds].long()] = 0
    return mixed_qkv


@pytest.mark.parametrize("change", [scaled, without_ring_at_a_fold])
def test_a_wrong_replay_fails_both_checks(cli, saved, monkeypatch, change):
    replay_that(monkeypatch, change)
    result = cli("generate", saved, "--max-tokens", 2 * N, *RING, "--json")
    assert result.code == 1
    assert "DIFFERENT; first difference at token" in result.err
    for verdict in result.json["check"].values():
        assert not verdict["ok"]
        assert verdict["delta"] > verdict["limit"]
        assert verdict["position"] >= 1


def test_a_wrong_packed_decode_fails_its_check_alone(cli, saved, monkeypatch):
    original = ops.fused_recurrent_linear_packed_decode

    def wrong(mixed_qkv, *args, **kind):
        return original(mixed_qkv * 1.5, *args, **kind)

    monkeypatch.setattr(ops, "fused_recurrent_linear_packed_decode", wrong)
    result = cli("generate", saved, "--max-tokens", N, *RING, "--json", "--quiet")
    assert result.code == 1
    assert {name: verdict["ok"] for name, verdict in result.json["check"].items()} == {"packed": False, "stock": True}


def test_a_token_that_its_logits_do_not_give_is_no_near_tie(cli, saved, monkeypatch):
    original = runner.sample
    monkeypatch.setattr(runner, "sample", lambda x, batch, positions, *rest: original(x, batch, positions + 1, *rest))
    result = cli("generate", saved, "--max-tokens", N, *RING, "--temperature", 1.5, "--json")
    assert result.code == 1
    verdict = result.json["check"]["stock"]
    assert verdict["delta"] <= verdict["limit"]
    assert verdict["drawn"] == verdict["expected"] != verdict["got"]
    assert f"its own logits give token {verdict['drawn']}, not {verdict['got']}" in result.err


# What the command refuses about the model and the prompt.


def test_prompt_too_long(refused, saved):
    line = refused("generate", saved, "--prompt", "x" * 500, "--max-tokens", 13)
    for number in ("500 tokens", "13 new", "513", f"is {CONTEXT}", "499 tokens", "generate 12"):
        assert number in line
    assert f"shorten the prompt to 0 tokens or generate {CONTEXT - 1}" in refused(
        "generate", saved, "--prompt", "x", "--max-tokens", 600
    )


def test_prompt_may_fill_the_context(cli, saved):
    assert cli("generate", saved, "--prompt", "x" * 510, "--max-tokens", 2, "--quiet", "--no-check").code == 0


def test_unknown_model(refused):
    assert "'nonsense'" in refused("generate", "nonsense")
    assert "did you mean 'gdn'" in refused("generate", "gnd")


def test_unknown_model_type(refused, copy):
    edit_config(copy, model_type="llama")
    assert "'llama'" in refused("generate", copy)


def test_missing_config(refused, copy):
    (copy / "config.json").unlink()
    assert "config.json" in refused("generate", copy)


def test_missing_weights(refused, copy):
    (copy / "model.safetensors").unlink()
    assert "model.safetensors" in refused("generate", copy)


def test_truncated_weights(refused, copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert "truncated" in refused("generate", copy)


def test_missing_tokenizer(refused, copy):
    for file in copy.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in refused("generate", copy)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"linear_key_head_dim": 512}, ["K = 512", "1…256"]),
        ({"linear_value_head_dim": 257}, ["V = 257", "1…256"]),
        ({"linear_num_key_heads": 4}, ["4 key heads", "6 value heads"]),
    ],
)
def test_impossible_geometry(refused, copy, changes, parts):
    edit_config(copy, **changes)
    line = refused("generate", copy)
    for part in parts:
        assert part in line


def test_unusable_device(refused, saved):
    assert "'cuda:99'" in refused("generate", saved, "--device", "cuda:99")


def test_kda_and_bounded_gate(cli, tmp_path):
    folder = save_model(tmp_path / "kda", "bailing_hybrid")
    result = cli("generate", folder, "--max-tokens", 8, "--ring-len", 3, "--json")
    assert result.code == 0, result.out
    assert result.json["flushes"] == 2


def test_rates_without_time():
    assert generate._rate(3, 0.0) is None
    assert generate._rate(0, 1.0) is None
