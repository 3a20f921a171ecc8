"""What a loaded model refuses to be asked."""

from pathlib import Path

import numpy as np
import pytest

from jtrain import load_model
from jtrain.errors import DataError

GPT2 = Path(__file__).parents[1] / "models/families/fixtures/gpt2"


def test_positions_past_a_learned_table_are_refused_before_anything_is_compiled():
    model = load_model(str(GPT2))
    limit = model.decoder.max_position_embeddings
    with pytest.raises(DataError, match=f"position {limit + 7}, and the model has a table of {limit}"):
        model(np.ones((1, limit + 8), np.int32))
    with pytest.raises(DataError, match="position -5"):
        model(np.ones((1, 4), np.int32), position_ids=np.array([[-5, 0, 1, 2]]))
