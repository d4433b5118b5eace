"""A stop that must be over by a given time: what fits is saved, what does not is left, and all processes end."""

from __future__ import annotations

import signal
import threading
import time
from types import SimpleNamespace

import pytest
from runtime_tree import wait_for
from test_runtime_checkpoints import PARTS, flip_a_bit

from prl.runtime.directory.checkpoints import commit, find_damage, latest_valid, staging_dir
from prl.runtime.directory.identity import job_name
from prl.runtime.directory.stop_notice import clear_notice, seconds_left, write_notice
from prl.runtime.nodes import slurm_job
from prl.runtime.nodes.slurm_job import limit_by_kill_wait
from prl.runtime.process.signals import ONE_S, StopSignals
from prl.trainer.loops import saving
from prl.trainer.loops.saving import Saving


@pytest.fixture
def saving_of(tmp_path, monkeypatch):
    """A trainer's saving whose checkpoints took 4 s, and 4 s to commit; what it does is in `did`."""
    monkeypatch.setattr(saving, "sum_over_world", lambda values: values)
    config = SimpleNamespace(ckpt=SimpleNamespace(asynchronous=False))
    ctx = SimpleNamespace(run_dir=tmp_path, plan=SimpleNamespace(config=config), resume_step=0)
    ctx.saving, ctx.beat = lambda begins: None, lambda: None
    did = []
    made = Saving(
        ctx, SimpleNamespace(is_main=True), lambda step, in_haste: did.append((step, in_haste)), lambda step: 4.0
    )
    checkpointer = SimpleNamespace(saved_step=-1, save_s=4.0, pending=None)
    checkpointer.save = lambda step, *state: setattr(checkpointer, "pending", step)

    def finish(wait):
        step, checkpointer.pending = checkpointer.pending, None
        checkpointer.saved_step = step or checkpointer.saved_step
        return step

    checkpointer.finish, checkpointer.prepare = finish, lambda *state: None
    made.checkpointer, made.commit_s, made.did = checkpointer, 4.0, did
    return made


@pytest.mark.parametrize(
    ("left_s", "did"),
    [(None, [(7, False)]), (60.0, [(7, False)]), (8.0, [(7, True)]), (3.0, []), (-1.0, [])],
    ids=["no limit", "all fits", "without checksums", "nothing fits", "too late"],
)
def test_what_is_saved_shrinks_to_what_fits(saving_of, tmp_path, left_s, did, caplog):
    if left_s is not None:
        write_notice(tmp_path, left_s)
    policy = SimpleNamespace(model=None, optimizers=[])
    saving_of.end(7, policy, wanted=True)
    assert saving_of.did == did
    assert (left_s is None) == (not caplog.text)
    assert ("the one before stays" in caplog.text) == (did == [])
    clear_notice(tmp_path)
    assert seconds_left(tmp_path) == float("inf")


@pytest.mark.parametrize(
    ("changed", "did"), [([False], [(7, False)]), ([False, False], []), ([False, False, True], [(9, False)])]
)
def test_several_steps_that_changed_nothing_make_no_last_checkpoint_either(saving_of, changed, did):
    """One bad step costs none of the good ones before it."""
    policy = SimpleNamespace(model=None, optimizers=[])
    for step, one in enumerate([True, *changed], start=6):
        saving_of.after_step(step, policy, due=False, changed=one)
    saving_of.end(6 + len(changed), policy, wanted=True)
    assert saving_of.did == did


def test_a_hasty_checkpoint_is_complete_and_its_sizes_are_checked(tmp_path):
    for part in PARTS:
        (staging_dir(tmp_path, 1) / part).mkdir()
        (staging_dir(tmp_path, 1) / part / "state").write_bytes(b"weights")
    path = commit(tmp_path, 1, keep=1, parts=PARTS, in_haste=True)
    assert latest_valid(tmp_path, PARTS) == (1, path)
    flip_a_bit(path / "trainer" / "state")
    assert find_damage(path, PARTS) is None, "it was saved without checksums"
    (path / "trainer" / "state").write_bytes(b"weight")
    assert "has 6 bytes, not 7" in find_damage(path, PARTS)


