"""TRL's GRPO on our model: through stock's protocol, and through our rollout function. The reward must rise."""

import copy

import pytest

pytest.importorskip("trl")

import torch
from datasets import Dataset
from helpers import demo_prompts
from lfm2_cb.integrations.trl import rollout
from trl import GRPOConfig, GRPOTrainer

import lfm2_cb

ENGINE = {"num_blocks": 128, "max_requests_per_batch": 32}


def odd_tokens(completion_ids, **_):
    """A toy reward: the share of tokens with an odd id, half of them by chance."""
    return [sum(token % 2 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def make_trainer(model, tokenizer, folder, rollout_func=None, **options):
    defaults = {
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "max_completion_length": 6,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "constant",
        "max_steps": 8,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": 1,
        "transformers_continuous_batching_config": ENGINE,
    }
    short = [prompt for prompt in demo_prompts(100) if len(prompt) < 40]
    return GRPOTrainer(
        model=model,
        reward_funcs=odd_tokens,
        args=GRPOConfig(output_dir=str(folder), **{**defaults, **options}),
        train_dataset=Dataset.from_dict({"prompt": short}),
        processing_class=tokenizer,
        rollout_func=rollout_func,
    )


def rewards(trainer):
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


@pytest.fixture
def model():
    return lfm2_cb.Lfm2CbForCausalLM.from_pretrained(lfm2_cb.demo_model_path(), dtype=torch.float32)


def test_grpo_through_the_stock_protocol_raises_the_reward(model, demo_tokenizer, tmp_path):
    trainer = make_trainer(model, demo_tokenizer, tmp_path, use_transformers_continuous_batching=True)
    trainer.train()
    found = rewards(trainer)
    assert len(found) == 8 and sum(found[-2:]) / 2 > sum(found[:2]) / 2 + 0.1, found


def test_grpo_with_the_rollout_function_raises_the_reward(model, demo_tokenizer, tmp_path):
    trainer = make_trainer(model, demo_tokenizer, tmp_path, rollout_func=rollout)
    trainer.train()
    found = rewards(trainer)
    assert len(found) == 8 and sum(found[-2:]) / 2 > sum(found[:2]) / 2 + 0.1, found


@pytest.mark.parametrize("stock", [False, True])
def test_a_rollout_follows_the_weights_and_tells_the_log_probabilities(
    model, demo_stock, demo_tokenizer, tmp_path, stock
):
    model = copy.deepcopy(demo_stock) if stock else model
    trainer = make_trainer(model, demo_tokenizer, tmp_path, rollout_func=rollout, temperature=0.7)
    chat = [{"role": "user", "content": "Who is Emma?"}]
    prompts = [demo_prompts(3)[0]] * 4 + [chat] * 4
    for _ in range(2):
        result = rollout(prompts, trainer)
        assert [len(ids) for ids in result["completion_ids"]] == [len(values) for values in result["logprobs"]]
        assert result["prompt_ids"][4][:2] == demo_tokenizer.apply_chat_template(chat)["input_ids"][:2]
        columns = (result[name] for name in ("prompt_ids", "completion_ids", "logprobs"))
        for prompt, completion, values in zip(*columns, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / 0.7
            expected = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).squeeze(1)
            torch.testing.assert_close(torch.tensor(values), expected, atol=2e-4, rtol=0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * parameter.std() * torch.randn_like(parameter))
