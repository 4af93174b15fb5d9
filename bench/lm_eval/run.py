#!/usr/bin/env python3
"""Clients that others wrote against `sluice serve`, beside what Sluice's own commands say.

    bench/lm_eval/setup.sh
    build/lm_eval/bin/python bench/lm_eval/run.py build/release/bin/sluice --json OUT.json

lm-evaluation-harness (`local-completions`) asks the server for likelihoods of the texts of
data/tasks/text.jsonl, whose last tokens are the continuation, and for answers to the questions of
ruler.jsonl and longbench.jsonl; `sluice eval --data` measures the same with dense attention. The
openai package asks for a completion, at once and streamed, beside `sluice generate`. The exit
status is 1 if a number or a text differs by more than rounding.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from serve_load import Server  # noqa: E402

TASKS = ROOT / "data" / "tasks"
TOKENS = 6  # of an answer, or of a continuation
PROMPT = "Well, Prince, so Genoa and Lucca are now just family estates"


def text_lines(server: Server) -> list[dict[str, str]]:
    """The texts, cut where their last tokens begin."""

    def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
        return json.loads(server.post(path, body).read())

    lines = []
    for line in (TASKS / "text.jsonl").read_text().splitlines():
        text = json.loads(line)["text"]
        ids = ask("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        context = ask("/detokenize", {"tokens": ids[:-TOKENS]})["prompt"]
        lines.append({"context": context, "continuation": text[len(context) :]})
    return lines


def prompt_lines(name: str) -> list[dict[str, Any]]:
    """The lines of a file as prompts with the strings that answers are compared with."""
    lines = []
    for line in (TASKS / f"{name}.jsonl").read_text().splitlines():
        fields = json.loads(line)
        if name == "ruler":
            lines.append({"prompt": fields["input"], "right": fields["outputs"]})
        else:
            prompt = "\n\n".join(part for part in (fields["context"], fields["input"]) if part)
            lines.append({"prompt": prompt, "right": fields["answers"]})
    return lines


def write_task(folder: Path, name: str, lines: list[dict[str, Any]], fields: str) -> None:
    """A task of the harness, and its lines."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / f"{name}.yaml").write_text(
        f"task: sluice_{name}\ndataset_path: json\ntest_split: test\n"
        f"dataset_kwargs:\n  data_files:\n    test: {data}\n{fields}"
    )


LIKELIHOOD = """output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: "{{continuation}}"
target_delimiter: ""
process_results: !function scores.log_likelihood
metric_list:
  - {metric: log_likelihood, aggregation: mean, higher_is_better: true}
"""

GENERATION = """output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: ""
generation_kwargs: {until: ["<|end_of_text|>"], max_gen_toks: %d, do_sample: false, temperature: 0}
process_results: !function scores.%s
metric_list:
  - {metric: score, aggregation: mean, higher_is_better: true}
"""


def tokenizer_with_bos(model: Path, folder: Path) -> Path:
    """The checkpoint's tokenizer, which itself does not put BOS in front, doing so."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    bos = json.loads((model / "config.json").read_text())["bos_token_id"]
    token = next(t["content"] for t in tokenizer["added_tokens"] if t["id"] == bos)
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token, "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
    }  # fmt: skip
    made = folder / "tokenizer"
    made.mkdir()
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    (made / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return made


def run_harness(server: Server, model: Path, folder: Path) -> dict[str, float]:
    """The mean of each task."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    done = simple_evaluate(
        model="local-completions",
        model_args={
            "model": model.name,
            "base_url": f"http://127.0.0.1:{server.port}/v1/completions",
            "tokenizer_backend": "huggingface",
            "tokenizer": str(tokenizer_with_bos(model, folder)),
            "add_bos_token": True,
            "max_length": 16384,
        },
        tasks=["sluice_text", "sluice_ruler", "sluice_longbench"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    results = done["results"]
    return {
        "text": results["sluice_text"]["log_likelihood,none"],
        "ruler": results["sluice_ruler"]["score,none"],
        "longbench": results["sluice_longbench"]["score,none"],
    }


def run_eval(sluice: Path, model: Path, folder: Path) -> dict[str, float]:
    """The same from `sluice eval`."""
    report = folder / "eval.json"
    files = [word for name in ("text", "ruler", "longbench")
             for word in ("--data", str(TASKS / f"{name}.jsonl"))]  # fmt: skip
    subprocess.run([sluice, "eval", "--model", model, *files, "--tokens", str(TOKENS),
                    "--policy", "dense", "--json", report], check=True, capture_output=True)  # fmt: skip
    text, ruler, longbench = (result["policies"][0]
                              for result in json.loads(report.read_text())["results"])  # fmt: skip
    return {"text": -TOKENS * text["nll"]["mean"], "ruler": ruler["score"]["mean"],
            "longbench": longbench["score"]["mean"]}  # fmt: skip


def ask_with_openai(server: Server, model: Path) -> dict[str, str]:
    from openai import OpenAI

    client = OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
    wish = {"model": model.name, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**wish).choices[0].text
    streamed = "".join(event.choices[0].text
                       for event in client.completions.create(**wish, stream=True))  # fmt: skip
    return {"whole": whole, "streamed": streamed, "models": client.models.list().data[0].id}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("sluice", type=Path)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "sluice-22m")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

    server = Server([str(flags.sluice), "serve", "--model", str(flags.model), "--port", "0",
                     "--context", "16384", "--running", "4"])  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_task(folder, "text", text_lines(server), LIKELIHOOD)
        for task, metric in (("ruler", "string_match_all"), ("longbench", "best_f1")):
            write_task(folder, task, prompt_lines(task), GENERATION % (TOKENS, metric))
        (folder / "scores.py").write_text((Path(__file__).parent / "scores.py").read_text())
        os.environ["HF_HOME"] = str(folder / "cache")
        harness = run_harness(server, flags.model, folder)
        own = run_eval(flags.sluice, flags.model, folder)
    texts = ask_with_openai(server, flags.model)
    server.end()
    generated = subprocess.run([flags.sluice, "generate", "-m", flags.model, "-p", PROMPT, "-n", "24",
                                "-q", "--ignore-eos"],
                               check=True, capture_output=True, text=True).stdout  # fmt: skip
    generated = generated.removesuffix("\n").removeprefix(PROMPT)
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "command": " ".join(sys.argv),
        "versions": {name: importlib.metadata.version(name)
                     for name in ("lm_eval", "openai", "transformers")},  # fmt: skip
        "harness": harness,
        "eval": own,
        "openai": texts,
        "generate": generated,
    }
    print(json.dumps(report, indent=1))
    if flags.json:
        flags.json.write_text(json.dumps(report, indent=1) + "\n")
    same = all(abs(harness[task] - own[task]) <= 2e-3 * max(1, abs(own[task])) for task in own)
    return int(not same or {texts["whole"], texts["streamed"]} != {generated})


if __name__ == "__main__":
    sys.exit(main())
