"""A cache folder for each test, so that none finds another's tokens."""

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("JTRAIN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
