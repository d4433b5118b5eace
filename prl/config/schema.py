"""The frozen run configuration. Hydra composes plain YAML; `RunConfig` is what it becomes at the one boundary.

Every class here is one config group (or a part of one) under its key in `conf/`. Past this boundary no DictConfig
exists. Group `model` is in `schema_model`, `inference` and `eval` in `schema_inference`, optimisers and jobs in
`schema_jobs`; all are imported from here. Rules that involve a single field live in its type; rules across groups live
in `prl.config.rules`.
"""

from __future__ import annotations

from typing import Any, Literal

from prl.config.schema_fields import (
    Devices,
    EngineUrl,
    Fraction,
    Group,
    Nodes,
    NoneOrDevices,
    NonNegative,
    NonNegativeFloat,
    Number,
    Part,
    PerNode,
    Place,
    Positive,
    PositiveFloat,
    Seconds,
    Seed,
    Silence,
    Text,
    Threads,
    VariableName,
)
from prl.config.schema_inference import (
    GREEDY_BELOW,
    ConcurrencyConfig,
    EngineGroupConfig,
    EvalConfig,
    InferenceConfig,
    KvOffloadConfig,
    PrefillDecodeConfig,
    RouterConfig,
    SamplingConfig,
)
from prl.config.schema_jobs import (
    BenchConfig,
    OptimConfig,
    ScheduleConfig,
    SftConfig,
    SftDataConfig,
    SlurmConfig,
    WarmStartConfig,
)
from prl.config.schema_model import CpStyle, ModelCard, ModelConfig

__all__ = [
    "GREEDY_BELOW",
    "ActivationCheckpointing",
    "ActivationOffloading",
    "AlgoConfig",
    "BenchConfig",
    "CkptConfig",
    "ConcurrencyConfig",
    "DebugConfig",
    "DeploymentConfig",
    "EngineGroupConfig",
    "EnvConfig",
    "EnvSource",
    "EvalConfig",
    "Group",
    "InferenceConfig",
    "KvOffloadConfig",
    "LoggingConfig",
    "LoraConfig",
    "MemoryConfig",
    "ModelCard",
    "ModelConfig",
    "OptimConfig",
    "ParallelismConfig",
    "PrefillDecodeConfig",
    "RouterConfig",
    "RunConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "SftConfig",
    "SftDataConfig",
    "SlurmConfig",
    "WandbConfig",
    "WarmStartConfig",
    "WeightTransportConfig",
]


# --- parallelism and memory -------------------------------------------------------------------------------------------


class ParallelismConfig(Group):
    """Group `parallelism`: the trainer's device mesh."""

    dp_replicate: Devices | Literal["auto"] = 1
    dp_shard: Devices | Literal["auto"] = "auto"
    ep: Devices | Literal["auto"] = 1
    cp: Devices = 1
    cp_style: CpStyle | Literal["auto"] = "auto"  # auto: the first of the model's own that fits
    allow_cp_across_nodes: bool = False
    ep_comm_backend: Literal["torch", "hierarchical", "deepep"] = "torch"
    ep_pieces: Positive = 1
    deepep_num_sms: Positive = 20
    deepep_token_chunk_size: Positive | None = None
    reshard_after_forward: bool = True
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"


class ActivationCheckpointing(Group):
    mode: Literal["none", "full", "selective"] = "none"
    freq: Positive = 1
    targets: tuple[str, ...] = ()


class ActivationOffloading(Group):
    enabled: bool = False
    max_inflight_activations: Positive = 5


ATTENTION = "attention"  # of `LoraConfig.targets`: the family's, or the model's, own


class LoraConfig(Group):
    """Low-rank adapters (arXiv:2106.09685). Targets are module names; "experts" means the stacked expert matrices,
    "attention" all linears around attention, whatever the family calls them.
    """

    rank: NonNegative = 0  # 0: full-parameter training
    alpha: PositiveFloat = 16.0
    targets: tuple[str, ...] = (ATTENTION,)
    export_merged: bool = True  # beside the adapter, the whole model with the adapter added in


class MemoryConfig(Group):
    """Group `memory_recipe` (selected as `memory=` or `memory_recipe=`): what trades speed for memory, or saves
    both."""

    ac: ActivationCheckpointing = ActivationCheckpointing()
    ac_offloading: ActivationOffloading = ActivationOffloading()
    fused_lm_head_token_chunk_size: Positive | Literal["auto", "disabled"] = "disabled"
    fsdp_cpu_offload: bool = False
    # true: moments wait on the host between steps; full: float32 master weights, moments and the step itself live there
    optim_cpu_offload: bool | Literal["full"] = False
    compile: bool = False
    # documents of an RL batch that begin alike, as a group's do with their prompt, have that run once
    share_prefixes: bool = True
    lora: LoraConfig = LoraConfig()


# --- deployment -------------------------------------------------------------------------------------------------------


