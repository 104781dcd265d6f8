"""Requests made from the server's own description, right and wrong: never a 500 or a hang, always the right shape."""

from __future__ import annotations

import contextlib

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.common import serving

EXAMPLES = 40  # of each operation, right and wrong
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
    negative_data_rejection,
]  # fmt: skip


@pytest.fixture(scope="module")
def fuzzed():
    with serving(engine={"context": 48, "max_requests": 8}) as running:
        yield running
        running.wait_idle()


@pytest.fixture(scope="module")
def described(fuzzed):
    return schemathesis.openapi.from_url(fuzzed.url + "/openapi.json")


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_requests_from_the_description(described, mode):
    asked = 0
    for found in described.get_all_operations():
        operation = found.ok()
        asked += 1

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        def one(case):
            if mode == GenerationMode.POSITIVE and isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = "tiny"
            response = case.call(timeout=30)
            case.validate_response(response, checks=CHECKS)
            if response.status_code >= 400:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}

        with contextlib.suppress(Unsatisfiable):  # an operation without parameters cannot be called wrongly
            one()
    assert asked >= 8


def test_the_server_is_as_it_was(fuzzed):
    fuzzed.wait_idle()
    assert fuzzed.call("/v1/completions", {"prompt": "x", "max_tokens": 3}).status == 200
    assert not [key for key in fuzzed.server.service.responses if key[1] >= 500]
    assert sum(fuzzed.server.service.responses.values()) > 100
