"""The groups `inference` and `eval` of the schema: engines, how they sample, the router in front of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from prl.config.schema_fields import (
    Devices,
    EngineUrl,
    Fraction,
    Group,
    HostName,
    NoneOrDevices,
    NonNegative,
    NonNegativeFloat,
    Place,
    Port,
    Positive,
    Samples,
    Seconds,
    Temperature,
    Text,
    TopP,
    VariableName,
)

GREEDY_BELOW = 1e-5  # temperatures under this are 0, as in vLLM


class SamplingConfig(Group):
    """How tokens are drawn. Training renormalises over what top_p, top_k and min_p leave (`KeptTokens`)."""

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: NonNegative = 0  # 0: off
    min_p: Fraction = 0.0
    max_tokens: Positive = 64
    stop_token_ids: tuple[NonNegative, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def only_the_best(self) -> bool:
        """Whether there is but one token to draw."""
        return self.greedy or self.top_k == 1 or self.min_p == 1

    def truncates(self, vocab: int) -> bool:
        """Whether some of the vocabulary's entries cannot be drawn; greedy engines ignore what would."""
        return not self.greedy and (self.top_p < 1 or 0 < self.top_k < vocab or self.min_p > 0)


class EngineGroupConfig(Group):
    """What prefill or decode engines have otherwise than the rest of `inference` says; vllm and env add to it."""

    tp: Devices | None = None
    dp: Devices | None = None
    all2all_backend: str | None = None
    vllm: dict[str, Any] = {}
    env: dict[str, str] = {}


class PrefillDecodeConfig(Group):
    """Prefill and decode on engines of their own; KV goes from one to the other by NIXL."""

    num_prefill_gpus: NoneOrDevices = 0  # of the inference devices, the first ones; 0: every engine does both
    prefill: EngineGroupConfig = EngineGroupConfig()
    decode: EngineGroupConfig = EngineGroupConfig()


class KvOffloadConfig(Group):
    """Where KV that the GPU has no room for goes. native: a pool of each engine's own; mooncake: one of all nodes."""

    type: Literal["none", "native", "mooncake"] = "none"
    cpu_gib: NonNegativeFloat = 0.0  # native: host memory, GiB for each engine process
    disk_path: Place | None = None  # native: a directory of each node behind the host memory
    mooncake_config: str | None = None  # mooncake: its JSON file, as MOONCAKE_CONFIG_PATH


class ConcurrencyConfig(Group):
    """How many rollouts run at once, at most inference.max_concurrent_rollouts. adaptive: as the engines can hold."""

    mode: Literal["fixed", "adaptive"] = "fixed"
    min: Positive = 1  # adaptive: however full the engines
    start: Positive | None = None  # adaptive: the first limit; None: max_num_seqs for each engine
    kv_low: Fraction = 0.8  # adaptive: share of an engine's KV cache up to which the limit grows
    kv_high: Fraction = 0.95  # adaptive: share beyond which it is trimmed
    interval_s: Seconds = 1.0  # between two looks at the engines' metrics; fixed: they are reported only


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
    urls: tuple[EngineUrl, ...] = ()  # engines that run already, http://HOST:PORT each; (): the run starts its own
    max_num_seqs: Positive = 128  # sequences decoded together by one engine
    max_model_len: Positive = 256  # prompt plus completion, tokens
    max_concurrent_rollouts: Positive = 256  # over all engines
    concurrency: ConcurrencyConfig = ConcurrencyConfig()
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: as model.dtype
    prefix_caching: bool = True
    return_routed_experts: bool = False
    host: HostName = "127.0.0.1"
    port: Port = 0  # 0: a free one
    served_model: str | None = None  # of what servers of `urls` list, by its id; for evaluations
    api_key_var: VariableName | None = None  # name of the environment variable that holds the API key
    control_key_var: VariableName | None = None  # of a server that runs take weights to, and of such a run
    tp: Devices = 1  # vllm: devices over which one copy of the model is split
    dp: Devices = 1  # vllm: copies within one engine
    # who spreads requests over the dp ranks: the engine itself; internal to each node, clients between nodes; clients
    dp_load_balancing: Literal["internal", "hybrid", "external"] = "internal"
    expert_parallel: bool = False  # vllm: experts spread over all tp * dp devices of an engine
    all2all_backend: str | None = None  # vllm: its name for how tokens get to experts, say deepep_low_latency
    # vllm: its name for the format of weights in the engine, say fp8. Any: fp8_block, as which the trainer sends them
    quantization: str | None = None
    deep_gemm: bool | None = None  # vllm: DeepGEMM kernels for FP8; null: as vLLM decides
    env: dict[str, str] = {}  # vllm: environment variables of its processes
    router: RouterConfig = RouterConfig()
    vllm: dict[str, Any] = {}  # any argument of `vllm serve`, by its name with underscores
    pd: PrefillDecodeConfig = PrefillDecodeConfig()
    kv_offload: KvOffloadConfig = KvOffloadConfig()
    # colocated, while the trainer works: 1: KV freed, weights to the host; 2: both dropped; 0: vLLM keeps its memory
    sleep_level: Literal[0, 1, 2] = 1
    request_timeout_s: Seconds = 300.0
    sampling: SamplingConfig = SamplingConfig()


class EvalConfig(Group):
    """Group `eval`: held-out evaluation."""

    interval: NonNegative = 10  # optimizer steps; 0: never
    at_start: bool = True
    at_end: bool = True
    num_tasks: Positive = 64
    k: Samples = 1  # samples per task, for avg@k and pass@k
    pass_threshold: Fraction = 1.0  # a reward of at least this counts as passed
    # prl.eval: a run directory and the optimizer step whose policy is meant; None: the model as model.path has it
    run: Text | None = None
    step: NonNegative | Literal["last"] = "last"  # last: its newest checkpoint
    # how it samples: None: as training does; 0 of top_k is off. Nothing learns from it, so it may truncate as it likes
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: NonNegative | None = None
    min_p: Fraction | None = None

    def sampling(self, of_training: SamplingConfig) -> SamplingConfig:
        """That of training, changed where a key of this group says so."""
        own = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        return of_training.model_copy(update={key: value for key, value in own.items() if value is not None})
