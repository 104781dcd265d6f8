from __future__ import annotations

import pytest

from tests.server.common import serving, shipped


@pytest.fixture(scope="module")
def _server():
    with serving() as running:
        yield running


@pytest.fixture
def server(_server):
    """A random model of bytes; a test must leave it as it was."""
    yield _server
    _server.wait_idle()


@pytest.fixture(scope="module")
def _gdn():
    with serving(shipped(), {"max_requests": 8, "context": 512, "page_size": 16, "prefix_cache": True}) as running:
        yield running


@pytest.fixture
def gdn(_gdn):
    """The shipped model, with a prefix cache."""
    yield _gdn
    _gdn.wait_idle()
