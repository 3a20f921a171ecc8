import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))  # checkpoint_states serves the tests and the programs that they start

from checkpoint_states import Log, make_mesh


@pytest.fixture(scope="session")
def mesh():
    return make_mesh(2, 2, 2)


@pytest.fixture
def log():
    return Log()
