"""Serves the page and the metrics of a run (`outsize run --watch dashboard`) from its idle launcher.

    http://127.0.0.1:PORT/TOKEN/          the page
    http://127.0.0.1:PORT/TOKEN/part      what changes on it, which its script fetches each second
    http://127.0.0.1:PORT/TOKEN/metrics   for Prometheus

Only this machine reaches the port, and only who knows the token gets anything but 404. The run itself does
nothing for it but to publish the timeline of a step beside its state; it never waits for a reader.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, final

from outsize.errors import BadOption
from outsize.files.run_folders import TIMELINE, WATCHED, RunFolder
from outsize.files.strict_json import BadJson
from outsize.ir.answers.run_state import RunOnMachine, read_run
from outsize.ir.timeline import Timeline
from outsize.ops.publish.prometheus import prometheus_text
from outsize.report.html.live import LiveFacts, LossPoint, live_page, live_part

HOST: Final = "127.0.0.1"
TOKEN: Final = "OUTSIZE_DASHBOARD_TOKEN"
_LEAST_TOKEN: Final = 16
_POLL_S: Final = 0.5
_MOST_POINTS: Final = 2000
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
}


@final
class RunHistory:
    """The latest state of a run, and the losses that it has published; a thread reads them."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._losses: list[LossPoint] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="outsize-dashboard", daemon=True)

    def start(self) -> None:
        """Begins to read."""
        (self._folder.path / WATCHED).touch()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()

    def run(self) -> RunOnMachine | None:
        """Returns what the run publishes now; None where its folder is gone."""
        return read_run(self._folder)

    def facts(self) -> LiveFacts | None:
        """Returns what the page shows now; None where the run's folder is gone."""
        run = self.run()
        if run is None:
            return None
        timeline: Timeline | None = None
        with contextlib.suppress(OSError, BadJson):
            timeline = Timeline.read(self._folder.path / TIMELINE)
        return LiveFacts(run, timeline, tuple(self._losses))

    def look(self) -> None:
        """Takes the loss of the latest step; of many points every other one goes, so the first ones stay."""
        run = self.run()
        state = None if run is None else run.state
        if state is None or state.loss is None:
            return
        losses = [point for point in self._losses if point.step < state.step]
        losses.append(LossPoint(state.step, state.loss))
        self._losses = losses if len(losses) <= _MOST_POINTS else [*losses[:-1:2], losses[-1]]

    def _work(self) -> None:
        while not self._stopped.wait(_POLL_S):
            self.look()


@final
class _Handler(BaseHTTPRequestHandler):
    """Answers GET under the token."""

    protocol_version = "HTTP/1.1"
    timeout = 10.0

    def __init__(self, history: RunHistory, token: str, *request: Any) -> None:
        self._history, self._token = history, token
        super().__init__(*request)

    def do_GET(self) -> None:
        """Sends a page, a part of it, or metrics; 404 for anything else."""
        _, given, *rest = [*self.path.partition("?")[0].split("/"), ""][:4]
        is_known = hmac.compare_digest(given.encode(), self._token.encode())
        answer = self._answer("/".join(rest).rstrip("/")) if is_known else None
        if answer is None:
            self._send(404, "text/plain", "not found\n")
        else:
            self._send(200, *answer)

    def _answer(self, what: str) -> tuple[str, str] | None:
        """Returns type and text of what is asked for."""
        if what == "metrics":
            run = self._history.run()
            return None if run is None else ("text/plain; version=0.0.4", prometheus_text(run))
        render = {"": live_page, "part": live_part}.get(what)
        facts = self._history.facts() if render is not None else None
        return None if facts is None or render is None else ("text/html", render(facts, time.time()))

    def _send(self, status: int, kind: str, text: str) -> None:
        data = text.encode(errors="backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(data)

    def log_message(self, format: str, *_: object) -> None:
        """Says nothing: the terminal is the run's."""


@final
class _Server(ThreadingHTTPServer):
    """A server whose requests do not hold up the end of the run, and whose failures are not the run's."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing of a reader that has gone."""


def dashboard(
    port: int, token: str | None, say: Callable[[str], None]
) -> Callable[[RunFolder | None], contextlib.AbstractContextManager[None]]:
    """Returns what serves a run's page as long as the run goes on; port 0 is any free one.

    `token` is the user's, or None for a new one. Raises BadOption for one that is short or no word.
    """
    if token is not None and (len(token) < _LEAST_TOKEN or not token.replace("-", "").isalnum()):
        raise BadOption(
            f"{TOKEN} is no token",
            numbers=f"{len(token)} characters; letters, digits and -, at least {_LEAST_TOKEN}",
            next_step=f"{TOKEN}=$(openssl rand -hex 16)",
        )
    return partial(_serve, port, token or secrets.token_hex(_LEAST_TOKEN), say)


@contextlib.contextmanager
def _serve(port: int, token: str, say: Callable[[str], None], folder: RunFolder | None) -> Iterator[None]:
    if folder is None:
        raise BadOption(
            "the run has no folder to publish itself in, which a dashboard reads",
            numbers="another user has made it, or its disk is full",
            next_step="TMPDIR=/a/folder/of/your/own before the command",
        )
    history = RunHistory(folder)
    try:
        server = _Server((HOST, port), partial(_Handler, history, token))
    except OSError as error:
        raise BadOption(
            f"dashboard_port={port} cannot be used",
            numbers=error.strerror or str(error),
            next_step="leave it out for any free port",
        ) from error
    history.start()
    threading.Thread(target=server.serve_forever, name="outsize-http", daemon=True).start()
    say(f"outsize: dashboard at http://{HOST}:{server.server_address[1]}/{token}/")
    try:
        yield
    finally:
        history.stop()
        server.shutdown()
        server.server_close()


def say(text: str) -> None:
    """Writes a line to stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
