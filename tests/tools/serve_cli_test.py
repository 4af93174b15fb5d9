"""`sluice serve` as clients meet it: answers, streams, and requests of every wrong kind."""

import concurrent.futures
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from chat_model import write_model
from command import MODEL, ROOT, sluice

PROMPT = "Well, Prince,"


class Server:
    """A running server; `port` is the one it chose."""

    def __init__(self, *flags: object, model=MODEL, context=1024):
        self.process = subprocess.Popen(
            [os.environ["SLUICE_BINARY"], "serve", "-m", str(model), "--port", "0", "--context", str(context),
             "--compute", "f32", "--kv-dtype", "f32", "--policy", "dense", *map(str, flags)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.log = ""
        self.port = None
        for line in self.process.stderr:
            self.log += line
            found = re.search(r"serving on http://[^:]+:(\d+)", line)
            if found:
                self.port = int(found[1])
                return
        raise AssertionError("the server did not start: " + self.log)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def request(self, method: str, path: str, body=None, headers=None) -> tuple[int, str]:
        connection = self.connect()
        data = body if isinstance(body, (bytes, str, type(None))) else json.dumps(body)
        connection.request(method, path, data, headers or {})
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        return reply.status, text

    def post(self, path: str, body, headers=None) -> tuple[int, dict]:
        status, text = self.request("POST", path, body, headers)
        return status, json.loads(text)

    def complete(self, **fields) -> dict:
        status, reply = self.post("/v1/completions", {"prompt": PROMPT, "temperature": 0, **fields})
        if status != 200:
            raise AssertionError(f"{status}: {reply}")
        return reply

    def events(self, path: str, body: dict) -> list[dict]:
        status, text = self.request("POST", path, {**body, "stream": True})
        assert status == 200, text
        data = re.findall(r"^data: (.*)$", text, re.M)
        assert data[-1] == "[DONE]", text
        return [json.loads(event) for event in data[:-1]]

    def metric(self, name: str) -> float:
        text = self.request("GET", "/metrics")[1]
        return float(re.search(rf"^sluice_{re.escape(name)} (\S+)$", text, re.M)[1])

    def end(self) -> tuple[int, float]:
        """Exit code, and seconds, after SIGTERM."""
        begun = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=60)
        self.process.stderr.close()
        return code, time.monotonic() - begun


class Serve(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--running", 4, "--cached", 2, "--max-body", "1MiB")

    @classmethod
    def tearDownClass(cls):
        code, _ = cls.server.end()
        assert code == 0, code

    def setUp(self):
        self.assertIsNone(self.server.process.poll(), "the server has ended")

    def refused(self, status: int, text: str, path: str, body, kind: str = "invalid_request_error"):
        got, reply = self.server.post(path, body)
        self.assertEqual(got, status, reply)
        self.assertEqual(reply["error"]["type"], kind)
        codes = {"invalid_request_error": ("usage", "prompt", "unsupported", "not_found", "tokenizer", None),
                 "rate_limit_error": ("memory",)}
        self.assertIn(reply["error"]["code"], codes[kind])
        self.assertIn(text, reply["error"]["message"])

    # ---- Answers

    def test_text_equals_generate(self):
        done = sluice("generate", "-m", MODEL, "-p", PROMPT, "-n", 24, "--quiet", "--compute", "f32",
                      "--kv-dtype", "f32", "--policy", "dense", "--json", "-")
        expected = json.loads(done.stdout)
        reply = self.server.complete(max_tokens=24)
        self.assertEqual(reply["object"], "text_completion")
        self.assertEqual(reply["choices"][0]["text"], expected["text"])
        self.assertEqual(reply["choices"][0]["finish_reason"], "length")
        self.assertEqual(reply["usage"]["completion_tokens"], 24)

    def test_a_stream_is_the_same_text(self):
        whole = self.server.complete(max_tokens=24)["choices"][0]["text"]
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "stream_options": {"include_usage": True}}
        events = self.server.events("/v1/completions", body)
        self.assertEqual("".join(c["text"] for e in events for c in e["choices"]), whole)
        self.assertEqual(events[-2]["choices"][0]["finish_reason"], "length")
        self.assertEqual(events[-1]["usage"]["completion_tokens"], 24)

    def test_stop_strings_are_held_back(self):
        whole = self.server.complete(max_tokens=24)["choices"][0]["text"]
        stop = whole[8:14]
        for reply in [self.server.complete(max_tokens=24, stop=stop),
                      self.server.complete(max_tokens=24, stop=["never", stop])]:
            self.assertEqual(reply["choices"][0]["text"], whole[: whole.index(stop)])
            self.assertEqual(reply["choices"][0]["finish_reason"], "stop")

    def test_several_prompts_and_choices(self):
        reply = self.server.complete(prompt=[PROMPT, "The count"], n=2, max_tokens=6, temperature=1, seed=5)
        self.assertEqual([c["index"] for c in reply["choices"]], [0, 1, 2, 3])
        again = self.server.complete(prompt=[PROMPT, "The count"], n=2, max_tokens=6, temperature=1, seed=5)
        self.assertEqual([c["text"] for c in reply["choices"]], [c["text"] for c in again["choices"]])

    def test_ids_are_a_prompt(self):
        ids = self.server.post("/tokenize", {"prompt": PROMPT})[1]["tokens"]
        self.assertEqual(self.server.complete(prompt=ids, max_tokens=9)["choices"][0]["text"],
                         self.server.complete(max_tokens=9)["choices"][0]["text"])
        self.assertIn(PROMPT, self.server.post("/detokenize", {"tokens": ids})[1]["prompt"])

    def test_echo_with_logprobs(self):
        """What likelihood harnesses ask for."""
        answer = self.server.complete(max_tokens=3, logprobs=2)["choices"][0]
        reply = self.server.complete(max_tokens=3, echo=True, logprobs=2)["choices"][0]
        ids = self.server.post("/tokenize", {"prompt": PROMPT})[1]["tokens"]
        scores = reply["logprobs"]
        self.assertTrue(reply["text"].endswith(PROMPT + answer["text"]))
        self.assertEqual(len(scores["tokens"]), len(ids) + 3)
        self.assertIsNone(scores["token_logprobs"][0])
        self.assertEqual("".join(scores["tokens"]), reply["text"])
        for own, other in zip(scores["token_logprobs"][-3:], answer["logprobs"]["token_logprobs"]):
            self.assertAlmostEqual(own, other, places=3)
        # The continuation scored as a prompt has the log probabilities that it was drawn with.
        whole = self.server.complete(prompt=PROMPT + answer["text"], echo=True, logprobs=0, max_tokens=0)
        again = whole["choices"][0]["logprobs"]["token_logprobs"]
        self.assertEqual(len(again), len(ids) + 3)
        for own, other in zip(again[-3:], answer["logprobs"]["token_logprobs"]):
            self.assertAlmostEqual(own, other, places=3)
        streamed = self.server.events("/v1/completions", {"prompt": PROMPT, "temperature": 0, "max_tokens": 3,
                                                          "echo": True, "logprobs": 2})
        self.assertEqual("".join(c["text"] for e in streamed for c in e["choices"]), reply["text"])

    def test_offsets_count_characters(self):
        prompt = "Ünïcödé 😀 end"
        choice = self.server.complete(prompt=prompt, max_tokens=0, echo=True, logprobs=1)["choices"][0]
        text = choice["text"]
        self.assertTrue(text.endswith(prompt), text)
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        for token, offset in zip(tokens, offsets):
            if "\ufffd" not in token:
                self.assertEqual(text[offset:offset + len(token)], token)
        self.assertIn(len(text) - len(" end"), offsets)

    def test_bodies_of_any_type_and_size(self):
        body = json.dumps({"prompt": [1] * 20000, "max_tokens": 1}).encode()
        for kind in ("application/json", "application/x-www-form-urlencoded", "text/plain"):
            status, reply = self.server.post("/v1/completions", body, {"Content-Type": kind})
            self.assertEqual((status, reply["error"]["code"]), (400, "prompt"))  # read, and too long
        for headers in ("", "Content-Length: -5\r\n", "Content-Length: 99999999999999999999\r\n",
                        "Content-Length: x\r\n"):
            begun = time.monotonic()
            with socket.create_connection(("127.0.0.1", self.server.port), timeout=20) as wire:
                wire.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())
                self.assertIn(b" 400 ", wire.recv(4096))
            self.assertLess(time.monotonic() - begun, 5)

    def test_bias_bans_a_token(self):
        ids = self.server.complete(max_tokens=1, logprobs=0)["choices"][0]["logprobs"]["tokens"]
        banned = self.server.post("/tokenize", {"prompt": ids[0], "add_special_tokens": False})[1]["tokens"]
        reply = self.server.complete(max_tokens=1, logprobs=0, logit_bias={str(banned[0]): -100})
        self.assertNotEqual(reply["choices"][0]["logprobs"]["tokens"], ids)

    def test_models(self):
        listed = json.loads(self.server.request("GET", "/v1/models")[1])
        self.assertEqual(listed["data"][0]["id"], "sluice-22m")
        self.assertIs(listed["data"][0]["chat"], False)
        self.server.complete(model="sluice-22m", max_tokens=1)
        self.refused(404, "there is no model", "/v1/completions", {"model": "gpt-4", "prompt": "x"})

    def test_page_health_and_metrics(self):
        status, page = self.server.request("GET", "/")
        self.assertEqual(status, 200)
        self.assertEqual(page, (ROOT / "tools" / "serve" / "page.html").read_text())
        self.assertNotRegex(page, r'(?:src|href)\s*=(?!"data:)')  # nothing from elsewhere
        self.assertEqual(json.loads(self.server.request("GET", "/health")[1])["status"], "ok")
        before = self.server.metric("answer_tokens_total")
        self.server.complete(max_tokens=5)
        self.assertEqual(self.server.metric("answer_tokens_total"), before + 5)
        for line in self.server.request("GET", "/metrics")[1].splitlines():
            self.assertRegex(line, r'^(# (HELP|TYPE) \w+ .+|\w+(\{(\w+="[^"]*",?)+\})? [-+.\w]+)$')
        stats = json.loads(self.server.request("GET", "/stats")[1])
        self.assertGreater(stats["host_bytes"], 0)

    def test_many_clients_get_the_text_that_each_gets_alone(self):
        prompts = [f"{PROMPT} said number {i % 6}" for i in range(24)]
        ask = lambda prompt: self.server.complete(prompt=prompt, max_tokens=20)["choices"][0]["text"]
        alone = {prompt: ask(prompt) for prompt in set(prompts)}
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            self.assertEqual(list(pool.map(ask, prompts)), [alone[prompt] for prompt in prompts])

    # ---- Structured answers

    SCHEMA = {"type": "object", "properties": {"zeal": {"type": "integer"}, "name": {"type": "string", "maxLength": 12},
                                               "mood": {"enum": ["good", "bad"]}},
              "required": ["zeal", "name", "mood"], "additionalProperties": False}

    def expect_person(self, text: str):
        person = json.loads(text)
        self.assertEqual(list(person), ["zeal", "name", "mood"])  # the schema's order, not the alphabet's
        self.assertIsInstance(person["zeal"], int)
        self.assertLessEqual(len(person["name"]), 12)
        self.assertIn(person["mood"], ["good", "bad"])

    def test_answers_of_a_schema(self):
        wanted = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": self.SCHEMA}}
        reply = self.server.complete(max_tokens=900, response_format=wanted)
        self.assertEqual(reply["choices"][0]["finish_reason"], "stop")
        self.expect_person(reply["choices"][0]["text"])
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 900, "response_format": wanted}
        events = self.server.events("/v1/completions", body)
        self.assertEqual("".join(c["text"] for e in events for c in e["choices"]), reply["choices"][0]["text"])
        several = self.server.complete(max_tokens=900, response_format=wanted, n=3, temperature=1, seed=4, logprobs=1)
        for choice in several["choices"]:
            self.assertEqual(choice["finish_reason"], "stop")
            self.expect_person(choice["text"])
        cut = self.server.complete(max_tokens=2, response_format=wanted)["choices"][0]
        self.assertEqual(cut["finish_reason"], "length")

    def test_answers_of_other_kinds(self):
        reply = self.server.complete(max_tokens=60, regex="(yes|no), [a-z]{3,8}!")["choices"][0]
        self.assertRegex(reply["text"], r"^(yes|no), [a-z]{3,8}!$")
        self.assertEqual(reply["finish_reason"], "stop")
        rules = 'root ::= "<" word ("," word){1,2} ">"\nword ::= [a-z]{1,5}'
        reply = self.server.complete(max_tokens=60, grammar=rules)["choices"][0]
        self.assertRegex(reply["text"], r"^<[a-z]{1,5}(,[a-z]{1,5}){1,2}>$")
        drawn = self.server.complete(max_tokens=300, response_format={"type": "json_object"}, temperature=1, seed=1)
        if drawn["choices"][0]["finish_reason"] == "stop":
            self.assertIsInstance(json.loads(drawn["choices"][0]["text"]), dict)
        plain = self.server.complete(max_tokens=9, response_format={"type": "text"})["choices"][0]["text"]
        self.assertEqual(plain, self.server.complete(max_tokens=9)["choices"][0]["text"])

    def test_wrong_constraints(self):
        schema = lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        for fields, text in [
                (schema({"type": "integer", "minimum": 3}), "'minimum' is not supported at #"),
                (schema({"type": "object", "properties": {"a": {"oneOf": []}}}), "'oneOf' is not supported at #/properties/a"),
                (schema({"$ref": "#"}), "no text that ever ends"), (schema(5), "must be an object, true or false"),
                (schema({"type": "string", "pattern": "(?=a)"}), "look-around"), (schema(None), "`schema` is missing"),
                ({"response_format": {"type": "json_schema"}}, "`json_schema` must be"),
                ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "extra": 1}}}, "no field"),
                ({"response_format": {"type": "xml"}}, "the type must be"), ({"response_format": "json"}, "must be an object"),
                ({"response_format": {}}, "the type must be"), ({"response_format": {"type": 3}}, "a string"),
                ({"response_format": {"type": "text", "json_schema": {}}}, "wants the type"),
                ({"regex": "("}, "`)` is missing"), ({"regex": 3}, "`regex` must be a string"), ({"regex": ""}, "empty one"),
                ({"grammar": "x"}, "line 1"), ({"grammar": []}, "`grammar` must be a string"),
                ({"regex": "a", "grammar": "b"}, "only one of"), ({"regex": "a", "ignore_eos": True}, "`ignore_eos`")]:
            with self.subTest(fields=str(fields)[:60]):
                self.refused(400, text, "/v1/completions", {"prompt": "x", **fields})
        names = {f"n{i}": True for i in range(6000)}
        self.refused(400, "more than 5000 names", "/v1/completions",
                     {"prompt": "x", **schema({"type": "object", "properties": names})})
        self.refused(400, "too ambiguous", "/v1/completions", {"prompt": "x", "regex": "((a?){1000}){1000}b"})
        self.server.complete(max_tokens=1)

    # ---- Wrong requests

    def test_bodies_that_are_no_request(self):
        for body, text in [("", "not JSON"), ("[" * 1000, "nested"), ("[]", "object"), ("{", "not JSON"),
                           ('{"prompt": NaN}', "not JSON"), (b"\xff\xfe", "not JSON"), ("1", "object"),
                           ('{"prompt":' + "[" * 100 + "]" * 100 + "}", "nested")]:
            with self.subTest(body=body[:20]):
                self.refused(400, text, "/v1/completions", body)

    def test_a_body_that_is_too_large(self):
        connection = self.server.connect()
        try:
            connection.request("POST", "/v1/completions", b"[" * 10_000_000)
            self.assertEqual(connection.getresponse().status, 413)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server closed before all of it was sent
        self.server.complete(max_tokens=1)

    def test_wrong_fields(self):
        for field, value, text in [
                ("prompt", 5, "prompt"), ("prompt", None, "missing"), ("prompt", [], "empty"),
                ("prompt", [1, "x"], "whole numbers"), ("prompt", [1, -5], "token id"), ("prompt", [1, 10**30], "whole"),
                ("prompt", [[1], {}], "prompt"), ("prompt", "x " * 3000, "do not fit"), ("n", -1, "`n`"), ("n", 0, "`n`"),
                ("n", 10**9, "`n`"), ("n", "2", "whole number"), ("n", 1.5, "whole number"), ("max_tokens", -1, "max_tokens"),
                ("max_tokens", 2**63, "max_tokens"), ("max_tokens", True, "whole number"), ("temperature", "hot", "number"),
                ("temperature", -1, "temperature"), ("top_p", 0, "top_p"), ("top_p", 2, "top_p"), ("stop", 5, "stop"),
                ("stop", [""], "empty"), ("stop", [1], "stop"), ("stop", ["x"] * 99, "stop"), ("logprobs", 21, "logprobs"),
                ("logprobs", True, "whole number"), ("logit_bias", {"x": 1}, "logit_bias"), ("logit_bias", [], "logit_bias"),
                ("logit_bias", {"999999": 1}, "logit_bias"), ("logit_bias", {"1": 101}, "logit_bias"), ("echo", 1, "echo"),
                ("presence_penalty", 3, "presence_penalty"), ("frequency_penalty", -3, "frequency_penalty"),
                ("stream", "yes", "stream"), ("stream_options", 1, "stream_options"),
                ("stream_options", {"include_usage": True}, "for a `stream`"), ("user", 5, "user"), ("prompt", [1, -7], "-7"),
                ("prompt", [1, 2**40], "1099511627776"), ("seed", 1.5, "seed"), ("best_of", 3, "best_of"),
                ("suffix", "x", "suffix"), ("policy", "no such", "polic"), ("policy", "sluice", "not planned"),
                ("priority", 101, "priority"), ("tools", [], "no field"), ("model", 1, "model")]:
            with self.subTest(field=field, value=str(value)[:30]):
                self.refused(400, text, "/v1/completions", {"prompt": "x", field: value})

    def test_wrong_messages(self):
        user = {"role": "user", "content": "x"}
        for messages in [None, [], "x", [5], [{}], [{"role": "user"}], [{"role": "robot", "content": "x"}], [user, user],
                         [{"role": "assistant", "content": "x"}], [user, {"role": "system", "content": "x"}],
                         [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "image_url"}]}]]:
            with self.subTest(messages=messages):
                status, reply = self.server.post("/v1/chat/completions", {"messages": messages})
                self.assertEqual(status, 400, reply)

    def test_wrong_paths_and_tokens(self):
        self.assertEqual(self.server.request("GET", "/nothing")[0], 404)
        self.assertEqual(self.server.request("GET", "/v1/completions")[0], 404)
        for tokens in [None, 5, ["x"], [-1], [1.5], [10**9]]:
            self.refused(400, "tokens", "/detokenize", {"tokens": tokens})
        self.refused(400, "prompt", "/tokenize", {})

    def test_a_client_that_goes_away_is_cancelled(self):
        body = json.dumps({"prompt": PROMPT, "max_tokens": 1000, "stream": True, "ignore_eos": True})
        gone = socket.create_connection(("127.0.0.1", self.server.port))
        gone.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        gone.recv(200)
        gone.close()
        self.server.complete(max_tokens=3)
        until = time.monotonic() + 30
        while self.server.metric("running") > 0:
            self.assertLess(time.monotonic(), until, "the answer goes on")
            time.sleep(0.05)

    def test_half_a_request_does_not_keep_others_waiting(self):
        half = socket.create_connection(("127.0.0.1", self.server.port))
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
        self.server.complete(max_tokens=2)
        half.close()


