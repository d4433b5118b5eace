"""Fixtures of more than one file: a session has one of each. And which tests a session has, if nobody says."""

import pytest
import tiers
from hypothesis import settings
from slurm_cluster import no_job_is_left, short_path, slurm

__all__ = ["no_job_is_left", "short_path", "slurm"]

# the machine may have other work; and cases that nobody has seen are for who looks for them (--hypothesis-profile=new)
settings.register_profile("new", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)  # before xdist looks how many processes there shall be
def pytest_cmdline_main(config):
    if hasattr(config, "workerinput"):  # xdist's processes are given the words of the command line, and no options
        config.option.markexpr = config.workerinput["markexpr"]
    else:
        tiers.choose(config)
        tiers.share_cores(config)


@pytest.hookimpl(optionalhook=True)  # xdist's
def pytest_configure_node(node):
    node.workerinput["markexpr"] = node.config.option.markexpr


def pytest_collection_modifyitems(items):
    tiers.longest_first(items)


@pytest.fixture
def world():
    """Of one rank, in this process, on its CPU: what a trainer joins."""
    import torch
    import torch.distributed as dist

    from prl.planning.run_plan import MeshPlan
    from prl.trainer.world import build_world

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield build_world(MeshPlan(dp_replicate=1, dp_shard=1, cp=1, ep=1), torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def plain_vllm(tmp_path_factory):
    """A server of vLLM whose weights and settings nobody changes, for who fires requests at it."""
    from vllm_server import serving

    where = tmp_path_factory.mktemp("vllm")
    with serving(["inference=vllm", "debug.num_threads=1"], where / "cache", where) as server:
        yield server


def pytest_terminal_summary(terminalreporter, config):
    tiers.tell(config, terminalreporter)
