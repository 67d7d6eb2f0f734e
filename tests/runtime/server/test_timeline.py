from __future__ import annotations

from pathlib import Path

import msgspec

from tests.runtime.server.live import http, serving
from tests.timelines import check_timeline


def test_requests_are_led_from_http_to_their_steps(
    artifacts: dict[str, Path], tmp_path: Path
) -> None:
    file = tmp_path / "timeline.json"
    flags = ("--timeline", file, "--no-log-requests")
    with serving(artifacts["llama"], *flags, log=tmp_path / "log") as server:
        body = {"prompt": ["Question:", "Documents:"], "n": 2, "max_tokens": 3, "temperature": 1}
        assert http.post(f"{server.v1}/completions", json=body).status_code == 200
        assert server.stop() == 0
    facts = check_timeline(file)
    events = msgspec.json.decode(file.read_bytes())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert facts.arrows == 4 and {"http", "submit", "engine", "requests"} <= set(tracks.values())
    starts = [tracks[e["tid"]] for e in events if e["ph"] == "s"]
    ends = [tracks[e["tid"]] for e in events if e["ph"] == "f"]
    assert starts == ["submit"] * 4 and ends == ["engine"] * 4
    (served,) = [e for e in events if e["ph"] == "b" and e["name"] == "/v1/completions"]
    assert served["args"]["status"] == 200