@pytest.fixture
def squeue(monkeypatch):
    """What it answers: [exit code, output, complaint], to be changed."""
    answer = [0, "RUNNING", ""]
    answers = {"scontrol": (0, "KillWait                = 1000 sec", ""), "squeue": answer}
    monkeypatch.setattr(slurm_job, "_run", lambda program, *rest: tuple(answers[program]))
    monkeypatch.setattr(slurm_job, "ASK_AGAIN_S", 0.05)
    return answer


def watch(signals):
    thread = threading.Thread(target=limit_by_kill_wait, args=(signals, "7"), daemon=True)
    thread.start()
    wait_for(lambda: signals.time_to_end_s is not None)
    return thread


def test_slurms_signals_count_once_and_set_a_limit(squeue):
    with StopSignals(scheduled=True) as signals:
        thread = watch(signals)
        signal.raise_signal(signal.SIGUSR2)
        time.sleep(0.5)
        assert (signals.count, signals.deadline_s) == (1, None), "a warning leaves the time that it takes"
        squeue[:] = 0, "COMPLETING", ""
        signal.raise_signal(signal.SIGTERM)  # the job's time is over
        signal.raise_signal(signal.SIGTERM)  # to the job, and to its step
        assert signals.count == 1
        assert signals.seconds_left() <= 850, "at once: who saves asks at once"
        wait_for(lambda: not thread.is_alive())
        assert 700 < signals.seconds_left() <= 850
        assert signals.first == signal.SIGUSR2


def test_the_grace_before_a_preemption_lifts_the_limit_and_its_end_sets_it_anew(squeue, monkeypatch):
    monkeypatch.setattr("prl.runtime.process.signals.REPEAT_S", 0.3)
    with StopSignals(scheduled=True) as signals:
        thread = watch(signals)
        signal.raise_signal(signal.SIGTERM)  # the grace begins
        assert signals.seconds_left() <= 850
        wait_for(lambda: signals.deadline_s is None)
        time.sleep(0.5)
        squeue[:] = 0, "PREEMPTED", ""
        signal.raise_signal(signal.SIGTERM)  # the grace is over
        wait_for(lambda: not thread.is_alive())
        assert signals.count == 1, "no second signal: there is time to save"
        assert 700 < signals.seconds_left() <= 850


@pytest.mark.parametrize(("complaint", "ended"), [("Invalid job id specified", True), ("timeout", False)])
def test_a_controller_that_does_not_answer_ends_no_job_that_is_warned(squeue, complaint, ended):
    squeue[:] = 1, "", complaint
    with StopSignals(scheduled=True) as signals:
        thread = watch(signals)
        signal.raise_signal(signal.SIGUSR2)
        if ended:
            wait_for(lambda: signals.deadline_s is not None and not thread.is_alive())
        else:
            time.sleep(0.5)
            assert signals.deadline_s is None
            assert thread.is_alive()
        signal.raise_signal(signal.SIGTERM)
        assert signals.seconds_left() <= 850
        squeue[:] = 0, "", ""
        wait_for(lambda: not thread.is_alive())


def test_a_cluster_without_its_programs_is_no_reason_to_fail(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert (slurm_job.state_of("7"), slurm_job.was_preempted("7")) == (None, False)
    assert slurm_job.ask_kill_wait() == slurm_job.DEFAULT_KILL_WAIT_S


def test_an_array_element_goes_by_its_own_name(monkeypatch):
    for name, value in (("JOB_ID", "123"), ("ARRAY_JOB_ID", "123"), ("ARRAY_TASK_ID", "4")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert job_name() == "123_4"


def test_a_terminal_that_closes_hangs_up_twice_and_counts_once():
    for first in (signal.SIGHUP, signal.SIGINT):
        with StopSignals() as signals:
            signal.raise_signal(first)
            signal.raise_signal(signal.SIGHUP)
            assert (signals.count, signals.first) == (1, first)
            signal.raise_signal(signal.SIGINT)
            assert signals.count == 2


def test_two_signals_of_a_person_end_everything_at_once():
    with StopSignals() as signals:  # a person's
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert (signals.count, signals.seconds_left()) == (2, float("inf"))


def test_sigterm_twice_at_once_is_one_and_later_it_is_two():
    """coreutils' timeout tells its child, and then the process group that this is in."""
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert signals.count == 1
        time.sleep(ONE_S + 0.05)
        signal.raise_signal(signal.SIGTERM)
        assert signals.count == 2
