"""Tasks of lm-eval: the figures of its own class for Hugging Face's models, and of plain numpy.

    pytest -m peers tests/peers/test_lm_eval.py

Needs lm-eval; torch, transformers and accelerate for the comparison with its own class.
"""

from __future__ import annotations

import importlib.util
import json
import random

import numpy as np
import pytest

from jtrain import load_model
from jtrain.cli.main import main
from jtrain.errors import ConfigError, DataError
from tests.peers.make_eval_goldens import write_folder
from tests.peers.make_sft_goldens import WORDS

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1200)]

COMMON = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {file}\ntest_split: test\nfewshot_split: test\n"
TASKS = {
    "toy_choice": 'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\n'
    "doc_to_target: answer\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n",
    "toy_generate": 'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{completion}}"\n'
    'generation_kwargs:\n  until: ["w7"]\n  max_gen_toks: 12\n  do_sample: false\n'
    "metric_list:\n  - metric: exact_match\n  - metric: chrf\n",
    "toy_rolling": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
    "metric_list:\n  - metric: word_perplexity\n  - metric: bits_per_byte\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("pip install 'jtrain[eval]'")
    folder = tmp_path_factory.mktemp("model")
    write_folder(folder)
    with pytest.MonkeyPatch.context() as patch:  # read by datasets when lm-eval is imported first
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield str(folder)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with the three tasks; some contexts and texts are longer than the model takes (128 tokens)."""
    folder, draw = tmp_path_factory.mktemp("tasks"), random.Random(0)

    def words(least, most):
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    rows = [
        {
            "question": words(3, 160),
            "choices": [" " + words(1, 4) for _ in range(4)],
            "answer": draw.randrange(4),
            "completion": words(1, 3),
            "text": words(100, 300),
        }
        for _ in range(13)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n" + COMMON.format(file=folder / "rows.jsonl") + text)
    return str(folder)


def evaluated(language_model, tasks, **options):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    options = {"task_manager": TaskManager(include_path=tasks), "bootstrap_iters": 0} | options
    return simple_evaluate(model=language_model, tasks=[*TASKS], **options)


@pytest.fixture(scope="module")
def ours(folder, tasks):
    from jtrain.tasks.lm_eval_model import JtrainLM

    return evaluated(JtrainLM(load_model(folder), batch_size=5), tasks, num_fewshot=1)


def scores(found, task):
    """Every log-probability, with whether greedy decoding writes it."""
    return [
        response if isinstance(response, list | tuple) else (response, False)
        for sample in found["samples"][task]
        for request in sample["resps"]
        for response in request
    ]


def test_figures_are_those_of_lm_evals_own_class(folder, tasks, ours):
    if not all(map(importlib.util.find_spec, ("torch", "transformers", "accelerate"))):
        pytest.skip("needs torch, transformers and accelerate")
    from lm_eval.models.huggingface import HFLM

    theirs = evaluated(HFLM(pretrained=folder, dtype="float32", device="cpu", batch_size=4), tasks, num_fewshot=1)
    for task in TASKS:
        for name, value in theirs["results"][task].items():
            if "," in name and isinstance(value, float):
                assert ours["results"][task][name] == pytest.approx(value, rel=1e-5), (task, name)
    for task in ("toy_choice", "toy_rolling"):
        found, expected = scores(ours, task), scores(theirs, task)
        np.testing.assert_allclose([float(a) for a, _ in found], [float(a) for a, _ in expected], rtol=1e-5)
        assert [bool(b) for _, b in found] == [bool(b) for _, b in expected]
    texts = [[sample["resps"] for sample in found["samples"]["toy_generate"]] for found in (ours, theirs)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("mesh", ("fsdp=2,tensor=2,pipeline=2", "context=2,fsdp=2"))
def test_a_mesh_gives_the_figures_of_one_device(mesh, folder, tasks, ours):
    from jtrain.tasks.lm_eval_model import JtrainLM

    found = evaluated(JtrainLM(load_model(folder, mesh=mesh), batch_size=3), tasks, num_fewshot=1)
    for task in ("toy_choice", "toy_rolling"):
        pairs = zip(scores(found, task), scores(ours, task), strict=True)
        assert all(float(a[0]) == pytest.approx(float(b[0]), rel=1e-5) for a, b in pairs)
    for task in TASKS:
        assert found["results"][task].keys() == ours["results"][task].keys()


def test_log_probabilities_are_those_of_plain_numpy(folder):
    from lm_eval.api.instance import Instance

    from jtrain.tasks.lm_eval_model import JtrainLM

    model = load_model(folder)
    draw = random.Random(1)
    pairs = [
        (" ".join(draw.choices(WORDS, k=draw.randint(0, 30))), " " + " ".join(draw.choices(WORDS, k=3)))
        for _ in range(9)
    ]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    found = JtrainLM(model, batch_size=4).loglikelihood(requests)
    for (context, continuation), (score, greedy) in zip(pairs, found, strict=True):
        before = model.tokenizer.encode(context) or [1]  # the begin token stands for no context
        after = model.tokenizer.encode(continuation)
        logits = np.asarray(model(np.asarray([[*before, *after]])), np.float64)[0, len(before) - 1 : -1]
        logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert score == pytest.approx(logps[range(3), after].sum(), abs=2e-5)
        assert greedy == (logps.argmax(-1) == after).all()


def test_the_verb_runs_tasks_of_a_folder(folder, tasks, ours, capsys):
    args = ["--include-path", tasks, "--num-fewshot", "1", "--json"]
    assert main(["eval", folder, "--tasks", "toy_choice,toy_rolling", *args]) == 0
    found = json.loads(capsys.readouterr().out)["tasks"]
    for task in ("toy_choice", "toy_rolling"):
        for name, value in found[task].items():
            if "stderr" not in name:
                assert value == pytest.approx(ours["results"][task][name], rel=1e-5)


def test_a_chat_template_is_used_where_it_is_asked_for(folder, tasks, capsys):
    from jtrain.tasks.eval_tasks import evaluate_tasks

    model = load_model(folder)
    options = {"include_path": tasks, "limit": 4}
    plain = evaluate_tasks(model, ["toy_choice"], **options)
    chat = evaluate_tasks(model, ["toy_choice"], apply_chat_template=True, system_instruction="w1 w2", **options)
    assert plain.results["toy_choice"].keys() == chat.results["toy_choice"].keys()
    from jtrain.tasks.lm_eval_model import JtrainLM

    language_model = JtrainLM(model)
    history = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4 "}]
    assert language_model.apply_chat_template(history).endswith("<|im_start|> assistant ")
    unfinished = language_model.apply_chat_template(history, add_generation_prompt=False)
    assert unfinished.endswith("assistant w4")
    ids = language_model.tok_encode(unfinished)
    assert ids.count(model.tokenizer.bos_id) == 1  # the template's own


def test_tasks_and_models_that_do_not_fit_are_refused(folder, tasks, tmp_path):
    from jtrain.tasks.eval_tasks import evaluate_tasks, open_tasks
    from jtrain.tasks.lm_eval_model import JtrainLM

    with pytest.raises(ConfigError, match="Did you mean toy_choice"):
        open_tasks(["toy_choise"], tasks)
    with pytest.raises(ConfigError, match="takes 128 tokens"):
        JtrainLM(load_model(folder), max_length=129)
    with pytest.raises(ConfigError, match="no tokenizer"):
        JtrainLM(load_model("llama-tiny"))
    (tmp_path / "gone.yaml").write_text("task: gone\n" + COMMON.format(file="/no/such.jsonl") + TASKS["toy_choice"])
    with pytest.raises(DataError, match="can't be loaded"):
        evaluate_tasks(load_model(folder), ["gone"], include_path=str(tmp_path))
