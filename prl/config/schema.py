"""The frozen run configuration. Hydra composes plain YAML; `RunConfig` is what it becomes at the one boundary.

Every class here is one config group (or a part of one) under its key in `conf/`. Past this boundary no DictConfig
exists. Rules that involve a single field live here as types; rules across groups live in `prl.config.rules`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Group(BaseModel):
    """Base of all groups: frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


# --- model ------------------------------------------------------------------------------------------------------------


class ModelCard(Group):
    """Architecture facts that rules and the plan need before any checkpoint is opened.

    For a model without `path` the card *is* the architecture; for one with a path, the checkpoint's config.json must
    agree.
    """

    family: Literal["qwen3", "qwen3_moe", "other"]
    num_hidden_layers: Positive
    hidden_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    intermediate_size: NonNegative = 0
    num_experts: NonNegative = 0
    num_experts_per_tok: NonNegative = 0
    moe_intermediate_size: NonNegative = 0
    norm_topk_prob: bool = True
    vocab_size: Positive
    max_position_embeddings: Positive = 4096
    rope_theta: PositiveFloat = 10000.0
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = False
    cp_styles: tuple[Literal["ulysses", "ring"], ...] = ("ulysses", "ring")
    ac_targets: tuple[str, ...] = ()


class ModelConfig(Group):
    """Group `model`: which weights, which code runs them."""

    name: str
    path: str | None = None  # Hugging Face checkpoint directory or hub id; None: random weights made from the card
    tokenizer: str | None = None  # directory or hub id; None: the one at `path`; "byte": the built-in byte-level one
    impl: Literal["auto", "custom", "hf"] = "auto"
    attn: Literal["auto", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"  # compute dtype; master weights are always float32
    fp8: Literal["none", "deep_gemm", "emulated"] = "none"  # block-scaled training GEMMs; emulated: same rounding, slow
    router_bias_update_rate: NonNegativeFloat = 0.0  # aux-loss-free load balancing (arXiv:2408.15664); 0: off
    init_seed: int = 0  # seed of the random weights when path is None
    card: ModelCard


# --- parallelism and memory -------------------------------------------------------------------------------------------


class ParallelismConfig(Group):
    """Group `parallelism`: the trainer's device mesh."""

    dp_replicate: Positive = 1
    dp_shard: Positive | Literal["auto"] = "auto"
    ep: Positive | Literal["auto"] = 1
    cp: Positive = 1
    cp_style: Literal["ulysses", "ring"] = "ulysses"
    allow_cp_across_nodes: bool = False
    ep_comm_backend: Literal["torch", "deepep"] = "torch"
    ep_pieces: Positive = 1
    deepep_num_sms: Positive = 20
    deepep_token_chunk_size: Positive | None = None
    reshard_after_forward: bool = True


class ActivationCheckpointing(Group):
    mode: Literal["none", "full", "selective"] = "none"
    freq: Positive = 1
    targets: tuple[str, ...] = ()


class ActivationOffloading(Group):
    enabled: bool = False
    max_inflight_activations: Positive = 5


class LoraConfig(Group):
    """Low-rank adapters (arXiv:2106.09685). Targets are module names; "experts" means the stacked expert matrices."""

    rank: NonNegative = 0  # 0: full-parameter training
    alpha: PositiveFloat = 16.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    export_merged: bool = True  # beside the adapter, the whole model with the adapter added in


class MemoryConfig(Group):
    """Group `memory_recipe` (selected as `memory=` or `memory_recipe=`): what trades speed for memory."""

    ac: ActivationCheckpointing = ActivationCheckpointing()
    ac_offloading: ActivationOffloading = ActivationOffloading()
    fused_lm_head_token_chunk_size: Positive | Literal["auto", "disabled"] = "disabled"
    fsdp_cpu_offload: bool = False
    # true: moments wait on the host between steps; full: float32 master weights, moments and the step itself live there
    optim_cpu_offload: bool | Literal["full"] = False
    compile: bool = False
    lora: LoraConfig = LoraConfig()


# --- deployment -------------------------------------------------------------------------------------------------------


class DeploymentConfig(Group):
    """Group `deployment`: who runs where. A device is a GPU, or a CPU slot where there are none."""

    type: Literal["colocated", "disaggregated", "multi_node"] = "disaggregated"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_train_gpus: Positive | Literal["auto"] = "auto"  # auto: the smallest world that the parallelism needs
    num_infer_gpus: NonNegative = 1
    gpus_per_node: Positive = 8
    num_train_nodes: Positive = 1
    num_infer_nodes: NonNegative = 1
    nodes_per_fsdp_group: Positive | None = None
    start_timeout_s: PositiveFloat = 300.0
    hang_timeout_s: PositiveFloat = 600.0  # a child whose main loop shows no sign of life for so long is hung
    stop_timeout_s: PositiveFloat = 60.0  # time for checkpoint and orderly stop before children are killed


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
    rollout_timeout_s: PositiveFloat = 120.0
    reward_timeout_s: PositiveFloat = 10.0


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
    loss: Literal["masked_importance", "ppo_clip", "gspo", "cispo"] = "masked_importance"
    mask_low: PositiveFloat = 0.2
    mask_high: PositiveFloat = 0.2
    kl_tau: NonNegativeFloat = 1e-3
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    entropy_coef: float = 0.0


class SamplingConfig(Group):
    temperature: NonNegativeFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0  # 0: off
    min_p: Fraction = 0.0
    max_tokens: Positive = 64
    stop_token_ids: tuple[int, ...] = ()


class EngineGroupConfig(Group):
    """What prefill or decode engines have otherwise than the rest of `inference` says; vllm and env add to it."""

    tp: Positive | None = None
    dp: Positive | None = None
    all2all_backend: str | None = None
    vllm: dict[str, Any] = {}
    env: dict[str, str] = {}


class PrefillDecodeConfig(Group):
    """Prefill and decode on engines of their own; KV goes from one to the other by NIXL."""

    num_prefill_gpus: NonNegative = 0  # of the inference devices, the first ones; 0: every engine does both
    prefill: EngineGroupConfig = EngineGroupConfig()
    decode: EngineGroupConfig = EngineGroupConfig()


class KvOffloadConfig(Group):
    """Where KV that the GPU has no room for goes. native: a pool of each engine's own; mooncake: one of all nodes."""

    type: Literal["none", "native", "mooncake"] = "none"
    cpu_gib: NonNegativeFloat = 0.0  # native: host memory, GiB for each engine process
    disk_path: str | None = None  # native: a directory of each node behind the host memory
    mooncake_config: str | None = None  # mooncake: its JSON file, as MOONCAKE_CONFIG_PATH


class ConcurrencyConfig(Group):
    """How many rollouts run at once, at most inference.max_concurrent_rollouts. adaptive: as the engines can hold."""

    mode: Literal["fixed", "adaptive"] = "fixed"
    min: Positive = 1  # adaptive: however full the engines
    start: Positive | None = None  # adaptive: the first limit; None: max_num_seqs for each engine
    kv_low: Fraction = 0.8  # adaptive: share of an engine's KV cache up to which the limit grows
    kv_high: Fraction = 0.95  # adaptive: share beyond which it is trimmed
    interval_s: PositiveFloat = 1.0  # between two looks at the engines' metrics; fixed: they are reported only


class RouterConfig(Group):
    """Node `inference.router`: one address in front of all engines. Thresholds are those of vllm-router."""

    # none: the orchestrator shares requests out itself; auto: vllm_router where it is installed, else builtin;
    # url: somebody else's, say NVIDIA Dynamo's frontend
    type: Literal["none", "auto", "builtin", "vllm_router", "url"] = "none"
    url: str | None = None
    policy: Literal["cache_aware", "round_robin"] = "cache_aware"
    cache_threshold: Fraction = 0.3  # of a prompt that an engine must have seen for its cache to decide
    # load decides instead once the engine has more requests in flight than the idlest: by so many, and so many times
    balance_abs_threshold: NonNegative = 8
    balance_rel_threshold: Annotated[float, Field(ge=1)] = 1.5


class InferenceConfig(Group):
    """Group `inference`: the engine and how it samples."""

    engine: Literal["torch", "vllm"] = "torch"
    max_num_seqs: Positive = 128  # sequences decoded together by one engine
    max_model_len: Positive = 256  # prompt plus completion, tokens
    max_concurrent_rollouts: Positive = 256  # over all engines
    concurrency: ConcurrencyConfig = ConcurrencyConfig()
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: as model.dtype
    prefix_caching: bool = True
    return_routed_experts: bool = False
    host: str = "127.0.0.1"
    port: NonNegative = 0  # 0: a free one
    api_key_var: str | None = None  # name of the environment variable that holds the API key
    tp: Positive = 1  # vllm: devices over which one copy of the model is split
    dp: Positive = 1  # vllm: copies within one engine
    # who spreads requests over the dp ranks: the engine itself; internal to each node, clients between nodes; clients
    dp_load_balancing: Literal["internal", "hybrid", "external"] = "internal"
    expert_parallel: bool = False  # vllm: experts spread over all tp * dp devices of an engine
    all2all_backend: str | None = None  # vllm: its name for how tokens get to experts, say deepep_low_latency
    quantization: str | None = None  # vllm: its name for the format of weights in the engine, say fp8
    deep_gemm: bool | None = None  # vllm: DeepGEMM kernels for FP8; null: as vLLM decides
    env: dict[str, str] = {}  # vllm: environment variables of its processes
    router: RouterConfig = RouterConfig()
    vllm: dict[str, Any] = {}  # any argument of `vllm serve`, by its name with underscores
    pd: PrefillDecodeConfig = PrefillDecodeConfig()
    kv_offload: KvOffloadConfig = KvOffloadConfig()
    # colocated, while the trainer works: 1: KV freed, weights to the host; 2: both dropped; 0: vLLM keeps its memory
    sleep_level: Literal[0, 1, 2] = 1
    request_timeout_s: PositiveFloat = 300.0
    sampling: SamplingConfig = SamplingConfig()


class EvalConfig(Group):
    """Group `eval`: held-out evaluation."""

    interval: NonNegative = 10  # optimizer steps; 0: never
    at_start: bool = True
    at_end: bool = True
    num_tasks: Positive = 64
    k: Positive = 1  # samples per task, for avg@k and pass@k
    pass_threshold: Fraction = 1.0  # a reward of at least this counts as passed
    temperature: NonNegativeFloat | None = None  # None: as in training


# --- optimisation, transport, checkpoints, logging --------------------------------------------------------------------


class ScheduleConfig(Group):
    type: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: NonNegative = 0
    decay_steps: NonNegative = 0  # wsd: length of the final decay; linear and cosine: 0 means all steps after warm-up
    min_lr_ratio: Fraction = 0.0


class OptimConfig(Group):
    """Group `optim`."""

    type: Literal["adamw", "muon", "sgd"] = "adamw"
    lr: PositiveFloat = 1e-3
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    momentum: Fraction = 0.95  # muon and sgd
    max_grad_norm: NonNegativeFloat = 1.0  # 0: no clipping
    schedule: ScheduleConfig = ScheduleConfig()


class WeightTransportConfig(Group):
    """Group `weight_transport`: how new weights reach the engines."""

    type: Literal["filesystem", "shared_memory", "tcp", "nccl", "ipc", "lora"] = "filesystem"
    bucket_mib: Positive = 256  # nccl and ipc: of each bucket in which weights travel
    stage_mib: NonNegative = 2048  # nccl: GPU memory for buckets; a model that fits leaves the trainer free at once
    keep: Positive = 2  # filesystem and lora: newest versions kept
    verify_checksum: bool = True
    timeout_s: PositiveFloat = 120.0


class WandbConfig(Group):
    mode: Literal["auto", "offline", "online", "disabled"] = "auto"  # auto: online with a key, offline without
    project: str = "prl"
    entity: str | None = None
    group: str | None = None  # None: the sweep's name and id
    tags: tuple[str, ...] = ()


class LoggingConfig(Group):
    """Group `logging`."""

    level: Literal["debug", "info", "warning"] = "info"
    progress: Literal["auto", "live", "plain", "none"] = "auto"  # auto: live on a terminal, plain lines elsewhere
    local_ranks: tuple[NonNegative, ...] = ()  # processes of each role and node whose logs the console shows too
    wandb: WandbConfig = WandbConfig()


class CkptConfig(Group):
    """Group `ckpt`."""

    interval: NonNegative = 20  # optimizer steps; 0: only on an orderly stop and at the end
    keep: Positive = 2  # newest complete checkpoints kept
    at_end: bool = True
    asynchronous: bool = True
    export_hf: bool = True  # write the final policy as a Hugging Face checkpoint under <run>/export/


class DebugConfig(Group):
    """Group `debug`."""

    deterministic: bool = False  # torch.use_deterministic_algorithms in every role
    num_threads: NonNegative = 0  # CPU threads per child; 0: cores divided by the children that compute together
    keep_rollouts: bool = False  # append every trained rollout to <run>/rollouts.jsonl


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
    """Supervised fine-tuning: the job of `prl.sft`, and the warm start of `prl.rl`."""

    data: SftDataConfig
    optim: OptimConfig = OptimConfig()
    max_steps: Positive = 100
    seq_len: Positive = 1024  # tokens of one packed row
    batch_size: Positive = 4  # packed rows per optimizer step, over all data ranks
    val_interval: NonNegative = 20
    val_rows: Positive = 8
    target_val_loss: NonNegativeFloat = 0.0  # stop once validation loss per token is at most this; 0: never


# --- benchmarks -------------------------------------------------------------------------------------------------------


class BenchConfig(Group):
    """Group `bench`: what `prl.bench` measures, and on which made-up data."""

    target: Literal["trainer_rl", "trainer_sft", "inference", "stack", "transformers"] = "trainer_rl"
    doc_len: Positive | tuple[Positive, ...] = 1024  # tokens of a document, or of each document of a row
    lengths: Literal["fixed", "variable"] = "fixed"  # variable: uniform from doc_len / 8 to doc_len
    micro_batches: Positive = 1  # packed rows per data rank and step
    warmup_steps: NonNegative = 2
    steps: Positive = 5  # measured ones
    random_weights: bool = True  # drawn in place; false: those of model.path (stack always takes these)
    baseline_checkpointing: bool = True  # transformers: gradient checkpointing
    profile: bool = False  # one more step under torch.profiler: where the time goes
    output_json: str | None = None


class SlurmConfig(Group):
    """Node `slurm`: what a job of this point asks of SLURM; what is null is as the launcher choice has it.

    For SLURM's own words see its sbatch manual.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | Positive | None = None  # as sbatch reads it: minutes, or D-HH:MM:SS
    constraint: str | None = None
    cpus_per_task: Positive | None = None
    mem: str | Positive | None = None
    gres: str | None = None  # null: gpu:N, for a point on N GPUs of each node
    sbatch: tuple[str, ...] | None = None  # further lines, say "--exclusive"
    setup: tuple[str, ...] | None = None  # shell lines before the point starts: modules, NCCL_SOCKET_IFNAME
    container: str | None = None  # image for srun --container-image (pyxis)
    template_path: str | None = None  # Jinja2 template of the whole script
    signal_delay_s: Positive | None = None  # how long before its end a job is told to save and requeue
    max_retries: NonNegative | None = None  # of failures that may pass: node, hang, collective


# --- the run ----------------------------------------------------------------------------------------------------------


class RunConfig(Group):
    """One resolved point: everything that a run needs to know, and nothing that changes while it runs."""

    job: Literal["rl", "sft", "inference", "bench"]
    name: str
    seed: int = 0
    max_steps: Positive
    seq_len: Positive  # tokens of one packed training row
    output_dir: str | None = None  # None: a fresh directory under outputs/
    cache_dir: str
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
    warm_start: SftConfig | None = None  # rl: supervised steps before the first rollout, cached by their config
    sft: SftConfig | None = None  # sft: the job itself
    bench: BenchConfig | None = None  # bench: what to measure
