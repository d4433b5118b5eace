"""Rules of `algo.teacher`: on-policy distillation from a server that runs already."""

from __future__ import annotations

from prl.config.chosen import said_by_user
from prl.config.keys import as_override
from prl.config.loopback import on_loopback
from prl.config.rules.rule import Refuse, each_of

KEYS = ("served_model", "api_key_var", "tau")

there_is_something_to_learn_from = Refuse(
    lambda c, w: not c.algo.adv_tau and not c.algo.teacher.urls,
    "Nothing is learnt: neither from rewards nor from a teacher.",
    where="{algo.adv_tau=:g}, algo.teacher.urls=[]",
    why="algo.adv_tau is the weight of what follows from rewards, and there is no teacher",
    fix="algo.teacher.urls=[http://HOST:PORT] of a server with a larger model, or algo.adv_tau=1",
)


def _without_effect(key: str) -> Refuse:
    return Refuse(
        lambda c, w: said_by_user(c, f"algo.teacher.{key}"),
        f"algo.teacher.{key} has no effect.",
        where=f"algo.teacher.{key}, algo.teacher.urls=[]",
        why="there is no teacher",
        fix=f"leave algo.teacher.{key} out, or algo.teacher.urls=[http://HOST:PORT]",
    )


teacher_keys_take_effect = each_of(*map(_without_effect, KEYS), given=lambda c, w: not c.algo.teacher.urls)

teachers_can_be_learnt_from = each_of(
    Refuse(
        lambda c, w: not c.algo.teacher.tau,
        "The teacher is asked for nothing.",
        where="algo.teacher.tau=0, algo.teacher.urls",
        why="tau is the weight of what it says",
        fix="algo.teacher.tau=1, or algo.teacher.urls=[]",
    ),
    Refuse(
        lambda c, w: c.inference.sampling.temperature != 1 or c.inference.sampling.truncates(c.model.card.vocab_size),
        "A teacher does not judge tokens that are drawn otherwise than the policy gives them.",
        where="{inference.sampling.temperature=:g}, {inference.sampling.top_p=:g}, {inference.sampling.top_k=}, "
        "{inference.sampling.min_p=:g}, algo.teacher.urls",
        why="log p_policy is of the distribution sampled from, log p_teacher of its whole one at temperature 1; their "
        "difference would not be a divergence of the two models",
        fix="inference.sampling.temperature=1 inference.sampling.top_p=1 inference.sampling.top_k=0 "
        "inference.sampling.min_p=0",
    ),
    Refuse(
        lambda c, w: len(set(c.algo.teacher.urls)) < len(c.algo.teacher.urls),
        "A teacher is named twice.",
        where="{algo.teacher.urls=}",
        why="requests are shared out among them, and one would get twice its part",
        fix=lambda c, w: f"algo.teacher.urls={as_override(tuple(dict.fromkeys(c.algo.teacher.urls)))}",
    ),
    Refuse(
        lambda c, w: w.spans_nodes and on_loopback(c.algo.teacher.urls),
        "Other nodes do not reach a teacher on loopback.",
        where="{algo.teacher.urls=}",
        why="the run is spread over several nodes",
        fix="the address of the teacher's host (vllm serve --host 0.0.0.0, inference.host=0.0.0.0)",
    ),
    Refuse(
        lambda c, w: set(c.algo.teacher.urls) & set(c.inference.urls),
        "A server cannot be the policy's engine and its teacher.",
        where="{algo.teacher.urls=}, {inference.urls=}",
        why="it would be given the policy's weights",
        fix="another address for algo.teacher.urls",
    ),
    given=lambda c, w: c.algo.teacher.urls,
)
