"""GGUF files written by llama.cpp's own package, read as Hugging Face folders."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jtrain.checkpoint.gguf.folder import gguf_to_folder, is_gguf
from jtrain.checkpoint.gguf.reader import GgufFile
from jtrain.data.tokenizers import load_tokenizer
from jtrain.errors import CheckpointError, ConfigError

gguf = pytest.importorskip("gguf")
Type = gguf.GGMLQuantizationType

D, F, H, K, DH, N, V = 32, 64, 4, 2, 8, 2, 40
TOKENS = ["<|end|>", "<s>", *(chr(256 + n) for n in range(33)), "a", "b", "ab", "[PAD38]", "<tool>"]
SHAPES = {
    "attn_norm": ("input_layernorm", (D,)),
    "ffn_norm": ("post_attention_layernorm", (D,)),
    "attn_q": ("self_attn.q_proj", (H * DH, D)),
    "attn_k": ("self_attn.k_proj", (K * DH, D)),
    "attn_v": ("self_attn.v_proj", (K * DH, D)),
    "attn_output": ("self_attn.o_proj", (D, H * DH)),
    "ffn_gate": ("mlp.gate_proj", (F, D)),
    "ffn_up": ("mlp.up_proj", (F, D)),
    "ffn_down": ("mlp.down_proj", (D, F)),
}


def permuted(weights, heads):
    """llama.cpp's convert_hf_to_gguf.py: LlamaModel.permute."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def model_file(
    path,
    *,
    kind=Type.F32,
    arch="llama",
    tied=True,
    biases=False,
    theta=5000.0,
    metadata=None,
    more=None,
    tokenizer=True,
):
    """Writes a tiny model; gives its tensors under Hugging Face's names, before any rounding."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(N)
    writer.add_context_length(64)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(F)
    writer.add_head_count(H)
    writer.add_head_count_kv(K)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(theta)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(TOKENS)
        writer.add_token_types([3, 3, *[1] * 36, 4, 4])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(0)
        writer.add_add_bos_token(True)
        writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    found = {}

    def add(name, target, shape, heads=None):
        values = rng.normal(size=shape).astype(np.float32)
        if len(shape) == 1:
            values = values.astype(np.float16).astype(np.float32)
        found[target] = values
        stored = permuted(values, heads) if heads and arch == "llama" else values
        if len(shape) == 1 or kind == Type.F32:
            writer.add_tensor(name, stored)
        elif kind == Type.F16:
            writer.add_tensor(name, stored.astype(np.float16))
        else:
            writer.add_tensor(name, gguf.quants.quantize(stored, kind), raw_dtype=kind)

    add("token_embd.weight", "model.embed_tokens.weight", (V, D))
    for layer in range(N):
        for name, (target, shape) in SHAPES.items():
            heads = {"attn_q": H, "attn_k": K}.get(name)
            add(f"blk.{layer}.{name}.weight", f"model.layers.{layer}.{target}.weight", shape, heads)
            if biases and name in ("attn_q", "attn_k", "attn_v"):
                add(f"blk.{layer}.{name}.bias", f"model.layers.{layer}.{target}.bias", shape[:1], heads)
    add("output_norm.weight", "model.norm.weight", (D,))
    if not tied:
        add("output.weight", "lm_head.weight", (V, D))
    for name, values in (more or {}).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def test_a_folder_has_the_tensors_config_and_tokenizer(tmp_path):
    expected = model_file(tmp_path / "m.gguf", tied=False)
    out = gguf_to_folder(tmp_path / "m.gguf", tmp_path / "out")
    found = load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    config = json.loads((out / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5000.0
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (N, K, DH)
    assert config["tie_word_embeddings"] is False and config["vocab_size"] == V
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 0)
    tokenizer = load_tokenizer(str(out))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids, tokenizer.add_bos) == (1, 0, (0,), True)
    assert tokenizer.encode("ab<tool>") == [1, 37, 39]
    assert tokenizer.encode("<|end|>ab", special=True) == [1, 0, 37]
    assert tokenizer.chat_templates == {"default": "{{ bos_token }}{{ messages[0].content }}"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "out"]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_the_config_is_one_that_the_family_reads(tmp_path, arch):
    from jtrain.models.families import family

    norms = {f"blk.{n}.attn_{which}_norm.weight": np.ones(DH) for n in range(N) for which in "qk"}
    biases, more = arch == "qwen2", norms if arch == "qwen3" else {}
    model_file(tmp_path / "m.gguf", arch=arch, biases=biases, more=more, metadata={f"{arch}.attention.key_length": DH})
    out = gguf_to_folder(tmp_path / "m.gguf", tmp_path / "out")
    decoder = family(arch).decoder_config(json.loads((out / "config.json").read_text()))
    assert (decoder.hidden_size, decoder.rope_theta, decoder.tie_word_embeddings) == (D, 5000.0, True)
    assert (decoder.attention_bias, decoder.qk_norm) == (biases, "head" if arch == "qwen3" else "none")
    expected = {tensor.key: tensor.shape for tensor in family(arch).tensors(decoder)}
    assert {name: values.shape for name, values in load_file(out / "model.safetensors").items()} == expected


def test_qwen2_keeps_the_order_of_rows_and_has_biases(tmp_path):
    expected = model_file(tmp_path / "m.gguf", arch="qwen2", biases=True)
    out = gguf_to_folder(tmp_path / "m.gguf", tmp_path / "out")
    found = load_file(out / "model.safetensors")
    assert found.keys() == expected.keys() and "model.layers.1.self_attn.k_proj.bias" in found
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen2"


@pytest.mark.parametrize(("kind", "dtype"), [(Type.F16, np.float16), (Type.BF16, ml_dtypes.bfloat16)])
def test_sixteen_bits_stay_where_nothing_is_lost(tmp_path, kind, dtype):
    expected = model_file(tmp_path / "m.gguf", kind=kind)
    file = GgufFile(tmp_path / "m.gguf")
    np.testing.assert_array_equal(file.read("token_embd.weight"), expected["model.embed_tokens.weight"].astype(dtype))
    config = json.loads((gguf_to_folder(tmp_path / "m.gguf", tmp_path / "out") / "config.json").read_text())
    # The vectors of the fixture are exact in float16 and not in bfloat16.
    assert config["dtype"] == ("float16" if kind == Type.F16 else "float32")


def blocks(kind, rng, count):
    """Random blocks of a type, their scales small numbers of float16."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    data = rng.integers(0, 256, (count, size)).astype(np.uint8)
    places = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}.get(kind.name, (0, 2))
    for place in places:
        scales = rng.normal(size=count).astype(np.float16)
        data[:, place : place + 2] = scales.view(np.uint8).reshape(count, 2)
    return data


