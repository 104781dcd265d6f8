import torch
import transformers

from replayssm.shipped import SHIPPED


def test_table(cli):
    result = cli("env")
    assert result.code == 0
    lines = {line.split("  ")[0]: line for line in result.out.splitlines() if not line.startswith(" ")}
    assert torch.__version__ in lines["torch"]
    assert transformers.__version__ in lines["transformers"]
    assert "cpu: " in lines["devices"]
    assert " on " in lines["backend"]
    assert "float32 (default)" in lines["state dtype"]
    for name in SHIPPED:
        assert f"{name}: " in result.out
    assert "qwen3_next" in lines["model types"]


def test_json_and_environment(cli, monkeypatch, refused):
    monkeypatch.setenv("REPLAYSSM_STATE_DTYPE", "bf16")
    facts = cli("env", "--json").json
    assert facts["state dtype"].startswith("bfloat16 (environment REPLAYSSM_STATE_DTYPE)")
    monkeypatch.setenv("REPLAYSSM_STATE_DTYPE", "tiny")
    assert "'tiny' from environment" in refused("env")
