"""Tensor maps: theirs to ours and back without a bit changed, nothing on disk left over."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jtrain.models.families import Slot, family
from jtrain.models.families.keys import conv1d, fused, interleaved, linear, same

from .folders import NAMES, folder


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_on_disk_is_named_and_comes_back_bit_for_bit(name):
    one = folder(name)
    tensors = {tensor.key: tensor for tensor in one.tensors}
    assert tensors.keys() == one.disk.keys()
    for key, tensor in tensors.items():
        assert tensor.shape == one.disk[key].shape, key
        parts = tensor.split(one.disk[key])
        assert len(parts) == len(tensor.slots), key
        back = tensor.join(tuple(np.ascontiguousarray(part) for part in parts))
        assert back.dtype == np.float32 and back.tobytes() == one.disk[key].tobytes(), key


@pytest.mark.parametrize("name", NAMES)
def test_no_two_tensors_lie_in_one_place(name):
    slots = [slot for tensor in folder(name).tensors for slot in tensor.slots]
    assert len(slots) == len(set(slots))


A, B, C = Slot("a", (0,)), Slot("b", (0,)), Slot("c", (0,))


def test_linear_kernels_are_turned_and_heads_come_apart():
    x = np.arange(24).reshape(6, 4)  # [out, in]: three heads of two, from four channels
    (ours,) = linear("k", A, (4,), (3, 2)).split(x)
    assert ours.shape == (4, 3, 2)
    assert ours[3, 1, 0] == x[2, 3]  # input 3, head 1, channel 0
    (ours,) = conv1d("k", A, (4,), (3, 2)).split(x.T)
    assert ours[3, 1, 0] == x[2, 3]


def test_fused_parts_lie_one_after_the_other():
    qkv = fused([linear("k", A, (2,), (4, 1)), linear("k", B, (2,), (1, 1)), linear("k", C, (2,), (1, 1))])
    assert qkv.shape == (6, 2) and qkv.slots == (A, B, C)
    x = np.arange(12).reshape(6, 2)
    q, k, v = qkv.split(x)
    assert q[:, :, 0].T.tolist() == x[:4].tolist()
    assert k.ravel().tolist() == x[4].tolist() and v.ravel().tolist() == x[5].tolist()


def test_interleaved_parts_take_turns():
    x = np.arange(12)  # two heads: q q k k v v, q q k k v v
    parts = interleaved([same("k", slot, 4, ours=(2, 2)) for slot in (A, B, C)], 2, 0).split(x)
    assert [part.tolist() for part in parts] == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    gate, up = interleaved([same("k", slot, 3) for slot in (A, B)], 3, 0).split(np.arange(6))
    assert gate.tolist() == [0, 2, 4] and up.tolist() == [1, 3, 5]


def test_types_are_kept():
    x = np.arange(8).astype(ml_dtypes.bfloat16).reshape(4, 2)
    tensor = linear("k", A, (2,), (4,))
    assert tensor.split(x)[0].dtype == x.dtype and tensor.join(tensor.split(x)).dtype == x.dtype


@pytest.mark.parametrize(
    ("model_type", "key", "ours"),
    [
        ("gpt2", "h.0.ln_1.weight", "transformer.h.0.ln_1.weight"),  # openai-community/gpt2
        ("llama", "layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("gpt_neox", "lm_head.weight", "embed_out.weight"),
        ("gemma3", "language_model.model.norm.weight", "model.norm.weight"),  # google/gemma-3-4b-it
        ("gemma3", "model.language_model.norm.weight", "model.norm.weight"),
        ("gemma3", "language_model.lm_head.weight", "lm_head.weight"),
    ],
)
def test_other_spellings_of_a_key(model_type, key, ours):
    assert family(model_type).rename(key) == ours


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("llama-tied", "lm_head.weight"),
        ("gpt2", "transformer.h.1.attn.bias"),
        ("gpt2", "lm_head.weight"),
        ("gpt-neox", "gpt_neox.layers.0.attention.masked_bias"),
        ("deepseek-v3", "model.layers.3.eh_proj.weight"),  # of three layers: the module that predicts one token more
    ],
)
def test_what_carries_nothing_is_ignored(name, key):
    one = folder(name)
    assert one.family.ignores(key, one.config)
    for needed in ("model.layers.0.mlp.up_proj.weight", "transformer.h.0.attn.c_attn.bias", "unheard.of"):
        assert not one.family.ignores(needed, one.config)


def test_an_untied_head_is_not_ignored():
    one = folder("llama")
    assert not one.family.ignores("lm_head.weight", one.config)
