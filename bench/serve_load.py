#!/usr/bin/env python3
"""Many clients of `sluice serve` at once: what they wait, what they get, what is left of it.

    bench/serve_load.py build/release/bin/sluice --seconds 600 --clients 64 --json OUT.json
    bench/serve_load.py build/release/bin/sluice --seconds 3600 --cancel 0.1 --slow 0.05 --gone 0.05

Every client asks again and again, with a passage of the book as the prompt (lengths between
--shortest and --longest tokens, as many in each octave) and a greedy answer, streamed. With
--prefix all prompts begin with the same tokens. With --cancel, --slow and --gone these shares of
the requests are closed after some events, read slowly, or left before anything was read. With
--disk-faults this share of the reads and writes of its disk tier fails (bench/faulty_disk.c);
requests that end with the disk's error are counted, and are no failures. What follows `--` goes to
the server.

Afterwards the server is left alone for a moment, and its memory and descriptors are compared with
those before; then up to --check of the answered prompts are asked once more, one by one. An answer
that differs has to differ first where the two likeliest tokens are within --margin nats of each
other when the prompt is asked alone.

The server's resident memory is sampled all along; its slope is that of a line through the samples
behind the first third.

The exit status is 1 if a request failed, an answer differs without such a reason, or the server
ended.
"""

import argparse
import datetime
import http.client
import itertools
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Iterator, Optional

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 600  # seconds without a byte


def percentile(values: list[float], share: float) -> Optional[float]:
    if not values:
        return None
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Server:
    """A running `sluice serve`, or another server that names its address on stderr."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True,
                                        env={**os.environ, **environment})  # fmt: skip
        line = ""
        while "http://" not in line:
            line = self.process.stderr.readline()
            if not line:
                raise SystemExit(f"serve_load: the server ended with {self.process.wait()}")
        self.port = int(line.split("http://", 1)[1].split(":")[1].split("/")[0].split()[0])
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def get(self, path: str) -> Any:
        connection = self.connect()
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())

    def post(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        connection = self.connect()
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse()

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024

    def peak_resident_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024

    def cpu_seconds(self) -> float:
        """Of all threads so far, user and system."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The objects of a stream."""
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[len(b"data: ") :])


class DiskFaults:
    """A disk that fails, for one process."""

    def __init__(self, share: float) -> None:
        self.folder = tempfile.TemporaryDirectory()
        library, self.log = Path(self.folder.name, "faulty_disk.so"), Path(self.folder.name, "log")
        source = ROOT / "bench" / "faulty_disk.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"],
                       check=True)  # fmt: skip
        self.environment = {"LD_PRELOAD": str(library), "SLUICE_DISK_FAULTS": str(share),
                            "SLUICE_DISK_FAULTS_LOG": str(self.log)}  # fmt: skip

    def counts(self) -> dict[str, int]:
        """Once the process has ended."""
        return json.loads(self.log.read_text().splitlines()[-1])


