"""Rules of inference.urls: engines that somebody else has started."""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.chosen import said_by_user
from prl.config.errors import UserError
from prl.config.keys import as_override, field_of
from prl.config.loopback import on_loopback
from prl.config.rules.rule import Refuse
from prl.config.schema import RunConfig
from prl.config.world import World

SAMPLING = ("rl", "eval")  # jobs that take engines as they are
TRANSPORTS = ("filesystem", "tcp")  # by which weights get into engines that know nothing of the run
# what an engine is started with: whoever started it has said so
OF_STARTING = (
    *("max_num_seqs", "prefix_caching", "host", "port", "tp", "dp", "dp_load_balancing", "expert_parallel"),
    *("all2all_backend", "quantization", "deep_gemm", "env", "vllm", "kv_offload", "pd"),
)
READ_ALL_THE_SAME = ("max_num_seqs",)  # also how many rollouts an adaptive limit begins with


def asked_servers(config: RunConfig) -> list[tuple[str, ...]]:
    """Addresses that run already and without which this job does nothing; of each tuple one must be there."""
    engines = config.inference.urls if config.job in ("rl", "eval") else ()
    found = [engines] if config.job == "rl" else [(url,) for url in engines]
    return [urls for urls in found if urls] + [(url,) for url in config.algo.teacher.urls if config.job == "rl"]


def engines_elsewhere_belong_to_rl(config: RunConfig, world: World) -> Iterator[UserError]:
    inference = config.inference
    if not inference.urls:
        if config.job != "inference" and said_by_user(config, "inference.control_key_var"):
            yield UserError(
                "inference.control_key_var has no effect.",
                where=f"inference.control_key_var={inference.control_key_var}, inference.urls=[]",
                why="engines that a run starts get a key of the run's own",
                fix="inference.control_key_var=null, or inference.urls=[http://HOST:PORT]",
            )
        return
    where = f"inference.urls={as_override(inference.urls)}"
    if config.job not in SAMPLING:
        yield UserError(
            "Only a run that trains, or an evaluation, takes engines that run already.",
            where=f"{where}, job={config.job}",
            why="this job starts the engines that it serves or measures"
            if config.job != "sft"
            else "it samples nothing",
            fix="inference.urls=[] inference.control_key_var=null",
        )
    if len(set(inference.urls)) < len(inference.urls):
        yield UserError(
            "An engine is named twice.",
            where=where,
            why="each would be told of every version once, and be taken for two",
            fix=f"inference.urls={as_override(tuple(dict.fromkeys(inference.urls)))}",
        )


def engines_elsewhere_can_be_told(config: RunConfig, world: World) -> Iterator[UserError]:
    """What a run cannot do with engines that it did not place."""
    inference = config.inference
    if not inference.urls or config.job not in SAMPLING:
        return
    where = "inference.urls"
    if config.deployment.type == "colocated" and config.job == "rl":
        yield UserError(
            "Engines that run already do not take turns with the trainer.",
            where=f"{where}, deployment.type=colocated",
            why="they keep their devices, and the trainer has its own",
            fix="deployment=disaggregated, or inference.urls=[] inference.control_key_var=null",
        )
    if inference.router.type != "none":
        yield UserError(
            "A router does not stand before engines that run already.",
            where=f"{where}, inference.router.type={inference.router.type}",
            why="weights go to each engine, and so do requests, which say whose weights they want"
            if config.job == "rl"
            else "a router's own address may stand among inference.urls",
            fix="inference.router.type=none inference.router.url=null",
        )
    if on_loopback(inference.urls) and world.spans_nodes:
        yield UserError(
            "Other nodes do not reach an engine on loopback.",
            where=f"{where}={as_override(tuple(on_loopback(inference.urls)))}",
            why="the run is spread over several nodes",
            fix="addresses of the engines' hosts (they are started with inference.host=0.0.0.0), or "
            "inference.urls=[] inference.control_key_var=null",
        )
    for key in OF_STARTING:
        value, default = getattr(inference, key), field_of(f"inference.{key}").default
        if key not in READ_ALL_THE_SAME and value != default and said_by_user(config, f"inference.{key}"):
            yield UserError(
                f"inference.{key} has no effect.",
                where=f"{where}, inference.{key}",
                why="it is for starting an engine, and these run already",
                fix=f"leave inference.{key} out, or inference.urls=[] inference.control_key_var=null",
            )


def weights_reach_engines_elsewhere(config: RunConfig, world: World) -> Iterator[UserError]:
    kind = config.weight_transport.type
    if not config.inference.urls or config.job != "rl" or kind in TRANSPORTS:
        return
    why = {
        "nccl": "its ranks are counted when trainer and engines start together",
        "ipc": "trainer and engines would have to be on the same GPU, in one run",
        "shared_memory": "its segments belong to the processes of one run",
        "lora": "adapters need an engine that was started for their rank",
    }[kind]
    yield UserError(
        f"Weights do not get into engines that run already by {kind}.",
        where=f"inference.urls, weight_transport.type={kind}",
        why=why,
        fix="weight_transport=filesystem (the engines see the run's directory), or weight_transport=tcp",
    )


engines_elsewhere_keep_their_keys = Refuse(
    lambda c, w: c.inference.urls and c.job == "rl" and c.inference.control_key_var is None,
    "Nothing opens the engines' doors for weights.",
    where="inference.urls, inference.control_key_var=null",
    why="weights, pauses and leases want the control key, which python -m prl.inference prints and keeps in "
    "RUN/control_key while it serves",
    fix="inference.control_key_var=PRL_CONTROL_KEY, with export PRL_CONTROL_KEY=... before both commands",
)
