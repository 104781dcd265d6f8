import pytest

from replayssm.dtypes import ENV_VAR, ResolvedDtype, parse_state_dtype, resolve_state_dtype
from replayssm.errors import DtypeError

ENV = {ENV_VAR: "fp16"}


def test_each_stronger_setting_wins():
    assert resolve_state_dtype(None, None, {}) == ResolvedDtype("float32", "default")
    assert resolve_state_dtype(None, "bfloat16", {}) == ("bfloat16", "model config mamba_ssm_dtype")
    assert resolve_state_dtype(None, "bfloat16", ENV) == ("float16", f"environment {ENV_VAR}")
    assert resolve_state_dtype("float32", "bfloat16", ENV) == ("float32", "option")


def test_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv(ENV_VAR, "bf16")
    assert resolve_state_dtype().name == "bfloat16"
    monkeypatch.delenv(ENV_VAR)
    assert resolve_state_dtype().name == "float32"


def test_empty_variable_is_unset():
    assert resolve_state_dtype(None, None, {ENV_VAR: ""}).source == "default"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("fp32", "float32"),
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("torch.float32", "float32"),
        ("torch.bfloat16", "bfloat16"),
        (" BF16 ", "bfloat16"),
    ],
)
def test_accepted_spellings(given, name):
    assert parse_state_dtype(given) == name


def test_torch_dtype_objects():
    torch = pytest.importorskip("torch")
    assert parse_state_dtype(torch.float16) == "float16"


@pytest.mark.parametrize("bad", ["int8", "float64", "fp8", "", "half", "float"])
def test_bad_option_names_value_source_and_allowed(bad):
    with pytest.raises(DtypeError) as error:
        resolve_state_dtype(bad, None, {})
    text = str(error.value)
    assert repr(bad) in text
    assert "option" in text
    for name in ("float32", "bfloat16", "float16"):
        assert name in text


def test_bad_value_names_its_own_source():
    with pytest.raises(DtypeError, match="'fp8' from environment REPLAYSSM_STATE_DTYPE"):
        resolve_state_dtype(None, "float32", {ENV_VAR: "fp8"})
    with pytest.raises(DtypeError, match="'int4' from model config mamba_ssm_dtype"):
        resolve_state_dtype(None, "int4", {})


def test_overridden_bad_value_does_no_harm():
    assert resolve_state_dtype("bf16", "int4", {ENV_VAR: "fp8"}).name == "bfloat16"
