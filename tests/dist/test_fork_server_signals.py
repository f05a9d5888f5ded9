"""Signals that ask a run to end, sent to all its processes, do not end the server that forks workers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from patience import PATIENCE_S

from outsize.ops.launch.fork_server import ForkServer, can_serve_forks

pytestmark = [pytest.mark.dist, pytest.mark.skipif(not can_serve_forks(), reason="forks are served on Linux")]
SCRIPT = "import signal, sys; sys.exit(signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL)"


def test_the_server_outlives_what_its_workers_handle(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    os.mkfifo(tmp_path / "lifeline")
    lifeline = os.open(tmp_path / "lifeline", os.O_RDWR)
    server = ForkServer(dict(os.environ), tmp_path / "launcher")
    arguments = [str(tmp_path / "lifeline"), "script", str(tmp_path / "script.py")]
    try:
        for _ in range(2):
            worker = server.start(arguments, dict(os.environ), (None, None))
            assert worker is not None
            assert worker.wait(PATIENCE_S) == 0
            for number in (signal.SIGUSR1, signal.SIGTERM):
                os.kill(server.pid, number)
            time.sleep(0.2)
        assert server.is_alive
    finally:
        server.close()
        os.close(lifeline)
