"""Rules of evaluations by themselves (`prl.eval`)."""

from __future__ import annotations

from prl.config.chosen import said_by_user
from prl.config.rules.rule import Refuse, each_of

one_policy_is_meant = each_of(
    Refuse(
        lambda c, w: c.eval.run is not None,
        "Engines that run already are evaluated with the weights that they have.",
        where="{inference.urls=}, {eval.run=}",
        why="an evaluation brings them none",
        fix="eval.run=null, or inference.urls=[]",
    ),
    Refuse(
        lambda c, w: c.inference.control_key_var is not None,
        "inference.control_key_var has no effect.",
        where="{inference.control_key_var=}, {job=}",
        why="an evaluation samples as any client does, and changes nothing in the engines",
        fix="inference.control_key_var=null; inference.api_key_var=NAME for servers that want a key",
    ),
    Refuse(
        lambda c, w: said_by_user(c, "inference.return_routed_experts"),
        "inference.return_routed_experts has no effect.",
        where="{inference.urls=}, inference.return_routed_experts",
        why="nothing is trained on what is sampled",
        fix="inference.return_routed_experts=false",
    ),
    # engines that run already have weights, and keep them
    given=lambda c, w: c.inference.urls,
)

served_model_is_a_servers = Refuse(
    lambda c, w: c.inference.served_model is not None and not (c.job == "eval" and c.inference.urls),
    "inference.served_model has no effect.",
    where="{inference.served_model=}, {job=}, {inference.urls=}",
    why="it names one of the models that a server lists, for an evaluation of what is served",
    fix="inference.served_model=null, or python -m prl.eval with inference.urls=[...]",
)