class Memory(threading.Thread):
    """Samples of a server's resident memory."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.server, self.done = server, threading.Event()
        self.samples: list[tuple[float, int]] = []  # seconds, bytes

    def run(self) -> None:
        while not self.done.wait(5):
            self.samples.append((time.monotonic(), self.server.resident_bytes()))

    def bytes_per_hour(self) -> Optional[float]:
        late = self.samples[len(self.samples) // 3 :]
        if len(late) < 3:
            return None
        return statistics.linear_regression(*zip(*late)).slope * 3600


class Load:
    """The clients, and what came of their requests.

    With `scores` answers come with log probabilities, whose tokens are counted; without, tokens are
    counted by the answer's usage, and events by their text.
    """

    def __init__(self, server: Server, flags: argparse.Namespace, book: list[int],
                 scores: bool = True) -> None:  # fmt: skip
        self.server, self.flags, self.book, self.scores = server, flags, book, scores
        self.end = time.monotonic() + flags.seconds
        self.lock = threading.Lock()
        self.counts = {"answered": 0, "cancelled": 0, "slow": 0, "gone": 0, "lost by the disk": 0}
        self.failures: list[str] = []
        self.first: list[float] = []  # seconds
        self.gaps: list[float] = []  # seconds between events
        self.prompt_tokens = self.answer_tokens = 0
        self.answers: dict[tuple[int, int], list[str]] = {}  # by begin and length of the prompt

    def prompt(self, begin: int, length: int) -> list[int]:
        return self.book[: self.flags.prefix] + self.book[begin : begin + length]

    def body(self, begin: int, length: int, stream: bool) -> dict[str, Any]:
        wanted = {"logprobs": 2} if self.scores else {"stream_options": {"include_usage": True}}
        return {"prompt": self.prompt(begin, length), "max_tokens": self.flags.tokens,
                "temperature": 0, "ignore_eos": True, "stream": stream, **wanted}  # fmt: skip

    def run(self) -> None:
        clients = [threading.Thread(target=self.client, args=(i,))
                   for i in range(self.flags.clients)]  # fmt: skip
        for client in clients:
            client.start()
        for client in clients:
            client.join()

    def client(self, number: int) -> None:
        draw = random.Random(f"{self.flags.seed} {number}")
        for asked in itertools.count():
            if time.monotonic() >= self.end or asked == self.flags.requests:
                return
            ratio = self.flags.longest / self.flags.shortest
            length = int(self.flags.shortest * ratio ** draw.uniform(0, 1))
            begin = draw.randrange(self.flags.prefix, len(self.book) - length)
            try:
                self.ask(draw, begin, length)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                with self.lock:
                    self.failures.append(f"{type(error).__name__}: {error}")
                return

    def ask(self, draw: random.Random, begin: int, length: int) -> None:
        flags, kind = self.flags, draw.random()  # kind: a point in the shares of the requests
        last = time.monotonic()
        connection = self.server.connect()
        connection.request("POST", "/v1/completions", json.dumps(self.body(begin, length, True)),
                           {"Content-Type": "application/json"})  # fmt: skip
        if kind < flags.gone:
            time.sleep(draw.uniform(0, 0.2))
            connection.close()
            return self.count("gone")
        is_slow = flags.gone <= kind < flags.gone + flags.slow
        is_cancelled = not is_slow and kind < flags.gone + flags.slow + flags.cancel
        response = connection.getresponse()
        if response.status != 200:
            body = response.read()
            if self.is_expected(json.loads(body)["error"]):
                return self.count("lost by the disk")
            raise ValueError(f"status {response.status}: {body[:200]!r}")
        left = draw.randrange(1, flags.tokens) if is_cancelled else -1
        tokens: list[str] = []  # or, without scores, pieces of text
        count = 0
        for event in events(response):
            if "error" in event:
                if self.is_expected(event["error"]):
                    return self.count("lost by the disk")
                raise ValueError(event["error"]["message"])
            if not self.scores:
                count = (event.get("usage") or {}).get("completion_tokens", count)
                if not event["choices"] or not event["choices"][0]["text"]:
                    continue
            now = time.monotonic()
            with self.lock:
                (self.gaps if tokens else self.first).append(now - last)
            last = now
            choice = event["choices"][0]
            tokens += choice["logprobs"]["tokens"] if self.scores else [choice["text"]]
            left -= 1
            if left == 0:
                connection.close()
                return self.count("cancelled")
            if is_slow:
                time.sleep(draw.uniform(0, 0.5))
                last = time.monotonic()
        count = len(tokens) if self.scores else count
        if count != flags.tokens:
            raise ValueError(f"{count} tokens instead of {flags.tokens}")
        with self.lock:
            self.prompt_tokens += self.flags.prefix + length
            self.answer_tokens += count
            self.answers[begin, length] = tokens
        return self.count("slow" if is_slow else "answered")

    def is_expected(self, error: dict[str, Any]) -> bool:
        return self.flags.disk_faults > 0 and error["code"] == "io"

    def count(self, outcome: str) -> None:
        with self.lock:
            self.counts[outcome] += 1

    def check(self) -> dict[str, Any]:
        """Asks answered prompts once more, one by one."""
        asked = sorted(self.answers)
        random.Random(self.flags.seed).shuffle(asked)
        same, lost, near, different, seconds = 0, 0, [], [], 0.0
        for begin, length in asked[: self.flags.check]:
            start = time.monotonic()
            response = self.server.post("/v1/completions", self.body(begin, length, False))
            reply = json.loads(response.read())
            seconds += time.monotonic() - start
            if "error" in reply and self.is_expected(reply["error"]):
                lost += 1
                continue
            logprobs = reply["choices"][0]["logprobs"]
            ours = self.answers[begin, length]
            if logprobs["tokens"] == ours:
                same += 1
                continue
            at = next(i for i, both in enumerate(zip(ours, logprobs["tokens"]))
                      if both[0] != both[1])  # fmt: skip
            best = sorted(logprobs["top_logprobs"][at].values(), reverse=True)
            margin = best[0] - best[1]
            (near if margin <= self.flags.margin else different).append(round(margin, 5))
        return {"asked_alone": min(len(asked), self.flags.check), "same": same, "lost by the disk": lost,
                "differ_within_margin": near, "differ": different,
                "seconds_alone": round(seconds, 2)}  # fmt: skip


def wait_until_idle(server: Server) -> None:
    while True:
        stats = server.get("/stats")
        if stats["running"] == 0 and stats["queued"] == 0:
            return
        time.sleep(0.5)


def tokens_of(server: Server, text: str) -> list[int]:
    """The ids of a long text, encoded in parts."""
    ids: list[int] = []
    for begin in range(0, len(text), 1 << 18):
        body = {"prompt": text[begin : begin + (1 << 18)], "add_special_tokens": False}
        ids += json.loads(server.post("/tokenize", body).read())["tokens"]
    return ids


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("sluice", type=Path)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "sluice-22m")
    parser.add_argument("--text", type=Path, default=ROOT / "data" / "war-and-peace.txt")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--requests", type=int, help="most of each client; default: any number")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--shortest", type=int, default=1024)
    parser.add_argument("--longest", type=int, default=32768)
    parser.add_argument("--prefix", type=int, default=0, help="tokens that all prompts begin with")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--cancel", type=float, default=0.0)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--gone", type=float, default=0.0)
    parser.add_argument("--disk-faults", type=float, default=0.0)
    parser.add_argument("--check", type=int, default=16)
    parser.add_argument("--margin", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    flags = parser.parse_args(given[:split])
    flags.server = given[split + 1 :]
    return flags


def main() -> int:
    flags = read_flags()
    context = flags.prefix + flags.longest + flags.tokens
    faults = DiskFaults(flags.disk_faults) if flags.disk_faults > 0 else None
    server = Server([str(flags.sluice), "serve", "--model", str(flags.model), "--port", "0",
                     "--context", str(context), "--connections", str(flags.clients + 8),
                     *flags.server], faults.environment if faults else {})  # fmt: skip
    book = tokens_of(server, flags.text.read_text())
    server.post("/v1/completions", {"prompt": book[:512], "max_tokens": 8}).read()
    before = {"resident_bytes": server.resident_bytes(), "descriptors": server.descriptors()}
    load = Load(server, flags, book)
    memory = Memory(server)
    memory.start()
    start = time.monotonic()
    load.run()
    seconds = time.monotonic() - start
    memory.done.set()
    wait_until_idle(server)
    time.sleep(6)  # connections are kept for five seconds
    after = {"resident_bytes": server.resident_bytes(), "descriptors": server.descriptors()}
    stats = server.get("/stats")  # before what follows counts, too
    checked = load.check()
    status = server.end()
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "command": " ".join(sys.argv),
        "seconds": round(seconds, 1),
        "clients": flags.clients,
        "requests": load.counts,
        "failures": load.failures,
        "prompt_tokens": load.prompt_tokens,
        "computed_prompt_tokens": stats["prompt_tokens"],
        "reused_prompt_tokens": stats["reused_tokens"],
        "answer_tokens": load.answer_tokens,
        "tokens_per_second": round((load.prompt_tokens + load.answer_tokens) / seconds, 1),
        "first_token_seconds": {p: percentile(load.first, p) for p in (0.5, 0.9, 0.99)},
        "between_tokens_seconds": {p: percentile(load.gaps, p) for p in (0.5, 0.9, 0.99, 0.999)},
        "before": before,
        "after": after,
        "resident_bytes_per_hour": memory.bytes_per_hour(),
        "disk": faults.counts() if faults else None,
        "alone": checked,
        "preemptions": stats.get("preemptions"),
        "exit_status": status,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if flags.json:
        flags.json.write_text(text + "\n")
    return int(bool(load.failures or checked["differ"] or status))


if __name__ == "__main__":
    sys.exit(main())
