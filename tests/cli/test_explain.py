"""`jtrain explain` of a small decoder on fsdp=4, tensor=2: its figures against arithmetic on the shape."""

import json
import re
from pathlib import Path

import pytest

import jtrain
from jtrain.cli.main import main
from jtrain.errors import Exit

LAYERS, D, FF = 2, 32, 64
FLAGS = [
    "--accelerator", "cpu", "--devices", "8", "--mesh", "fsdp=4,tensor=2", "--max_length", "32",
    "--precision", "32-true", "--global_batch_size", "8", "--model.hidden_size", str(D),
    "--model.intermediate_size", str(FF),
    "--model.num_hidden_layers", str(LAYERS), "--model.num_attention_heads", "4", "--model.num_key_value_heads", "2",
    "--model.vocab_size", "512", "--model.remat", "full", "--model.tie_word_embeddings", "false",
    "--data.tokenizer", "bytes", "--optimizer.name", "adamw", "--compile_cache", "", "--data.train", "nothing/here.txt",
]  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("explain") / "config.yaml"
    path.write_text("task: pretrain\nmodel: {preset: llama-tiny}\nnum_train_epochs: 2\n")
    return str(path)


@pytest.fixture(scope="module")
def found(config):
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["explain", config, *FLAGS, "--json"]) == Exit.DONE
    return json.loads(out.getvalue())


def test_the_keys_are_those_of_the_contract(found):
    assert list(found) == ["parameters", "collectives", "temporary_bytes", "peak_memory_bytes"]
    for parameter in found["parameters"].values():
        assert list(parameter) == ["logical", "spec", "shape", "bytes_per_device"]
    for collective in found["collectives"]:
        assert list(collective) == ["op", "axis", "bytes", "count", "in_loop", "source"]


def test_a_parameter_shows_its_axes_its_place_and_its_share_of_bytes(found):
    assert found["parameters"]["layers/mlp/up_proj/kernel"] == {
        "logical": ["layers", "embed", "mlp"],
        "spec": [None, "fsdp", "tensor"],
        "shape": [LAYERS, D, FF],
        "bytes_per_device": 4 * LAYERS * D * FF // 8,
    }
    norm = found["parameters"]["final_norm/scale"]
    assert (norm["logical"], norm["spec"], norm["bytes_per_device"]) == (["norm"], [None], 4 * D)


def test_every_use_of_a_weight_by_every_layer_is_counted(found):
    # Up, gate and down [D, FF / tensor] are gathered forward and backward by every layer, and so are q and o
    # [D, H / tensor, Dh] and the smaller k and v; each gradient is scattered once.
    def times(op, size):
        return sum(c["count"] for c in found["collectives"] if (c["op"], c["axis"], c["bytes"]) == (op, "fsdp", size))

    wide, square, narrow = 4 * D * FF // 2, 4 * D * D // 2, 4 * D * D // 4
    assert [times("all-gather", size) for size in (wide, square, narrow)] == [6 * LAYERS, 4 * LAYERS, 4 * LAYERS]
    assert [times("reduce-scatter", size) for size in (wide, square, narrow)] == [3 * LAYERS, 2 * LAYERS, 2 * LAYERS]
    assert all(
        c["in_loop"] for c in found["collectives"] if c["axis"] == "fsdp" and c["bytes"] in (wide, square, narrow)
    )


def test_every_collective_of_size_names_a_line_of_ours(found):
    package = Path(jtrain.__file__).parent.parent
    for collective in found["collectives"]:
        file, line = re.fullmatch(r"(jtrain/.+\.py):(\d+)", collective["source"]).groups()
        assert 0 < int(line) <= len((package / file).read_text().splitlines())
    totals = [c["bytes"] * c["count"] for c in found["collectives"]]
    assert totals == sorted(totals, reverse=True)


def test_memory_is_that_of_the_compiled_step(found):
    stored = sum(p["bytes_per_device"] for p in found["parameters"].values())
    assert found["temporary_bytes"] > 0
    assert found["peak_memory_bytes"] > 3 * stored + found["temporary_bytes"]  # AdamW keeps two more


def test_the_tables_show_totals_by_axis_and_memory(config, capsys):
    assert main(["explain", config, *FLAGS]) == Exit.DONE
    text = capsys.readouterr().out
    for title in ("Parameters", "Collectives of a step", "By axis", "Memory of a device"):
        assert f"\n{title}" in f"\n{text}"
    assert re.search(
        r"layers/mlp/up_proj/kernel +\(layers, embed, mlp\) +\(-, fsdp, tensor\) +\(2, 32, 64\) +2,048", text
    )
    assert re.search(r"\nfsdp +4 +\d+ +[\d,]+", text) and re.search(r"\ntemporary, in a step +[\d,]+", text)


def test_a_mesh_that_can_not_be_is_answered_before_anything_is_compiled(config, capsys):
    assert main(["explain", config, *FLAGS, "--mesh", "fsdp=3,tensor=2"]) == Exit.CONFIG
    assert "8 devices" in capsys.readouterr().err


def test_a_branch_that_not_every_update_takes_is_noted(tmp_path, capsys):
    file = tmp_path / "local.yaml"
    file.write_text(
        "{max_steps: 4, max_length: 16, global_batch_size: 4, precision: 32-true, accelerator: cpu, devices: 2,\n"
        " mesh: {data: 2, slices: 2}, dcn: {local_steps: 2}, compile_cache: '', data: {train: [a.txt]},\n"
        " model: {hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1}}\n"
    )
    assert main(["explain", str(file)]) == Exit.DONE
    printed = " ".join(capsys.readouterr().out.split())
    assert "collectives of jtrain/train/across_slices.py" in printed and "dcn.local_steps: H one in H does" in printed
