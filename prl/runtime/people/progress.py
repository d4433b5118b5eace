"""Progress for people: a live display on a terminal, plain lines elsewhere. Drawn from the supervisor's own loop."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Literal

from prl.config.console import one_line
from prl.runtime.people.view import RunView, clock

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

PLAIN_INTERVAL_S = 1.0
LIVE_INTERVAL_S = 0.2
BAR_WIDTH = 30


class Progress:
    """One display for a whole run, through its phases ("warm start", then the job)."""

    def __init__(self, mode: Literal["auto", "live", "plain", "none"]) -> None:
        if mode == "auto":
            mode = "live" if sys.stdout.isatty() else "plain"
        self.mode = mode
        self.phase = ""
        self.drawn_s = 0.0
        self.pending = False
        self.shown_step = 0
        self.live: Live | None = None

    def begin(self, phase: str) -> None:
        self.phase, self.started_s = phase, time.monotonic()
        self.drawn_s, self.pending, self.shown_step = 0.0, False, 0

    def note(self, text: str) -> None:
        """A line that stays."""
        if self.mode == "none":
            return
        text = one_line(text.expandtabs())  # a directory's name, or a line of a log, may hold anything
        if self.live is not None:
            self.live.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def update(self, view: RunView, state: str) -> None:
        """Show the newest numbers; call as often as convenient."""
        self.pending = view.poll() or self.pending
        interval_s = LIVE_INTERVAL_S if self.mode == "live" else PLAIN_INTERVAL_S
        if self.mode == "none" or time.monotonic() - self.drawn_s < interval_s:
            return
        if self.mode == "live":
            self._draw(view, state)
        elif self.pending:
            self._print(view)

    def end(self, view: RunView) -> None:
        """The last step of a phase is always shown."""
        self.pending = view.poll() or self.pending
        self.pending |= view.step != self.shown_step  # whoever asked for the final step has polled already
        if self.mode == "plain" and self.pending:
            self._print(view)
        elif self.live is not None:
            self._draw(view, "running")
        self.close()

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _print(self, view: RunView) -> None:
        self.drawn_s, self.pending, self.shown_step = time.monotonic(), False, view.step
        cells = "  ".join(f"{label} {value}" for label, value in view.cells())
        print(f"[{self.phase}] step {view.step}/{view.max_steps}  {cells}", flush=True)

    def _draw(self, view: RunView, state: str) -> None:
        from rich.live import Live

        self.drawn_s = time.monotonic()
        if self.live is None:
            # no refresh thread: children must be forked by a thread that lives as long as the run, and a lock held by
            # another one at that moment would be trouble
            self.live = Live(auto_refresh=False, transient=False)
            self.live.start()
        self.live.update(self._table(view, state), refresh=True)

    def _table(self, view: RunView, state: str) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=view.max_steps, completed=view.step, width=BAR_WIDTH)
        elapsed = clock(time.monotonic() - self.started_s)
        cells = [f"[dim]{label}[/dim] {value}" for label, value in view.cells()]
        shown_state = [] if state == "running" else [f"[yellow]{state}[/yellow]"]
        table.add_row(f"[bold]{self.phase}[/bold]", bar, f"{view.step}/{view.max_steps}", *cells, elapsed, *shown_state)
        return table
