"""Rules of evaluations by themselves (`prl.eval`)."""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.chosen import said_by_user
from prl.config.errors import UserError
from prl.config.keys import as_override
from prl.config.schema import RunConfig
from prl.config.world import World


def one_policy_is_meant(config: RunConfig, world: World) -> Iterator[UserError]:
    """Engines that run already have weights, and keep them."""
    inference, evaluation = config.inference, config.eval
    if not inference.urls:
        return
    where = f"inference.urls={as_override(inference.urls)}"
    if evaluation.run is not None:
        yield UserError(
            "Engines that run already are evaluated with the weights that they have.",
            where=f"{where}, eval.run={evaluation.run}",
            why="an evaluation brings them none",
            fix="eval.run=null, or inference.urls=[]",
        )
    if inference.control_key_var is not None:
        yield UserError(
            "inference.control_key_var has no effect.",
            where=f"inference.control_key_var={inference.control_key_var}, job=eval",
            why="an evaluation samples as any client does, and changes nothing in the engines",
            fix="inference.control_key_var=null; inference.api_key_var=NAME for servers that want a key",
        )
    if said_by_user(config, "inference.return_routed_experts"):
        yield UserError(
            "inference.return_routed_experts has no effect.",
            where=f"{where}, inference.return_routed_experts",
            why="nothing is trained on what is sampled",
            fix="inference.return_routed_experts=false",
        )
