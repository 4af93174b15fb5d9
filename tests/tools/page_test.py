"""The page of `sluice serve` as a headless Chromium shows it. Exits with 77 where there is none."""

import contextlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

from command import MODEL
from serve_cli_test import PROMPT, Server

PATIENCE = 60  # seconds until what the page should show is an error
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of WebDriver's references to elements
NO_KEY = "the API key is missing or wrong"
COUNTS = "tokens computed / reused / drawn"


class Browser:
    """A page of Chromium, driven by W3C WebDriver."""

    def __init__(self):
        self.driver = subprocess.Popen(["chromedriver", "--port=0"], stdin=subprocess.DEVNULL,
                                       stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # fmt: skip
        self.port = next(int(found[1]) for line in self.driver.stdout
                         if (found := re.search(r"started successfully on port (\d+)", line)))  # fmt: skip
        # Chromium's sandbox does not work for root, and /dev/shm is small in containers.
        options = {"binary": shutil.which("chromium"),
                   "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]}  # fmt: skip
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.session = ""
        made = self.call("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self.session = "/" + made["sessionId"]

    def call(self, method: str, path: str, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request(method, "/session" + self.session + path, None if body is None else json.dumps(body))
        value = json.loads(connection.getresponse().read())["value"]
        connection.close()
        if isinstance(value, dict) and "error" in value:
            raise AssertionError(f"{method} {path}: {value['error']}: {value['message']}")
        return value

    def open(self, server: Server):
        self.call("POST", "/url", {"url": f"http://127.0.0.1:{server.port}/"})

    def element(self, name: str) -> str:
        return "/element/" + self.call("POST", "/element", {"using": "css selector", "value": "#" + name})[ELEMENT]

    def click(self, name: str):
        self.call("POST", self.element(name) + "/click", {})

    def write(self, name: str, text: str):
        self.call("POST", self.element(name) + "/clear", {})
        self.call("POST", self.element(name) + "/value", {"text": text})

    def text(self, name: str) -> str:
        return self.call("GET", self.element(name) + "/property/textContent")

    def table(self, name: str) -> list[list[str]]:
        script = "return [...document.getElementById(arguments[0]).rows].map(r => [...r.cells].map(c => c.textContent))"
        return self.call("POST", "/execute/sync", {"script": script, "args": [name]})

    def state(self) -> dict[str, str]:
        return dict(self.table("state"))

    def faults(self) -> list[str]:
        """What the console has had to complain of since the last call."""
        log = self.call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in log if entry["level"] in ("WARNING", "SEVERE")]

    def end(self):
        with contextlib.suppress(AssertionError, OSError):
            self.call("DELETE", "")
        self.driver.terminate()
        self.driver.wait(PATIENCE)
        self.driver.stdout.close()


def until(is_so, what: str):
    """The first value of `is_so` that is true."""
    end = time.monotonic() + PATIENCE
    while not (value := is_so()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {PATIENCE} seconds: {what}")
        time.sleep(0.05)
    return value


def write_chat_model(folder: Path) -> Path:
    """The bundled model with a chat template, and without a token that ends an answer."""
    for file in ("model.safetensors", "tokenizer.json"):
        (folder / file).symlink_to(MODEL / file)
    config = json.loads((MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ")
    return folder


class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.browser = Browser()

    @classmethod
    def tearDownClass(cls):
        cls.browser.end()

    @contextlib.contextmanager
    def page_of(self, *flags, model=MODEL):
        server = Server("--running", 1, *flags, model=model, context=2048)
        try:
            self.browser.faults()  # those of other tests
            self.browser.open(server)
            yield server
            self.browser.call("POST", "/url", {"url": "about:blank"})  # or it would miss the server
        finally:
            server.end()

    def shows(self, name: str, text: str):
        """Waits for the text."""
        try:
            until(lambda: text in self.browser.text(name), f"{text!r}")
        except AssertionError as error:
            raise AssertionError(f"{error} in {name}: {self.browser.text(name)!r}") from error

    def answer_after(self, begin: str):
        """Waits for text behind `begin` in the talk."""
        until(lambda: self.browser.text("talk").partition(begin)[2].strip(), "an answer")

    def test_a_chat_and_its_numbers(self):
        browser = self.browser
        with tempfile.TemporaryDirectory() as folder:
            with self.page_of("--device-memory", "4MiB", model=write_chat_model(Path(folder))):
                until(lambda: browser.state().get("hit rate") == "0.0 %", "the numbers of an idle server")
                self.shows("kind", "Chat")
                before = browser.state()
                self.assertEqual(before[COUNTS], "0 / 0 / 0")
                traffic = browser.table("traffic")
                question = "Who is the prince? " * 40
                browser.write("question", question)
                browser.click("ask")
                self.answer_after("> " + question)
                until(lambda: any(row[1] == "decode" for row in browser.table("sequences")), "a sequence that decodes")
                self.assertNotEqual(browser.state()["free tokens"], before["free tokens"])
                browser.click("stop")
                self.shows("talk", "(stopped)")
                until(lambda: browser.state()["running"] == "0", "the answer ends")
                after = browser.state()
                computed, reused, drawn = map(int, after[COUNTS].split(" / "))
                self.assertGreater(computed, 160)
                self.assertEqual(reused, 0)
                self.assertGreater(drawn, 0)
                self.assertEqual(after["kept for their prefix"], "1")
                self.assertRegex(after["hit rate"], r"^(?!0\.0)[\d.]+ %$")
                moved = browser.table("traffic")
                self.assertGreater(len(moved), len(traffic))
                for row in [["decode", "device", "device", "hit"], ["decode", "host", "device", "miss"]]:
                    self.assertIn(row, [cells[:4] for cells in moved])
                # The next question goes on with the same conversation.
                browser.write("question", "And the count?")
                browser.click("ask")
                self.answer_after("> And the count?\n")
                until(lambda: int(browser.state()[COUNTS].split(" / ")[1]) >= 128, "the first page is reused")
                browser.click("reset")
                until(lambda: browser.state()["running"] == "0", "the answer ends")
                self.assertEqual(browser.text("talk"), "")
                self.assertEqual(browser.text("fault"), "")
                self.assertEqual(browser.faults(), [])

    def test_an_answer_that_waits(self):
        browser = self.browser
        with self.page_of() as server:
            self.shows("kind", "Text")
            self.shows("hint", "sluice-22m has no chat template")
            busy = server.connect()
            busy.request("POST", "/v1/completions", json.dumps(
                {"prompt": PROMPT, "max_tokens": 2000, "stream": True, "ignore_eos": True}))
            response = busy.getresponse()
            response.readline()
            browser.write("question", PROMPT)
            browser.click("ask")
            until(lambda: browser.state()["waiting"] == "1", "the question waits")
            browser.click("stop")
            self.shows("talk", "(stopped)")
            until(lambda: browser.state()["waiting"] == "0", "nobody waits")
            browser.click("reset")
            browser.write("question", PROMPT)
            browser.click("ask")
            until(lambda: browser.state()["waiting"] == "1", "the question waits")
            time.sleep(1.2)  # the server writes a comment to its stream twice a second
            response.close()
            busy.close()
            self.answer_after(PROMPT)
            self.assertNotIn("JSON", browser.text("talk"))  # of an error of the script
            self.assertEqual(browser.text("fault"), "")
            browser.click("stop")
            self.assertEqual(browser.faults(), [])

    def test_a_wrong_key(self):
        browser = self.browser
        with self.page_of("--api-key", "secret"):
            self.shows("fault", NO_KEY)
            self.assertEqual(browser.table("state"), [])
            browser.write("key", "wrong")
            browser.write("question", PROMPT)
            browser.click("ask")
            self.shows("talk", NO_KEY)
            self.shows("fault", NO_KEY)
            self.assertEqual(browser.call("GET", browser.element("question") + "/property/value"), PROMPT)
            browser.write("key", "secret")
            until(lambda: browser.state().get("running") == "0", "the numbers")
            until(lambda: browser.text("fault") == "", "no fault")
            browser.click("reset")
            browser.click("ask")
            self.answer_after(PROMPT)
            self.assertNotIn(NO_KEY, browser.text("talk"))
            browser.click("stop")
            faults = browser.faults()
        self.assertGreater(len(faults), 1)
        for fault in faults:  # no errors of the script among them
            self.assertIn("status of 401", fault)


if __name__ == "__main__":
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        print("SKIPPED: the page is not tested; scripts/setup.sh --browser installs Chromium")
        sys.exit(77)
    unittest.main(verbosity=2)
