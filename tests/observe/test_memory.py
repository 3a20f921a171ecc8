from types import SimpleNamespace

from jtrain.observe.memory import peak_memory_gib


def device(stats):
    return SimpleNamespace(memory_stats=lambda: stats)


def test_the_fullest_device_counts_in_gib():
    devices = [device({"peak_bytes_in_use": 2**30}), device({"peak_bytes_in_use": 3 * 2**30, "bytes_in_use": 1})]
    assert peak_memory_gib(devices) == 3.0


def test_a_backend_without_statistics_is_unknown():
    assert peak_memory_gib([device(None)]) is None
    assert peak_memory_gib() is None
