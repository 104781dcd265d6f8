import pytest

from replayssm.bench import geometry
from replayssm.errors import OptionError
from replayssm.planner import checkpoints


def test_there_is_one_table():
    assert geometry.GEOMETRIES is checkpoints.GEOMETRIES
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
