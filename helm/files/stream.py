"""Run by `helm test`: wait for the proxy, send one streamed request through it, and look at the verdict.

Environment: BASE_URL of the proxy, SECONDS for everything. For the request: API_KEY, MODEL and VERDICTS, the accepted
words with commas between them. Exit code 1 says on stderr what is wrong.
"""

import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request

BASE = os.environ["BASE_URL"]
KEY = os.environ.get("API_KEY", "").strip()
DEADLINE = time.monotonic() + float(os.environ["SECONDS"])
LONGEST_WAIT = 60


def call(path, body=None):
    """The open response, once the proxy can be reached."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {KEY}"} if KEY else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(BASE + path, data, headers)
    problem = "no time for it"
    while (left := DEADLINE - time.monotonic()) > 0:
        try:
            return urllib.request.urlopen(request, timeout=left)
        except urllib.error.HTTPError as error:
            problem = f"{error.code} {error.read(500).decode(errors='replace')}"
            if error.code != 503:
                break
        except OSError as error:
            problem = str(error)
        time.sleep(min(1, max(0, DEADLINE - time.monotonic())))
    sys.exit(f"{path}: {problem}")


def stream():
    """Id of a streamed answer that came whole."""
    body = {
        "model": os.environ["MODEL"],
        "messages": [{"role": "user", "content": "Count from one to twenty."}],
        "max_tokens": 64,
        "stream": True,
    }
    events = []
    with call("/v1/chat/completions", body) as answer:
        id = answer.headers.get("x-countersign-id")
        try:
            events += (line.strip() for line in answer if line.startswith(b"data:"))
        except (OSError, http.client.HTTPException) as error:
            print(f"stream: {error!r}", file=sys.stderr)
    if not events or events[-1] != b"data: [DONE]":
        sys.exit(f"the stream broke off after {len(events)} events")
    if not any(b'"finish_reason"' in event and b'"error"' not in event for event in events):
        sys.exit("the stream holds no answer")
    if not id:
        sys.exit("the answer has no x-countersign-id")
    print(f"{len(events)} events, id {id}")
    return id


def verdict(id):
    """The verification, once it is decided."""
    while True:
        wait = max(0, min(LONGEST_WAIT, int(DEADLINE - time.monotonic()) - 1))
        with call(f"/v1/verifications/{id}?wait={wait}") as answer:
            found = json.load(answer)
        if found["status"] != "pending":
            return found
        if DEADLINE - time.monotonic() < 2:
            sys.exit(f"{id}: no verdict in time; do workers run?")


call("/readyz").close()
print("ready")
if KEY:
    found = verdict(stream())
    print(f"verdict {found['verdict']} {' '.join(found['reasons'])}")
    if found["verdict"] not in os.environ["VERDICTS"].split(","):
        sys.exit(f"not among the accepted: {os.environ['VERDICTS']}")