def half(block, place):
    return float(block[place : place + 2].view(np.float16)[0])


def decoded(kind, block):
    """One block in plain arithmetic: the formats as ggml-common.h and ggml-quants.c define them."""
    name = kind.name
    if name == "Q8_0":
        return [half(block, 0) * int(q) for q in block[2:].view(np.int8)]
    if name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        least = half(block, 2) if name.endswith("1") else None
        begin = 2 if least is None else 4
        high = int.from_bytes(block[begin : begin + 4].tobytes(), "little") if name[1] == "5" else 0
        begin += 4 if name[1] == "5" else 0
        low = [*(int(q) & 15 for q in block[begin:]), *(int(q) >> 4 for q in block[begin:])]
        values = [q | ((high >> n & 1) << 4) for n, q in enumerate(low)]
        middle = 0 if least is not None else (16 if name[1] == "5" else 8)
        return [half(block, 0) * (q - middle) + (least or 0.0) for q in values]
    if name == "Q6_K":
        out = np.zeros(256)
        low, high, scales, scale = block[:128], block[128:192], block[192:208].view(np.int8), half(block, 208)
        for n in range(256):
            part, inside = divmod(n, 128)
            quarter, place = divmod(inside, 32)
            nibble = int(low[64 * part + 32 * (quarter % 2) + place]) >> (4 * (quarter // 2)) & 15
            bits = int(high[32 * part + place]) >> (2 * quarter) & 3
            out[n] = scale * int(scales[n // 16]) * ((nibble | bits << 4) - 32)
        return out
    begin = 48 if name == "Q5_K" else 16
    packed = [int(x) for x in block[4:16]]
    out = np.zeros(256)
    for n in range(256):
        group, place = divmod(n, 32)
        if group < 4:
            scale, least = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            least = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        q = int(block[begin + 32 * (group // 2) + place]) >> (4 * (group % 2)) & 15
        if name == "Q5_K":
            q |= (int(block[16 + place]) >> group & 1) << 4
        out[n] = half(block, 0) * scale * q - half(block, 2) * least
    return out


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_quantised_tensors_are_what_their_bits_say(tmp_path, name):
    kind = Type[name]
    rows, columns = 2, 512
    per_block = gguf.GGML_QUANT_SIZES[kind][0]
    data = blocks(kind, np.random.default_rng(1), rows * columns // per_block)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("t", data.reshape(rows, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = np.concatenate([decoded(kind, block) for block in data]).reshape(rows, columns)
    found = GgufFile(tmp_path / "m.gguf").read("t")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


def test_the_stretched_rope_of_llama_3_is_found_in_its_divisors(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    # transformers 5.24, ROPE_INIT_FUNCTIONS["llama3"]: the usual frequencies over its own, heads of 8, theta 2e5
    divisors = [1.0, 1.0, 1.46273186, 8.0]
    model_file(tmp_path / "m.gguf", theta=2e5, more={"rope_freqs.weight": divisors})
    config = json.loads((gguf_to_folder(tmp_path / "m.gguf", tmp_path / "out") / "config.json").read_text())
    assert config["rope_scaling"] == scaling and config["rope_parameters"] == {**scaling, "rope_theta": 2e5}
    model_file(tmp_path / "n.gguf", more={"rope_freqs.weight": [1.0, 2.0, 3.0, 5.0]})
    with pytest.raises(ConfigError, match="rope_freqs"):
        gguf_to_folder(tmp_path / "n.gguf", tmp_path / "other")


def test_a_file_that_is_cut_short_anywhere_is_a_checkpoint_error(tmp_path):
    model_file(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    for size in (0, 3, 10, 23, 100, 700, 2000, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            gguf_to_folder(tmp_path / "cut.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_lengths_that_no_file_has_are_a_checkpoint_error(tmp_path):
    model_file(tmp_path / "m.gguf")
    damaged = bytearray((tmp_path / "m.gguf").read_bytes())
    place = damaged.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 4 + 4
    assert int.from_bytes(damaged[place : place + 8], "little") == V
    damaged[place : place + 8] = (1 << 60).to_bytes(8, "little")
    (tmp_path / "m.gguf").write_bytes(damaged)
    with pytest.raises(CheckpointError, match="no whole GGUF file"):
        GgufFile(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"arch": "falcon"}, ConfigError, "architecture falcon"),
        ({"kind": Type.TQ2_0, "tokenizer": False}, ConfigError, None),
        ({"metadata": {"llama.expert_count": 8}}, ConfigError, "8 experts"),
        ({"metadata": {"llama.rope.scaling.type": "su", "llama.rope.scaling.factor": 2.0}}, ConfigError, "'su'"),
        ({"metadata": {"llama.rope.dimension_count": 4}}, ConfigError, "4 turn"),
        ({"more": {"blk.0.extra.weight": np.zeros(4)}}, CheckpointError, r"blk\.0\.extra\.weight has no place"),
        ({"tokenizer": False}, ConfigError, "tokenizer.ggml.model"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, options, error, message):
    if options.get("kind") == Type.TQ2_0:
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
        writer.add_tensor("blk.0.attn_q.weight", np.zeros((1, 66), np.uint8), raw_dtype=Type.TQ2_0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        message = r"attn_q.weight .* quantised as TQ2_0"
    else:
        model_file(tmp_path / "m.gguf", **options)
    with pytest.raises(error, match=message) as found:
        gguf_to_folder(tmp_path / "m.gguf", tmp_path / "out")
    assert found.value.remedy and not (tmp_path / "out").exists()


def test_what_is_no_file_or_no_place_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        gguf_to_folder(tmp_path / "gone.gguf", tmp_path / "out")
    (tmp_path / "text.gguf").write_text("no model" * 10)
    with pytest.raises(CheckpointError, match="no whole GGUF file"):
        gguf_to_folder(tmp_path / "text.gguf", tmp_path / "out")
    with pytest.raises(ConfigError, match="not empty"):
        gguf_to_folder(tmp_path / "text.gguf", tmp_path)
    assert is_gguf("A.GGUF") and not is_gguf("model.safetensors")
