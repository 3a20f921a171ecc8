"""The reference of all faults, made once."""

import pytest

from tests.faults.runs import undisturbed


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("whole"))
