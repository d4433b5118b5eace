"""Weights to the engines, batches to the trainer: bytes, and the seconds that they take of somebody."""

from __future__ import annotations

from prl.config.block_fp8 import sends_blocks
from prl.config.schema import RunConfig
from prl.forecast.cost import HOST, NIC, NOTHING, NVLINK, Cost
from prl.forecast.rollout import fleet_of, held
from prl.forecast.setting import BF16, Setting
from prl.forecast.workload import Workload
from prl.planning.model_size import parameter_count
from prl.planning.run_plan import RunPlan

# ids, positions and versions, mask, log-probabilities, advantages of a token (prl/transport/batch.py)
BATCH_BYTES = 8 + 8 + 4 + 1 + 4 + 4
SMALL_EXPERTS = 256  # whose numbers are one byte


def publication(s: Setting, plan: RunPlan) -> Cost:
    """By `nccl`, as prl/transport/rounds.py plans it: every rank sends the same share of what all engines want, each
    engine GPU gets what it holds, or all of it (`takes_whole`), and who takes longer decides. All other transports go
    through host memory of one rank's node or disk and are only counted by their bytes and the host link.
    """
    fleets = [fleet for kind in ("both", "prefill", "decode") if (fleet := fleet_of(plan, (kind,))) is not None]
    if not fleets or s.config.weight_transport.type == "lora":
        return NOTHING
    each = 1 if sends_blocks(s.config) else BF16
    whole = takes_whole(s.config)
    received = [(parameter_count(s.card) if whole else sum(held(s, fleet))) * each for fleet in fleets]
    wanted = sum(fleet.engines * fleet.devices * size for fleet, size in zip(fleets, received, strict=True))
    sent = wanted / s.mesh.size
    slower = max(sent, *received)
    if s.config.weight_transport.type == "ipc":
        return s.memory(2 * max(received))
    if s.config.weight_transport.type != "nccl":
        return Cost({"host_link": s.hardware.seconds("host_link", slower)}, {("publication", HOST): sent})
    near = plan.num_nodes == 1
    name = "nvlink_all_to_all" if near else "nic"
    return Cost({name: s.hardware.seconds(name, slower)}, {("publication", NVLINK if near else NIC): sent})


def takes_whole(config: RunConfig) -> bool:
    """Whether each process of an engine is sent every tensor whole: where vLLM itself quantises what it loads
    (prl/inference/vllm/loading.py).
    """
    return config.inference.quantization is not None and not sends_blocks(config)


def batches(s: Setting, work: Workload) -> Cost:
    """All rollouts of a step through the orchestrator, which takes them in and hands them out."""
    if not work.completions:
        return NOTHING
    nbytes = work.tokens * token_bytes(s)
    mine = nbytes / s.mesh.data_ranks / s.mesh.cp
    return Cost({"control_plane": s.hardware.seconds("control_plane", nbytes)}, {("batches", HOST): mine})


def token_bytes(s: Setting) -> int:
    card = s.card
    if not (s.config.inference.return_routed_experts and card.num_experts):
        return BATCH_BYTES
    each = 1 if card.num_experts <= SMALL_EXPERTS else 2
    return BATCH_BYTES + card.num_hidden_layers * card.num_experts_per_tok * each