class DeploymentConfig(Group):
    """Group `deployment`: who runs where. A device is a GPU, or a CPU slot where there are none."""

    type: Literal["colocated", "disaggregated", "multi_node"] = "disaggregated"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_train_gpus: Devices | Literal["auto"] = "auto"  # auto: the smallest world that the parallelism needs
    num_infer_gpus: NoneOrDevices = 1
    # which of the devices that a run sees each takes, in this order; null: the lowest that are free, engines first
    infer_gpu_ids: tuple[NonNegative, ...] | None = None
    train_gpu_ids: tuple[NonNegative, ...] | None = None
    # colocated: the engine's part of each GPU's memory, to go on beside the trainer; null: they take turns
    infer_memory_fraction: Part | None = None
    gpus_per_node: PerNode = 8
    num_train_nodes: Nodes = 1
    num_infer_nodes: NoneOrDevices = 1
    nodes_per_fsdp_group: Nodes | None = None
    start_timeout_s: Seconds = 300.0
    hang_timeout_s: Silence = 600.0  # a child whose main loop shows no sign of life for so long is hung
    stop_timeout_s: Seconds = 60.0  # time for checkpoint and orderly stop before children are killed


# --- envs, algorithm, inference ---------------------------------------------------------------------------------------


class EnvSource(Group):
    """One environment of the mix: `id` names a built-in of `prl.envs` or `package.module:Class`, `args` goes to it."""

    id: str
    weight: PositiveFloat = 1.0
    args: dict[str, Any] = {}


class EnvConfig(Group):
    """Group `env`. `env=[a,b]` on the command line mixes choices, because each adds its own key to `mix`."""

    mix: dict[str, EnvSource] = {}
    id: str | None = None  # env=verifiers: which of that package's environments
    args: dict[str, Any] = {}  # env=verifiers: of its load_environment
    max_turns: Positive = 8
    rollout_timeout_s: Seconds = 120.0
    on_timeout: Literal["drop", "zero"] = "drop"  # drop favours short rollouts; zero: what was sampled, reward 0
    reward_timeout_s: Seconds = 10.0


class TeacherConfig(Group):
    """`algo.teacher`: on-policy distillation from servers that run already."""

    urls: tuple[EngineUrl, ...] = ()
    served_model: str | None = None  # of what they list, by its id there
    api_key_var: VariableName | None = None  # name of the environment variable that holds their API key
    tau: NonNegativeFloat = 1.0  # weight of log p_teacher - log p_policy among each token's advantage


class AlgoConfig(Group):
    """Group `algo`: advantages, loss, staleness, batch composition."""

    batch_size: Positive = 128  # rollouts per optimizer step
    group_size: Positive = 8  # rollouts per task (prime-rl: rollouts_per_example)
    max_off_policy_steps: NonNegative = 2
    advantage: Literal["group_mean", "grpo", "rloo", "maxrl"] = "group_mean"
    length_rule: Literal["none", "dapo_overlong", "dapo_filter"] = "none"
    overlong_buffer: NonNegative = 0  # tokens before max_tokens over which the length penalty rises to 1
    filter_zero_signal: bool = True  # drop and replace groups whose advantages are all zero
    # per group of a batch, groups replaced for lack of signal; then they are kept
    max_replacement_ratio: NonNegativeFloat = 1.0
    adv_tau: NonNegativeFloat = 1.0  # weight of what follows from rewards among each token's advantage
    teacher: TeacherConfig = TeacherConfig()
    loss: Literal["masked_importance", "ppo_clip", "gspo", "cispo"] = "masked_importance"
    mask_low: PositiveFloat = 0.2
    mask_high: PositiveFloat = 0.2
    kl_tau: NonNegativeFloat = 1e-3
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    entropy_coef: Number = 0.0


# --- optimisation, transport, checkpoints, logging --------------------------------------------------------------------


class WeightTransportConfig(Group):
    """Group `weight_transport`: how new weights reach the engines."""

    type: Literal["filesystem", "shared_memory", "tcp", "nccl", "ipc", "lora"] = "filesystem"
    bucket_mib: Positive = 256  # nccl and ipc: of each bucket in which weights travel
    stage_mib: NonNegative = 2048  # nccl: GPU memory for buckets; a model that fits leaves the trainer free at once
    keep: Positive = 2  # filesystem and lora: newest versions kept
    verify_checksum: bool = True
    timeout_s: Seconds = 120.0


class WandbConfig(Group):
    mode: Literal["auto", "offline", "online", "disabled"] = "auto"  # auto: online with a key, offline without
    project: str = "prl"
    entity: str | None = None
    group: str | None = None  # None: the sweep's name and id
    name: str | None = None  # None: the swept choices; before them, where it is given
    tags: tuple[str, ...] = ()


