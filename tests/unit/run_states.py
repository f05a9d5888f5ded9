"""A run as it publishes itself, for tests of what shows it."""

from __future__ import annotations

from outsize.ir.answers.run_state import RunDevice, RunLaunch, RunState, SavedStep, SlowRank
from outsize.ir.timeline import Span, Timeline

NOW = 1_000_000.0
LAUNCH = RunLaunch(pid=4711, command="train.py --lr [red]1\x1b[31m", started_unix_s=NOW - 60)
DEVICE = RunDevice(
    rank=0, name="cuda:0", busy=0.87, memory_bytes=21 << 30, planned_bytes=20 << 30, device_bytes=80 << 30
)
STATE = RunState(
    model="GPT",
    layout="pp 2",
    schedule="1f1b",
    step=40,
    total_steps=100,
    batch_size=32,
    loss=2.5,
    evaluation_loss=2.75,
    step_s=0.5,
    planned_step_s=0.4,
    bubble=0.13,
    planned_bubble=0.1,
    devices=(DEVICE, RunDevice(rank=1, name="cuda:1")),
    slow_ranks=(SlowRank(rank=1, cause="compute", own=2.0, others=1.0, step=30),),
    checkpoint=SavedStep(step=30, folder="run", saved_unix_s=NOW - 300),
    updated_unix_s=NOW - 1,
)
TIMELINE = Timeline(
    source="measured",
    ranks=2,
    spans=(
        Span(rank=0, lane="compute", action="0F0", start_s=0.0, end_s=0.1),
        Span(rank=1, lane="compute", action="1F0", start_s=0.1, end_s=0.2),
    ),
)