class ServeOthers(unittest.TestCase):
    def test_api_key(self):
        server = Server("--api-key", "secret")
        for header in [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "Bearer secretx"}]:
            status, reply = server.post("/v1/completions", {"prompt": "x"}, header)
            self.assertEqual((status, reply["error"]["type"]), (401, "authentication_error"))
        self.assertEqual(server.request("GET", "/metrics")[0], 401)
        self.assertEqual(server.request("GET", "/health")[0], 200)
        status, _ = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, {"Authorization": "Bearer secret"})
        self.assertEqual(status, 200)
        self.assertEqual(server.end()[0], 0)

    def test_chat(self):
        with tempfile.TemporaryDirectory() as folder:
            server = Server(model=write_model(Path(folder)), context=512)
            messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"},
                        {"role": "assistant", "content": "I."},
                        {"role": "user", "content": [{"type": "text", "text": "Why?"}]}]
            body = {"messages": messages, "temperature": 0, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
            self.assertIs(json.loads(server.request("GET", "/v1/models")[1])["data"][0]["chat"], True)
            status, reply = server.post("/v1/chat/completions", body)
            self.assertEqual(status, 200, reply)
            choice = reply["choices"][0]
            self.assertEqual(choice["message"]["role"], "assistant")
            self.assertEqual(len(choice["logprobs"]["content"]), 12)
            self.assertEqual(len(choice["logprobs"]["content"][0]["top_logprobs"]), 2)
            events = server.events("/v1/chat/completions", body)
            deltas = [c["delta"] for e in events for c in e["choices"]]
            self.assertEqual("".join(d["content"] for d in deltas), choice["message"]["content"])
            self.assertEqual([d.get("role") for d in deltas], ["assistant"] + [None] * (len(deltas) - 1))
            # The command's chat says the same: one question, without the other messages.
            one = {"messages": messages[1:2], "temperature": 0, "max_tokens": 12}
            done = sluice("generate", "-m", folder, "--chat", "-p", "Who?", "-n", 12, "--quiet", "--compute", "f32",
                          "--kv-dtype", "f32", "--policy", "dense", "--json", "-")
            self.assertEqual(server.post("/v1/chat/completions", one)[1]["choices"][0]["message"]["content"],
                             json.loads(done.stdout)["text"])
            again = server.post("/v1/chat/completions", body)[1]["usage"]
            self.assertGreater(again["prompt_tokens_details"]["cached_tokens"], 0)
            for wrong in [{"max_tokens": 0}, {"max_completion_tokens": 10**6}, {"top_logprobs": 99}, {"logprobs": 3}]:
                self.assertEqual(server.post("/v1/chat/completions", {"messages": messages, **wrong})[0], 400, wrong)
            server.end()

    def test_a_client_that_never_reads_delays_nobody(self):
        server = Server("--running", 2, context=4096)
        body = json.dumps({"prompt": PROMPT, "max_tokens": 3000, "stream": True, "ignore_eos": True, "n": 1, "logprobs": 20})
        lazy = socket.create_connection(("127.0.0.1", server.port))
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        lazy.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        for _ in range(3):
            self.assertEqual(server.complete(max_tokens=5)["usage"]["completion_tokens"], 5)
        lazy.close()
        self.assertEqual(server.end()[0], 0)

    def test_a_full_queue_is_429_and_the_rest_goes_on(self):
        server = Server("--running", 1, "--queued", 1)
        body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            replies = list(pool.map(lambda _: server.post("/v1/completions", body), range(6)))
        refused = [reply for status, reply in replies if status == 429]
        served = [reply["choices"][0]["text"] for status, reply in replies if status == 200]
        self.assertEqual(len(refused) + len(served), 6)
        self.assertGreaterEqual(len(refused), 1)
        self.assertEqual(len(set(served)), 1)
        self.assertIn("tokens are free", refused[0]["error"]["message"])
        server.end()

    def test_sigterm_lets_an_answer_end(self):
        server = Server()
        body = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "temperature": 0}
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.post, "/v1/completions", body)
            while server.metric("running") == 0:
                self.assertFalse(running.done())
            code, _ = server.end()
            self.assertEqual(code, 0)
            status, reply = running.result()
        self.assertEqual(status, 200)
        self.assertEqual(reply["usage"]["completion_tokens"], 300)

    def test_prefixes_outlive_the_server(self):
        book = (ROOT / "data" / "war-and-peace.txt").read_text()[:1000]
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "prefixes"
            replies, logs = [], []
            for question in (" Then", " Then", " But"):
                server = Server("--prefixes", folder)
                replies.append(server.complete(prompt=book + question, max_tokens=8))
                server.process.send_signal(signal.SIGTERM)
                logs.append(server.log + server.process.stderr.read())
                self.assertEqual(server.process.wait(timeout=60), 0)
            cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
            prompt = replies[0]["usage"]["prompt_tokens"]
            self.assertEqual(cached[:2], [0, prompt - 1])
            self.assertGreater(cached[2], prompt - 8)
            self.assertEqual(replies[0]["choices"], replies[1]["choices"])
            self.assertIn("prefixes loaded: 0, of 0 tokens", logs[0])
            self.assertIn("prefixes saved: 1, of ", logs[0])
            self.assertIn("prefixes loaded: 1, of ", logs[1])
            for part in folder.iterdir():
                (part / "manifest.json").write_text("no JSON")
            server = Server("--prefixes", folder)
            self.assertIn("note: skipped ", server.log)
            self.assertEqual(server.complete(max_tokens=1)["usage"]["completion_tokens"], 1)
            self.assertEqual(server.end()[0], 0)

    def test_a_time_limit_cuts_an_answer(self):
        server = Server("--timeout", 1, "--tokens", 100000, context=100000)
        reply = server.complete(max_tokens=99000, ignore_eos=True)
        self.assertEqual(reply["choices"][0]["finish_reason"], "length")
        self.assertLess(reply["usage"]["completion_tokens"], 99000)
        server.end()

    def test_wrong_flags(self):
        for flags, code, text in [
                (["--port", 99999], 2, "--port"), (["--running", 0], 2, "--running"), (["--max-body", "x"], 2, "--max-body"),
                (["--max-body", 0], 2, "--max-body"),
                (["--cached", -1], 2, "--cached"), (["--host", "256.1.1.1"], 9, "cannot listen"),
                (["--prefill-ms", "nan"], 2, "prefill"), (["--prefixes", MODEL / "config.json"], 9, "is a file"),
                (["--prefixes", "x", "--cached", 0], 2, "--cached"), (["--host-memory", "1MiB"], 8, "memory")]:
            with self.subTest(flags=flags):
                done = sluice("serve", "-m", MODEL, "--port", 0, "--context", 512, *flags)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(text, done.stderr)


if __name__ == "__main__":
    unittest.main()
