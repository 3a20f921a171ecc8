"""What the platform says of this machine: the metadata server of Google Cloud, asked every few seconds.

https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice and, for TPUs,
https://cloud.google.com/tpu/docs/view-maintenance-notifications. Three keys below `instance/`: `preempted` (TRUE about
30 s before a spot machine ends), `maintenance-event` (a minute, with GPUs an hour before its host does), and
`upcoming-maintenance` (JSON with a window, days before). A machine that only moves to another host is left alone.
"""

from __future__ import annotations

import datetime
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Literal

HOST = "GCE_METADATA_HOST"
"""Where the server is, host[:port], as in Google's own libraries; else it is known by its name."""
LOOK_SECONDS = 5.0
TIMEOUT_SECONDS = 3.0
LEAD_SECONDS = 600.0
"""So long before a maintenance window opens the run saves and leaves."""
_PRODUCT = Path("/sys/class/dmi/id/product_name")
_ENDS = "TERMINATE_ON_HOST_MAINTENANCE"


def metadata_host(setting: Literal["auto", "off"]) -> str | None:
    """The metadata server of this machine; None: it has none, or `faults.maintenance_notices` is off."""
    if setting == "off":
        return None
    if host := os.environ.get(HOST):
        return host
    try:
        return "metadata.google.internal" if "Google" in _PRODUCT.read_text() else None
    except OSError:
        return None


class Notices:
    """Asks the metadata server.

    Args:
      host: `metadata_host`.
      say: told once of each maintenance that is announced for later.
      now: the time of day.
    """

    def __init__(
        self,
        host: str,
        say: Callable[[str], None] = lambda text: None,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ):
        self._host, self._say, self._now = host, say, now
        self._said: set[str] = set()

    def look(self) -> str | None:
        """Why the run has to leave now, if it has to. A server that does not answer says nothing."""
        if (self._read("preempted") or "").upper() == "TRUE":
            return "the end of this spot machine"
        if self._read("maintenance-event") == _ENDS:
            return "maintenance of this machine's host"
        return self._upcoming(self._read("upcoming-maintenance?alt=json"))

    def _upcoming(self, text: str | None) -> str | None:
        try:
            found = json.loads(text or "{}")
            notice = {name.replace("_", "").lower(): str(value) for name, value in found.items()}
            start = notice.get("windowstarttime")
            if start is None:
                return None
            begins = datetime.datetime.fromisoformat(start.replace("Z", "+00:00"))
            left = (begins - self._now()).total_seconds()
        except (ValueError, AttributeError, TypeError):  # not what the manual says
            return None
        what = f"maintenance of this machine from {start} on"
        if notice.get("maintenancestatus", "").upper() == "ONGOING" or left < LEAD_SECONDS:
            return what
        if what not in self._said:
            self._said.add(what)
            self._say(f"{what} is announced: the run leaves {LEAD_SECONDS / 60:g} minutes before")
        return None

    def _read(self, key: str) -> str | None:
        url = f"http://{self._host}/computeMetadata/v1/instance/{key}"
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is a neighbour, never behind a proxy
        try:
            with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
                return answer.read(1 << 16).decode().strip()
        except (OSError, ValueError):  # 404: there is no such notice
            return None
