import pytest

from replayssm.bench import geometry
from replayssm.errors import OptionError

MIB = 2**20
# fp32 state of one request in MiB, as published with the checkpoints' configs.
STATE_MIB = {
    "Qwen3.5-0.8B": 18, "Qwen3.5-4B": 48, "Qwen3.5-9B": 48, "Qwen3.5-27B": 144, "Qwen3.6-27B": 144, "Qwen3.8-27B": 144,
    "Qwen3.5-35B-A3B": 60, "Qwen3.6-35B-A3B": 60, "Qwen3-Next-80B-A3B": 72, "Qwen3.5-122B-A10B": 144,
    "Qwen3.5-397B-A17B": 180, "OLMo-Hybrid-7B": 50.625, "Kimi-Linear-48B-A3B": 40, "Ling-3.0-flash": 70,
    "GLM-5.3-Flash": 136, "Kimi-K3": 414,
}  # fmt: skip


def test_states_have_the_published_sizes():
    assert {name: g.state_bytes / MIB for name, g in geometry.GEOMETRIES.items()} == STATE_MIB
    assert all(g.linear_layers < g.all_layers for g in geometry.GEOMETRIES.values())


def test_names_are_found_whatever_their_case_or_owner():
    name, found = geometry.find("moonshotai/kimi-linear-48b-a3b")
    assert name == "Kimi-Linear-48B-A3B"
    assert found.spec.kind == "kda"
    assert geometry.find("OLMo-Hybrid-7B")[1].spec.beta_scale == 2
    assert geometry.find("Ling-3.0-flash")[1].spec.lower_bound == -5


@pytest.mark.parametrize(("wrong", "near"), [("Qwen3.5-9", "Qwen3.5-9B"), ("kimi-linear", "Kimi-Linear-48B-A3B")])
def test_a_wrong_name_is_answered_with_near_ones(wrong, near):
    with pytest.raises(OptionError, match=near):
        geometry.find(wrong)
