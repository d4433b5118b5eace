"""Of the schema: optimisers, supervised fine-tuning, benchmarks, and what a job asks of SLURM."""

from __future__ import annotations

from typing import Any, Literal

from prl.config.schema_fields import (
    Decay,
    Fraction,
    Group,
    Lengths,
    NonNegative,
    NonNegativeFloat,
    Place,
    Positive,
    PositiveFloat,
    Seed,
    SlurmMemory,
    SlurmTime,
)


class ScheduleConfig(Group):
    type: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: NonNegative = 0
    decay_steps: NonNegative = 0  # wsd: length of the final decay; linear and cosine: 0 means all steps after warm-up
    min_lr_ratio: Fraction = 0.0


class OptimConfig(Group):
    """Group `optim`."""

    type: Literal["adamw", "muon", "sgd"] = "adamw"
    lr: PositiveFloat = 1e-3
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    momentum: Decay = 0.95  # muon and sgd
    max_grad_norm: NonNegativeFloat = 1.0  # 0: no clipping
    # in a row, whose loss or gradient norm is not finite and which therefore change nothing; then the run has diverged
    max_skipped_steps: NonNegative = 3
    schedule: ScheduleConfig = ScheduleConfig()


# --- SFT --------------------------------------------------------------------------------------------------------------


class SftDataConfig(Group):
    """Where supervised examples come from: `messages` lists or prompt/completion pairs."""

    source: str  # "env:<id>" (demonstrations of a built-in environment), a .jsonl path, or a Hugging Face dataset name
    args: dict[str, Any] = {}  # of the environment or of datasets.load_dataset
    split: str = "train"
    val_source: str | None = None  # None: the source's own held-out split, or the last val_fraction of it
    val_fraction: Fraction = 0.05
    loss_roles: tuple[Literal["system", "user", "assistant", "tool"], ...] = ("assistant",)
    shuffle: bool = True


class SftConfig(Group):
    """Supervised fine-tuning: the job of `prl.sft`."""

    data: SftDataConfig
    optim: OptimConfig = OptimConfig()
    max_steps: Positive = 100
    seq_len: Positive = 1024  # tokens of one packed row
    batch_size: Positive = 4  # packed rows per optimizer step, over all data ranks
    val_interval: NonNegative = 20
    val_rows: Positive = 8
    target_val_loss: NonNegativeFloat = 0.0  # stop once validation loss per token is at most this; 0: never


class WarmStartConfig(SftConfig):
    """Group `warm_start` of `prl.rl`: supervised steps before the first rollout, cached."""

    seed: Seed = 0  # of its own: runs with other seeds begin with the same policy, and share what was trained


# --- benchmarks -------------------------------------------------------------------------------------------------------


WHOLE_RUNS = ("stack", "trl")  # targets that train from a checkpoint with rollouts of their own


class BenchConfig(Group):
    """Group `bench`: what `prl.bench` measures, and on which made-up data."""

    target: Literal["trainer_rl", "trainer_sft", "inference", "stack", "transformers", "trl"] = "trainer_rl"
    doc_len: Positive | Lengths = 1024  # tokens of a document, or of each document of a row
    lengths: Literal["fixed", "variable"] = "fixed"  # variable: uniform from doc_len / 8 to doc_len
    prompt_len: NonNegative = 0  # first tokens that all documents of a row have in common, and that are not trained
    experts: Literal["router", "even"] = "router"  # who chooses each token's; even: all as often (trainers' targets)
    micro_batches: Positive = 1  # packed rows per data rank and step
    warmup_steps: NonNegative = 2
    steps: Positive = 5  # measured ones
    random_weights: bool = True  # drawn in place; false: those of model.path (stack and trl always take these)
    baseline_checkpointing: bool = True  # transformers: gradient checkpointing
    profile: bool = False  # one more step under torch.profiler: where the time goes
    output_json: Place | None = None

    @property
    def shortest(self) -> int:
        """Tokens of the shortest document that there may be."""
        if not isinstance(self.doc_len, int):
            return min(self.doc_len)
        return self.doc_len if self.lengths == "fixed" else min(max(self.doc_len // 8, 2), self.doc_len)


class SlurmConfig(Group):
    """Node `slurm`: what a job of this point asks of SLURM; what is null is as the launcher choice has it.

    For SLURM's own words see its sbatch manual.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: SlurmTime | NonNegative | None = None  # as sbatch reads it: minutes, or D-HH:MM:SS; 0: no limit
    constraint: str | None = None
    cpus_per_task: Positive | None = None
    mem: SlurmMemory | NonNegative | None = None  # 0: all of a node
    gres: str | None = None  # null: gpu:N, for a point on N GPUs of each node
    sbatch: tuple[str, ...] | None = None  # further lines, say "--exclusive"
    setup: tuple[str, ...] | None = None  # shell lines before the point starts: modules, NCCL_SOCKET_IFNAME
    container: str | None = None  # image for srun --container-image (pyxis)
    template_path: Place | None = None  # Jinja2 template of the whole script
    signal_delay_s: Positive | None = None  # how long before its end a job is told to save and requeue
    max_retries: NonNegative | None = None  # of failures that may pass: node, hang, collective
    max_timeouts: NonNegative | None = None  # how often a job whose time is over goes on; null: always
    job_name: str | None = None  # null: prl-, and the name of the sweep
