"""The alternative to a whole run of RL: TRL's GRPOTrainer on one device, with transformers' `generate`.

The same start (model.path or the warm start), tasks, rewards, batch, group, sampling and held-out evaluation as
`bench.target=stack`; everything else as TRL has it: on-policy, AdamW at `optim.lr`, its own loss. Its clock stands
still while it is evaluated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from prl.bench.launch import RAW_RESULT
from prl.config.errors import UserError
from prl.envs.loading import load_env
from prl.envs.protocol import Environment, Task, assistant
from prl.models.checkpoints.sources import resolve_model_path
from prl.models.device import pick_device
from prl.models.text.tokenizer import load_tokenizer
from prl.runtime.process.child import ChildContext
from prl.trainer.policy import seed_everything

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

EVALUATED_AT_ONCE = 128


def main(ctx: ChildContext) -> None:
    """Entry of `trainer/0` with bench.target=trl."""
    result = TrlRun(ctx).run()
    (ctx.run_dir / RAW_RESULT).write_text(json.dumps(result, indent=1) + "\n")


class TrlRun:
    """One training by TRL, and what it is compared by."""

    def __init__(self, ctx: ChildContext) -> None:
        from transformers import AutoModelForCausalLM

        self.ctx, self.config = ctx, ctx.plan.config
        seed_everything(self.config.seed, deterministic=False)
        self.device = pick_device(self.config.deployment.device)
        path = resolve_model_path(self.config.model, Path(self.config.cache_dir), ctx.init_model_path)
        self.tokenizer = load_tokenizer(self.config.model, path)
        self.tokenizer.padding_side = "left"  # completions begin at one place
        dtype = torch.bfloat16 if self.config.model.dtype == "bfloat16" else torch.float32
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(self.device)  # type: ignore[arg-type]
        self.env = single_turn(self.config.env.mix)
        self.clock = Clock()
        self.held_out: list[tuple[int, float, float]] = []  # step, seconds of training before it, reward

    def run(self) -> dict[str, Any]:
        from datasets import Dataset

        config = self.config
        tasks = self.env.tasks("train")
        trainer = make_trainer(
            self, Dataset.from_list([{"prompt": list(task.prompt), "task": i} for i, task in enumerate(tasks)]), tasks
        )
        self.ctx.ready()
        trainer.train()
        assert config.bench is not None
        measured = self.clock.steps_s[config.bench.warmup_steps :]
        generated = [row["num_tokens"] for row in trainer.state.log_history if "num_tokens" in row]
        return {
            "steps": len(measured),
            "step_s": median(measured),
            "step_s_min": min(measured),
            "step_s_max": max(measured),
            "tokens_per_s": generated[-1] / sum(self.clock.steps_s),
            "held_out": self.held_out,
        }

    def evaluate(self, step: int) -> None:
        """Sampled as in training, at most eval.num_tasks tasks."""
        sampling, tasks = self.config.inference.sampling, self.env.tasks("held_out")[: self.config.eval.num_tasks]
        rewards: list[float] = []
        self.model.eval()
        for first in range(0, len(tasks), EVALUATED_AT_ONCE):
            some = tasks[first : first + EVALUATED_AT_ONCE]
            asked: Any = self.tokenizer.apply_chat_template(
                [list(task.prompt) for task in some], add_generation_prompt=True, padding=True, return_tensors="pt",
                return_dict=True,
            )  # fmt: skip
            asked = asked.to(self.device)
            with torch.no_grad():
                said = self.model.generate(
                    **asked, do_sample=True, temperature=sampling.temperature, top_p=sampling.top_p,
                    top_k=sampling.top_k, max_new_tokens=sampling.max_tokens, pad_token_id=self.tokenizer.pad_token_id,
                )  # fmt: skip
            texts = self.tokenizer.batch_decode(said[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
            rewards += [reward_of(self.env, task, text) for task, text in zip(some, texts, strict=True)]
        self.model.train()
        self.held_out.append((step, sum(self.clock.steps_s), sum(rewards) / len(rewards)))
        self.ctx.metrics.log(step=step, **{"eval/reward": self.held_out[-1][2]})


class Clock:
    """Seconds of each step: generation, rewards and the optimizer's step, without what is evaluated between them."""

    def __init__(self) -> None:
        self.steps_s: list[float] = []
        self.began = 0.0

    def start(self) -> None:
        self.began = time.monotonic()

    def stop(self) -> float:
        self.steps_s.append(time.monotonic() - self.began)
        return self.steps_s[-1]


def make_trainer(run: TrlRun, dataset: Any, tasks: Sequence[Task]) -> Any:
    """TRL's own, whose steps `run` follows."""
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    config = run.config
    sampling, bench, interval = config.inference.sampling, config.bench, config.eval.interval
    assert bench is not None

    class Follow(TrainerCallback):
        def on_train_begin(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
        ) -> None:
            if config.eval.at_start:
                run.evaluate(0)
            run.clock.start()

        def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
            run.ctx.metrics.log(step=state.global_step, step_s=run.clock.stop())
            run.ctx.beat()
            ended = state.global_step == config.max_steps and config.eval.at_end
            if ended or (interval and state.global_step % interval == 0):
                run.evaluate(state.global_step)
            run.clock.start()

    def reward(completions: list[Any], task: list[int], **_: Any) -> list[float | None]:
        return [reward_of(run.env, tasks[i], said[0]["content"]) for i, said in zip(task, completions, strict=True)]

    arguments = GRPOConfig(
        output_dir=str(run.ctx.run_dir / "trl"),
        per_device_train_batch_size=config.algo.batch_size,
        num_generations=config.algo.group_size,
        max_completion_length=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        learning_rate=config.optim.lr,
        lr_scheduler_type="constant",
        max_grad_norm=config.optim.max_grad_norm,
        weight_decay=config.optim.weight_decay,
        max_steps=config.max_steps,
        seed=config.seed,
        bf16=config.model.dtype == "bfloat16",
        gradient_checkpointing=False,
        use_cpu=run.device.type == "cpu",
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=run.model, reward_funcs=reward, args=arguments, train_dataset=dataset, processing_class=run.tokenizer,
        callbacks=[Follow()],
    )  # fmt: skip


def single_turn(mix: Any) -> Environment:
    """The one environment, which answers once and scores by `reward`. Raises UserError for others."""
    (name, source), *more = mix.items()
    env = load_env(source.id, source.args)
    if more or type(env).rollout is not Environment.rollout:
        raise UserError(
            "TRL is measured on one environment of one turn.",
            where="env=[...]" if more else f"env.mix.{name}.id={source.id}",
            why="its reward functions see a prompt and one completion",
            fix="env=reverse_text",
        )
    return env


def reward_of(env: Environment, task: Task, said: str) -> float:
    return float(env.reward(task, [*task.prompt, assistant(said)]))
