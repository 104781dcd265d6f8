"""`replayssm generate` on a random model of bytes: text, numbers, comparison, and what it refuses."""

import json
import re

import pytest
import torch

from replayssm.cli import decoding, generate
from replayssm.cli.decoding import _Text
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
        r"peak memory +\d+ MiB \(process\)",
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


def test_end_token(cli, saved, monkeypatch):
    free = cli("generate", saved, "--max-tokens", N, *RING, "--json", "--quiet", "--no-check").json["token_ids"]
    end = free[5]
    original = decoding.generation_config

    def ending(*args):
        config = original(*args)
        config.eos_token_id = [end]
        return config

    monkeypatch.setattr(decoding, "generation_config", ending)
    result = cli("generate", saved, "--max-tokens", N, *RING, "--json")
    assert result.json["finish_reason"] == "eos"
    assert result.json["token_ids"] == free[: free.index(end) + 1]
    assert "ended by" in result.err
    assert "the end token" in result.err


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


def test_a_wrong_decode_fails_the_check(cli, saved, monkeypatch):
    """Mutation: replay decode with the wrong scale. The command must notice and say where."""
    from replayssm import ops

    original = ops.fused_recurrent_linear_replayssm_decode

    def wrong(mixed_qkv, *args, **kwargs):
        return original(mixed_qkv * 1.5, *args, **kwargs)

    monkeypatch.setattr(ops, "fused_recurrent_linear_replayssm_decode", wrong)
    result = cli("generate", saved, "--max-tokens", N, *RING, "--json")
    assert result.code == 1
    assert "DIFFERENT; first difference at token" in result.err
    verdict = result.json["check"]["packed"]
    assert not verdict["ok"]
    assert verdict["delta"] > verdict["limit"]
    assert verdict["position"] >= 1


def test_text_arrives_in_whole_characters():
    tokenizer, parts = byte_tokenizer(), []
    text = "één 🙂 日本語 naïve\nβ "
    stream = _Text(tokenizer, parts.append)
    stream.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for token in tokenizer(text).input_ids:
        stream.put(torch.tensor([token]))
    stream.end()
    assert "".join(parts) == text
    assert len(parts) > 5
    assert all("�" not in part for part in parts)


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
