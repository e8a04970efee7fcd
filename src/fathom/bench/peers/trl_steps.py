"""GRPO steps by TRL, timed. A file for another interpreter, in which TRL is installed; see `trl_python.py`.

Reads one line of JSON (`TrlRequest` or `TrlRows`); the last line it prints is the answer (`TrlAnswer`).
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false
# TRL and its libraries are installed in another environment than this project's.
from __future__ import annotations

import json
import sys
import tempfile
import time
from importlib.metadata import version
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Clock(TrainerCallback):
    """Notes where steps begin and end. Rewards are asked for right after the generation: that splits a step."""

    def __init__(self) -> None:
        self.rollout_s: list[float] = []
        self.train_s: list[float] = []
        self._began = self._generated = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """The prompts are known; generation follows."""
        self._began = time.perf_counter()

    def reward(self, completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        """Share of the letter e, as on the other side."""
        self._generated = time.perf_counter()
        self.rollout_s.append(self._generated - self._began)
        texts = [completion[0]["content"] for completion in completions]
        return [text.count("e") / max(1, len(text)) for text in texts]

    def alternate(self, completions: list[str], **_: Any) -> list[float]:
        """Reward every other one."""
        self._generated = time.perf_counter()
        self.rollout_s.append(self._generated - self._began)
        return [float(place % 2) for place in range(len(completions))]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The optimizer has stepped."""
        self.train_s.append(time.perf_counter() - self._generated)


def main() -> None:
    """Serve one request."""
    request: dict[str, Any] = json.loads(sys.stdin.readline())
    torch.set_num_threads(request["threads"])
    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = (_on_rows if "answers" in request else _sampling)(request, clock, scratch)
        trainer.train()
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    answer = {
        "rollout_s": clock.rollout_s[request["warmup"] :],
        "train_s": clock.train_s[request["warmup"] :],
        "mean_length": sum(map(float, lengths)) / len(lengths),
        "versions": {name: version(name) for name in ("trl", "torch", "transformers", "accelerate")},
    }
    print(json.dumps(answer))


def _sampling(request: dict[str, Any], clock: Clock, scratch: str) -> Any:
    """One batch of all prompts a step."""
    config = _config(
        request,
        scratch,
        per_device_train_batch_size=len(request["prompts"]) * request["generations"],
        num_generations=request["generations"],
        max_completion_length=request["max_new_tokens"],
        generation_kwargs={"min_new_tokens": request["max_new_tokens"]},
    )
    prompts = [[{"role": "user", "content": prompt}] for prompt in request["prompts"]]
    return _trainer(request, config, clock, clock.reward, prompts)


def _on_rows(request: dict[str, Any], clock: Clock, scratch: str) -> Any:
    """The same rows every step, which nothing is sampled for. A prompt is named by its number."""
    prompts, answers, at_once = request["prompts"], request["answers"], request["rows_per_forward"]
    rows = sum(map(len, answers))

    def given(names: list[str], _: Any) -> dict[str, Any]:
        places = [(int(name), names[:place].count(name)) for place, name in enumerate(names)]
        return {
            "prompt_ids": [prompts[prompt] for prompt, _ in places],
            "completion_ids": [answers[prompt][number] for prompt, number in places],
            "logprobs": None,
        }

    config = _config(
        request,
        scratch,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=rows // at_once,
        num_generations=len(answers[0]),
        max_completion_length=max(len(answer) for group in answers for answer in group),
        shuffle_dataset=False,
    )
    names = [str(place) for place in range(len(prompts))]
    return _trainer(request, config, clock, clock.alternate, names, rollout_func=given)


def _config(request: dict[str, Any], scratch: str, **entries: Any) -> GRPOConfig:
    """One optimizer step on each batch, no KL, no checkpointing of activations."""
    return GRPOConfig(
        output_dir=scratch,
        use_cpu=True,
        bf16=request["dtype"] == "bfloat16",
        max_steps=request["warmup"] + request["steps"],
        learning_rate=request["learning_rate"],
        beta=0.0,
        activation_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **entries,
    )


def _trainer(
    request: dict[str, Any], config: GRPOConfig, clock: Clock, reward: Any, prompts: list[Any], **entries: Any
) -> Any:
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(request["model"], dtype=_DTYPES[request["dtype"]]),
        args=config,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(request["model"]),
        callbacks=[clock],
        **entries,
    )


if __name__ == "__main__":
    main()
