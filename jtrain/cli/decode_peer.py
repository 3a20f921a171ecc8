"""The other side of the figure `decode`: transformers' `generate`, run by an interpreter that has it.

    python decode_peer.py FOLDER

FOLDER holds config.json, and model.safetensors or no weights (then random ones are drawn). One JSON request a line on
standard input, `{"prompts": [[ids]], "new_tokens": 64}`, is answered by `{"seconds": ..., "ids": [[new ids]]}`. This
file imports nothing of jtrain, and jtrain does not import it.
"""

import json
import sys
import time
from pathlib import Path


def main(folder: str) -> None:
    """Says which version answers, then answers requests until standard input ends."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kind = transformers.AutoModelForCausalLM
    if any(Path(folder).glob("*.safetensors")):
        model = kind.from_pretrained(folder, dtype=torch.float32)
    else:
        model = kind.from_config(transformers.AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model.eval()
    answer({"version": transformers.__version__, "threads": torch.get_num_threads()})
    for line in sys.stdin:
        request = json.loads(line)
        ids = torch.tensor(request["prompts"])
        new = request["new_tokens"]
        options = {"do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": new, "min_new_tokens": new}
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        answer({"seconds": time.perf_counter() - started, "ids": out[:, ids.shape[1] :].tolist()})


def answer(value: dict) -> None:
    """One line."""
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
