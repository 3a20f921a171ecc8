"""The metadata server of Google Cloud, by one on loopback."""

import datetime
import threading
import time
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer

import pytest

from jtrain import Callback
from jtrain.errors import Preempted
from jtrain.observe.metrics import read_events
from jtrain.train.notices import Notices, metadata_host
from tests.train.fits import checkpoints, make

NOW = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)


@pytest.fixture
def server():
    """Answers from a dict; without Google's header it refuses, as the real one does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            text = self.server.answers.get(self.path.partition("?")[0].removeprefix("/computeMetadata/v1/instance/"))
            known = text is not None and self.headers.get("Metadata-Flavor") == "Google"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write((text or "no").encode())

        def log_message(self, *_):
            pass

    server = TCPServer(("127.0.0.1", 0), Handler)
    server.answers = {"preempted": "FALSE", "maintenance-event": "NONE"}
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def notices(server):
    said = []
    found = Notices(f"127.0.0.1:{server.server_address[1]}", said.append, lambda: NOW)
    found.said = said
    return found


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("preempted", "TRUE", "spot machine"),
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", "this machine's host"),
        ("upcoming-maintenance", '{"window_start_time": "2026-01-01T12:05:00Z"}', "12:05:00"),
        ("upcoming-maintenance", '{"windowStartTime": "2026-01-02T12:00:00Z", "maintenanceStatus": "ONGOING"}', "2026"),
    ],
)
def test_what_ends_the_machine_soon_is_a_reason_to_leave(key, value, reason, server, notices):
    assert notices.look() is None
    server.answers[key] = value
    assert reason in notices.look()


def test_what_comes_later_is_said_once(server, notices):
    server.answers["upcoming-maintenance"] = '{"window_start_time": "2026-01-04T12:00:00+00:00"}'
    assert notices.look() is None and notices.look() is None
    assert len(notices.said) == 1 and "2026-01-04" in notices.said[0]


@pytest.mark.parametrize(
    "answer", ["", "nonsense", "[]", '{"error": "no notifications have been received yet"}', '{"window_start_time": 3}']
)
def test_moves_and_other_answers_are_no_reason(answer, server, notices):
    server.answers |= {"maintenance-event": "MIGRATE_ON_HOST_MAINTENANCE", "upcoming-maintenance": answer}
    assert notices.look() is None


def test_a_notice_saves_the_run_and_it_leaves(server, tmp_path, monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr("jtrain.train.guard.LOOK_SECONDS", 0.05)

    class Notified(Callback):
        def on_step_start(self, trainer, step):
            if step == 3:
                server.answers["preempted"] = "TRUE"
            time.sleep(0.05)

    with pytest.raises(Preempted) as caught:
        make(tmp_path, [Notified()], max_steps=2000).fit()
    (event,) = read_events(tmp_path, "preempted")
    assert caught.value.exit_code == 10 and event["reason"] == "the end of this spot machine"
    assert checkpoints(tmp_path) == [event["step"]] and event["step"] >= 3


def test_a_server_that_is_not_there_says_nothing():
    assert Notices("127.0.0.1:1").look() is None


def test_notices_are_looked_for_where_the_config_says_so(monkeypatch, tmp_path):
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    product = tmp_path / "product_name"
    monkeypatch.setattr("jtrain.train.notices._PRODUCT", product)
    assert metadata_host("auto") is None
    product.write_text("Google Compute Engine\n")
    assert metadata_host("auto") == "metadata.google.internal"
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:81")
    assert metadata_host("auto") == "127.0.0.1:81" and metadata_host("off") is None