class AlarmsConfig(Group):
    """When a run is said to be in trouble (prl/metrics/alarms.py), each by the median or the sum of the last `window`
    steps. None: never.
    """

    window: Positive = 10  # optimizer steps; the first ones are what later entropy and lengths are compared with
    entropy_ratio: Fraction | None = 0.02  # of the first steps' entropy; below it is a collapse
    mismatch_kl_mean: PositiveFloat | None = 0.2  # nats per token between the engines' policy and the trainer's
    mismatch_kl_p999: PositiveFloat | None = 8.0
    truncated: Fraction | None = 0.5  # share of rollouts cut off at max_tokens or seq_len
    no_signal: Fraction | None = 0.9  # share of groups whose advantages are all zero
    dropped_stale: Fraction | None = 0.25  # share of groups that became too old while they waited
    failed_rollouts: Fraction | None = 0.25  # share of an environment's rollouts that the policy did not end
    length_ratio: PositiveFloat | None = 3.0  # completion tokens over those of the first steps
    steps_skipped: NonNegative | None = 0  # steps that were not finite
    trainer_idle: Fraction | None = 0.75  # share of a step in which the trainer waits for rollouts
    engines_idle: Fraction | None = 0.75  # share of the trainer's work during which nothing is generated
    weights_unchanged: bool = True  # no weight has changed


class RolloutsConfig(Group):
    """What is kept of rollouts in <run>/rollouts/, with tokens and log-probabilities, for `python -m prl.watch`."""

    groups: NonNegative = 4  # of each step: of the highest reward, of the lowest, others at random; 0: none
    held_out: NonNegative = 8  # tasks of each environment in each evaluation, the same ones always; 0: none
    max_mib: Positive = 256  # on disk; beyond, the oldest go, but never those of the first steps


class LoggingConfig(Group):
    """Group `logging`."""

    level: Literal["debug", "info", "warning"] = "info"
    progress: Literal["auto", "live", "plain", "none"] = "auto"  # auto: live on a terminal, plain lines elsewhere
    local_ranks: tuple[NonNegative, ...] = ()  # processes of each role and node whose logs the console shows too
    rollouts: RolloutsConfig = RolloutsConfig()
    wandb: WandbConfig = WandbConfig()
    alarms: AlarmsConfig = AlarmsConfig()


class CkptConfig(Group):
    """Group `ckpt`."""

    interval: NonNegative = 20  # optimizer steps; 0: only on an orderly stop and at the end
    keep: Positive = 2  # newest complete checkpoints kept
    at_end: bool = True
    asynchronous: bool = True
    export_hf: bool = True  # write the final policy as a Hugging Face checkpoint under <run>/export/
    export_dtype: Literal["float32", "bfloat16"] = "float32"  # of its matrices; vectors stay float32
    # another run's directory and the optimizer step whose checkpoint this one begins with; None: from its start
    from_run: Text | None = None
    from_step: Positive | Literal["last"] = "last"  # last: its newest checkpoint


class DebugConfig(Group):
    """Group `debug`."""

    deterministic: bool = False  # torch.use_deterministic_algorithms in every role
    num_threads: Threads = 0  # CPU threads per child; 0: cores divided by the children that compute together
    keep_rollouts: bool = False  # append every trained rollout to <run>/rollouts.jsonl


# --- the run ----------------------------------------------------------------------------------------------------------


class RunConfig(Group):
    """One resolved point: everything that a run needs to know, and nothing that changes while it runs."""

    job: Literal["rl", "sft", "inference", "bench", "eval"]
    name: str
    seed: Seed = 0
    max_steps: Positive
    seq_len: Positive  # tokens of one packed training row
    output_dir: Place | None = None  # None: a fresh directory under outputs/
    cache_dir: Place
    choices: dict[str, str] = {}  # group -> choice as selected, for names and tables
    sweep: str | None = None  # name and id of the sweep that this point belongs to
    swept: dict[str, str] = {}  # override key -> value, only the swept ones
    model: ModelConfig
    parallelism: ParallelismConfig = ParallelismConfig()
    memory_recipe: MemoryConfig = MemoryConfig()
    deployment: DeploymentConfig = DeploymentConfig()
    env: EnvConfig = EnvConfig()
    algo: AlgoConfig = AlgoConfig()
    inference: InferenceConfig = InferenceConfig()
    optim: OptimConfig = OptimConfig()
    weight_transport: WeightTransportConfig = WeightTransportConfig()
    logging: LoggingConfig = LoggingConfig()
    ckpt: CkptConfig = CkptConfig()
    eval: EvalConfig = EvalConfig()
    debug: DebugConfig = DebugConfig()
    slurm: SlurmConfig = SlurmConfig()
    warm_start: WarmStartConfig | None = None  # rl: supervised steps before the first rollout, cached
    sft: SftConfig | None = None  # sft: the job itself
    bench: BenchConfig | None = None  # bench: what to measure
