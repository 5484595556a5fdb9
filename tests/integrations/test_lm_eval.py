"""`--model lfm2-cb` beside lm-eval's own `--model hf`, on the demonstration model."""

import json
import runpy
import sys
from functools import partialmethod
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

import lm_eval
from helpers import demo_prompts
from lfm2_cb.integrations.lm_eval import TASKS_PATH, Lfm2CbLM
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import lfm2_cb
from lfm2_cb.requests.options import UnsupportedOptionError

MODEL = lfm2_cb.demo_model_path()
TASKS = sorted(path.stem for path in Path(TASKS_PATH).glob("*.yaml"))


def instances(kind, arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


@pytest.fixture(scope="module")
def ours():
    return Lfm2CbLM(MODEL, dtype="float32", cache_memory="64MiB")


@pytest.fixture(scope="module")
def hf():
    return HFLM(MODEL, dtype="float32", device="cpu", batch_size=8)


def multiple_choice():
    """Four endings of each context, one context empty, one pair of endings that share their beginning."""
    arguments = [(p, f" {w}") for p in demo_prompts(12) for w in ("her", "him", "the house", "the garden")]
    return [*arguments, ("", "It was"), arguments[5]]


@pytest.mark.parametrize("max_length", [None, 16])
def test_loglikelihoods_are_hflms(ours, hf, max_length, monkeypatch):
    monkeypatch.setattr(ours, "_max_length", max_length)
    monkeypatch.setattr(hf, "_max_length", max_length)
    requests = instances("loglikelihood", multiple_choice())
    expected = hf.loglikelihood(requests, disable_tqdm=True)
    answers = ours.loglikelihood(requests, disable_tqdm=True)
    assert [a[0] for a in answers] == pytest.approx([e[0] for e in expected], abs=2e-4)
    assert [a[1] for a in answers] == [e[1] for e in expected]


@pytest.mark.parametrize("max_length", [None, 16])
def test_rolling_loglikelihoods_are_hflms(ours, hf, max_length, monkeypatch):
    monkeypatch.setattr(ours, "_max_length", max_length)
    monkeypatch.setattr(hf, "_max_length", max_length)
    requests = instances("loglikelihood_rolling", [(prompt,) for prompt in demo_prompts(12)])
    expected = hf.loglikelihood_rolling(requests, disable_tqdm=True)
    answers = ours.loglikelihood_rolling(requests, disable_tqdm=True)
    assert answers == pytest.approx(expected, abs=1e-3)  # sums of up to a hundred


def test_generated_texts_are_hflms_with_options_mixed(ours, hf):
    kinds = [
        {"until": [".", "\n"], "max_gen_toks": 24},
        {"until": [" the", "zzz"], "max_gen_toks": 12, "do_sample": False},
        {"until": [], "max_gen_toks": 6, "repetition_penalty": 1.3},
    ]
    arguments = [(prompt, kinds[i % 3]) for i, prompt in enumerate(demo_prompts(15))]
    expected = hf.generate_until(instances("generate_until", arguments), disable_tqdm=True)
    answers = ours.generate_until(instances("generate_until", arguments), disable_tqdm=True)
    assert answers == expected and len(set(answers)) > 10


def test_a_stop_sequence_in_the_context_stops_nothing(ours):
    requests = instances("generate_until", [("It was late. She", {"until": ["late."], "max_gen_toks": 5})])
    (text,) = ours.generate_until(requests, disable_tqdm=True)
    assert len(ours.tok_encode(text, add_special_tokens=False)) == 5


def test_generation_stops_at_the_stop_sequence(ours):
    prompt = demo_prompts(1)[0]
    (whole,) = ours.generate_until(instances("g", [(prompt, {"max_gen_toks": 20})]), disable_tqdm=True)
    stop = whole[8:12]  # wherever tokens begin and end
    (cut,) = ours.generate_until(instances("g", [(prompt, {"until": [stop], "max_gen_toks": 20})]), disable_tqdm=True)
    assert cut == whole[: whole.index(stop)]


def test_task_results_are_hflms(ours, hf):
    manager = TaskManager(include_path=TASKS_PATH, include_defaults=False)

    def evaluate(model):
        results = lm_eval.simple_evaluate(
            model=model, tasks=list(TASKS), task_manager=manager, limit=12, bootstrap_iters=0, log_samples=False
        )
        return {
            task: {k: v for k, v in r.items() if "," in k and "stderr" not in k}
            for task, r in results["results"].items()
        }

    expected, answers = evaluate(hf), evaluate(ours)
    assert sorted(answers) == TASKS and len(TASKS) == 4
    for task in TASKS:
        assert answers[task] and answers[task] == pytest.approx(expected[task], rel=1e-5)


def test_from_the_command_line(tmp_path, monkeypatch):
    # lm-eval's own tasks, which take 15 s to index, are not asked for here.
    monkeypatch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))
    command = ["lm_eval", "run", "--model", "lfm2-cb", "--tasks", "austen_cloze"]
    arguments = ["--model_args", f"pretrained={MODEL},dtype=float32", "--limit", "8", "--output_path", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command + arguments)
    runpy.run_module("lfm2_cb.integrations.lm_eval", run_name="__main__")
    (path,) = tmp_path.rglob("results_*.json")
    results = json.loads(path.read_text("utf-8"))
    assert 0 <= results["results"]["austen_cloze"]["acc,none"] <= 1
    assert results["config"]["model"] == "lfm2-cb" and results["n-samples"]["austen_cloze"]["effective"] == 8


@pytest.mark.parametrize(
    "options",
    [{"peft": "x"}, {"parallelize": True}, {"softmax_dtype": "bfloat16"}, {"mixed_precision_dtype": "bfloat16"}],
)
def test_what_cannot_be_honoured_is_refused_by_name(options):
    with pytest.raises(UnsupportedOptionError, match=next(iter(options))):
        Lfm2CbLM(MODEL, **options)


def test_an_option_of_one_request_is_refused_by_name(ours):
    with pytest.raises(UnsupportedOptionError, match="num_beams"):
        ours.generate_until(instances("generate_until", [("It was", {"num_beams": 2})]), disable_tqdm=True)


@pytest.mark.parametrize("options", [{"load_in_8bit": True}, {"cache_memry": "1GiB", "x": 1}])
def test_unknown_options_are_named_before_anything_is_loaded(options):
    with pytest.raises(UnsupportedOptionError, match=", ".join(options)):
        Lfm2CbLM("nowhere", **options)
