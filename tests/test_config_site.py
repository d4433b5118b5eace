"""A site's own settings, conf/local/default.yaml."""

from __future__ import annotations

import shutil

import pytest

from prl.config import ConfigError, chosen, compose, composer, composing, locate

SITE = """# @package _global_
deployment:
  gpus_per_node: 4
  num_infer_nodes: 2
inference:
  env: {VLLM_LOGGING_LEVEL: WARNING}
  concurrency: {start: 32}
  router: {url: http://a:1, cache_threshold: 0.5}
weight_transport:
  keep: 5
optim:
  betas: [0.9, 0.99]
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """conf/ with a site's file, and the path of that."""
    conf = tmp_path / "conf"
    shutil.copytree(locate.conf_dir(), conf, ignore=shutil.ignore_patterns("local"))
    for module in (locate, composing, composer, chosen):
        monkeypatch.setattr(module, "conf_dir", lambda: conf)
    (conf / "local").mkdir()
    (conf / "local/default.yaml").write_text(SITE)
    return conf / "local/default.yaml"


@pytest.mark.parametrize(
    "overrides",
    [[], ["weight_transport=shared_memory"], ["optim=sgd"], ["deployment=multi_node"], ["weight_transport.keep=5"]],
)
def test_what_a_site_says_for_all_its_runs_need_not_change_this_one(site, overrides):
    config = compose(overrides)
    assert config.deployment.num_infer_nodes == 2
    assert config.weight_transport.keep == 5


@pytest.mark.parametrize(
    "override", ["weight_transport.keep=4", "optim.betas=[0.9,0.98]", "inference.concurrency.start=16"]
)
def test_what_the_user_says_instead_must_have_an_effect(site, override):
    with pytest.raises(ConfigError, match="has no effect"):
        compose(["weight_transport=shared_memory", "optim=sgd", override])


def test_a_site_may_say_nothing(site):
    site.write_text("# @package _global_\n")
    assert compose(["weight_transport=shared_memory"]).weight_transport.type == "shared_memory"
