"""Adapters against PEFT: what jtrain writes gives PEFT the same logits on the same base, and the other way round.

    PYTHONPATH=. python tests/peers/check_lora.py write DIR    (with jtrain's dependencies)
    python tests/peers/check_lora.py peft DIR                  (with torch, transformers and peft)
    PYTHONPATH=. python tests/peers/check_lora.py read DIR     (with jtrain's dependencies)

`write` makes tiny models of several families with adapters (LoRA, rsLoRA, DoRA; fused projections; Conv1D), their base
folders and adapter folders, and the logits. `peft` loads each by PeftModel and compares; then it draws adapters of its
own (with ranks that differ between modules), saves them and their logits. `read` loads these and compares.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np

CASES = {
    "llama": ("llama", {}, {}),
    "llama-rslora-some": ("llama", {}, {"rslora": True, "targets": ("q_proj", "down_proj")}),
    "llama-dora": ("llama", {}, {"dora": True}),
    "phi3-fused": ("phi3", {}, {}),
    "phi3-fused-dora": ("phi3", {}, {"dora": True}),
    "phi3-part": ("phi3", {}, {"rslora": True, "targets": ("q_proj", "up_proj")}),
    "gpt_neox-interleaved": ("gpt_neox", {}, {}),
    "gpt2-conv1d": ("gpt2", {}, {}),
    "gpt2-conv1d-dora": ("gpt2", {}, {"dora": True}),
}
SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "num_key_value_heads": 2,
}  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 96, (2, 12))


def config_of(family: str) -> dict:
    config = {"model_type": family, "initializer_range": 0.2, "tie_word_embeddings": False} | SMALL
    if family == "gpt2":
        config = {
            "model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4,
            "n_positions": 64, "tie_word_embeddings": True,
        }  # fmt: skip
    if family == "gpt_neox":
        config |= {"rotary_pct": 0.5, "use_parallel_residual": True}
    if family == "phi3":
        config |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    return config


def write(folder: Path) -> None:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import jtrain
    from jtrain.checkpoint.hf import peft
    from jtrain.checkpoint.hf.companions import Companions
    from jtrain.models.decoder import Decoder
    from jtrain.models.families import family
    from jtrain.models.lora import ADAPTER, Lora, add_lora, projections
    from jtrain.tasks.adapter_export import _modules
    from jtrain.tasks.loaded import drawn

    for name, (kind, _, changes) in CASES.items():
        one = family(kind)
        decoder = one.decoder_config(config_of(kind))
        out = folder / name
        base = out / "base"
        if not base.exists():
            companions = Companions(config_of(kind))  # else it is written as the first family that can say it
            jtrain.export(dataclasses.replace(drawn(decoder, seed=1), source=companions), base)
        loaded = jtrain.load_model(str(base))
        lora = Lora(rank=3, alpha=6.0, **changes)
        with nnx.use_eager_sharding(False):
            module = Decoder(decoder, nnx.Rngs(0))
            nnx.update(module, _state(module, loaded.params))
            add_lora(module, lora, key=jax.random.key(0))
        rng, adapters = np.random.default_rng(3), {}
        for path, p in projections(module).items():
            for part in ADAPTER:
                if p.adapter is not None and hasattr(p, part):
                    variable = getattr(p, part)
                    noise = rng.normal(0, 0.1, variable[...].shape).astype(np.float32)
                    variable[...] = variable[...] * (1 + noise) if part == "lora_magnitude" else jnp.asarray(noise)
                    adapters[f"{path}/{part}"] = np.asarray(variable[...])
        _, _, modules = _modules(decoder, one)
        (out / "adapter").mkdir(exist_ok=True)
        for file, data in peft.adapter_files(lora, adapters, modules, str(base)).items():
            (out / "adapter" / file).write_bytes(data)
        with jax.default_matmul_precision("highest"):
            np.save(out / "logits.npy", np.asarray(module(jnp.asarray(IDS))))
        print(name, sorted(json.loads((out / "adapter" / peft.CONFIG).read_text())["target_modules"]))


def _state(module, params):
    from flax import nnx

    state = nnx.state(module, nnx.Param)
    nnx.replace_by_pure_dict(state, params)
    return state


def with_peft(folder: Path) -> None:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    for name in CASES:
        out = folder / name

        def base(out=out):
            return AutoModelForCausalLM.from_pretrained(out / "base", dtype=torch.float32).eval()

        plain = base()(torch.tensor(IDS)).logits.detach().numpy()
        model = PeftModel.from_pretrained(base(), out / "adapter").eval()
        got, want = model(torch.tensor(IDS)).logits.detach().numpy(), np.load(out / "logits.npy")
        off, scale = np.abs(got - want).max(), np.abs(want).max()
        moved = np.abs(plain - want).max()
        print(f"{name}: jtrain to peft {off / scale:.2g} of {scale:.3g}; the adapter moves {moved:.3g}")
        assert off <= 2e-5 * scale and moved > 1e-2 * scale

        written = json.loads((out / "adapter" / "adapter_config.json").read_text())
        torch.manual_seed(0)
        names = written["target_modules"]
        config = LoraConfig(
            r=5, lora_alpha=10, target_modules=names, use_dora=written["use_dora"], use_rslora=written["use_rslora"],
            rank_pattern={names[0]: 2}, alpha_pattern={names[0]: 7}, init_lora_weights=False,
            fan_in_fan_out=written["fan_in_fan_out"],
        )  # fmt: skip
        model = get_peft_model(base(), config).eval()
        model.save_pretrained(out / "peft")
        np.save(out / "peft.npy", model(torch.tensor(IDS)).logits.detach().numpy())


def read(folder: Path) -> None:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import jtrain
    from jtrain.models.decoder import Decoder
    from jtrain.models.families import family
    from jtrain.models.lora import add_lora, projections
    from jtrain.tasks.adapter_export import read_adapter

    for name, (kind, _, _) in CASES.items():
        decoder = family(kind).decoder_config(config_of(kind))
        loaded = jtrain.load_model(str(folder / name / "base"))
        lora, arrays = read_adapter(str(folder / name / "peft"), decoder, family(kind))
        with nnx.use_eager_sharding(False):
            module = Decoder(decoder, nnx.Rngs(0))
            nnx.update(module, _state(module, loaded.params))
            add_lora(module, lora, key=jax.random.key(0))
        found = projections(module)
        for path, array in arrays.items():
            projection, _, part = path.rpartition("/")
            getattr(found[projection], part)[...] = jnp.asarray(array)
        with jax.default_matmul_precision("highest"):
            got = np.asarray(module(jnp.asarray(IDS)))
        want = np.load(folder / name / "peft.npy")
        off, scale = np.abs(got - want).max(), np.abs(want).max()
        print(f"{name}: peft to jtrain {off / scale:.2g} of {scale:.3g}")
        assert off <= 2e-5 * scale


if __name__ == "__main__":
    {"write": write, "peft": with_peft, "read": read}[sys.argv[1]](Path(sys.argv[2]))
