"""A card's model."""

from __future__ import annotations

from prl.config.schema import ModelCard
from prl.models.families.deepseek_v3 import DeepseekV3
from prl.models.families.deepseek_v32 import DeepseekV32, GlmMoeDsa
from prl.models.families.glm4_moe import Glm4Moe
from prl.models.families.llama import Llama
from prl.models.families.minimax_m2 import MiniMaxM2
from prl.models.families.nemotron_h import NemotronH
from prl.models.families.qwen3 import Qwen3
from prl.models.layers.decoder import Decoder

DECODERS: dict[str, type[Decoder]] = {
    "llama": Llama,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3,
    "glm4_moe": Glm4Moe,
    "minimax_m2": MiniMaxM2,
    "deepseek_v3": DeepseekV3,
    "glm4_moe_lite": DeepseekV3,
    "deepseek_v32": DeepseekV32,
    "glm_moe_dsa": GlmMoeDsa,
    "nemotron_h": NemotronH,
}


def build_decoder(card: ModelCard) -> Decoder:
    """With parameters on the default device, not yet filled."""
    return DECODERS[card.family](card)
