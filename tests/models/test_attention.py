import pytest

from jtrain.models.attention import kv_repeats

from .build import small


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ways", "expected"),
    [(8, 8, 4, 1), (8, 2, 1, 1), (8, 2, 2, 1), (8, 2, 4, 2), (8, 1, 8, 8), (12, 4, 6, 3), (4, 2, 3, 1)],
    ids=["enough", "no mesh", "divides", "twice", "one head", "least common multiple", "heads do not divide"],
)
def test_key_value_heads_are_repeated_as_little_as_gives_every_device_whole_ones(heads, kv_heads, ways, expected):
    config = small(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=4)
    assert kv_repeats(config, ways) == expected
