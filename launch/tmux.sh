#!/usr/bin/env bash
# launch/tmux.sh RUN_DIR [SESSION]: one pane each for trainer, orchestrator, inference and environments of a run, and its
# status below. Called again for the same run it attaches to the same session; closing it stops nothing but the view.
set -euo pipefail

run_dir=${1:?"usage: launch/tmux.sh RUN_DIR [SESSION]"}
command -v tmux >/dev/null || { echo "tmux is not installed" >&2; exit 2; }
[ -d "$run_dir" ] || { echo "$run_dir is no directory" >&2; exit 2; }
run_dir=$(cd "$run_dir" && pwd)
session=${2:-prl-$(basename "$run_dir" | tr '.:' '__')}

follow() { # follow NAME GLOB: the newest lines of these logs, from now on, also of logs that appear later
  printf 'cd %q; echo "== %s"; until ls %s >/dev/null 2>&1; do sleep 1; done; exec tail -n 50 -F %s' \
    "$run_dir/logs" "$1" "$2" "$2"
}

if ! tmux has-session -t "=$session" 2>/dev/null; then
  tmux new-session -d -s "$session" -x 220 -y 60 "$(follow trainer 'latest.trainer.log')"
  tmux split-window -h -t "=$session:" "$(follow orchestrator 'orchestrator*.log')"
  tmux split-window -v -t "=$session:" "$(follow environments 'env*.log')"
  tmux select-pane -t "=$session:.0"
  tmux split-window -v -t "=$session:" "$(follow inference 'inference*.log')"
  tmux new-window -d -t "=$session:" -n status "python -m prl.status $(printf %q "$run_dir") --follow; exec \$SHELL"
fi
if [ -n "${TMUX:-}" ]; then exec tmux switch-client -t "=$session"; fi
if [ -t 1 ]; then exec tmux attach-session -t "=$session"; fi
echo "$session"
