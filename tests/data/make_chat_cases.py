#!/usr/bin/env python3
"""Records what Jinja and Hugging Face's tokenizers library make of conversations.

The templates are written here, in the forms that the checkpoints of each family have. Jinja runs
them as transformers does. See README.md.
"""

import json
from typing import Any

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from make_tokenizer_cases import BASE, DATA, merge_patch

CONTROLS = [
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "<s>", "</s>",
]  # fmt: skip
PLAIN = ["<think>", "</think>"]  # added, but not special
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
SHIPPED = [(0, "<|begin_of_text|>", True), (1, "<|end_of_text|>", True)]
ADDED = SHIPPED + [(4096 + i, text, text in CONTROLS) for i, text in enumerate(CONTROLS + PLAIN)]
PATCH = {"added_tokens": [{"id": i, "content": text, "special": special, **FLAGS}
                          for i, text, special in ADDED]}

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_DEFAULT = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a small model.<|im_end|>\\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_LINES = """{#- Every tag on a line of its own. #}
{%- for message in messages %}
    {#- One message. #}
    {{- "<|im_start|>" ~ message.role ~ "\\n" }}
    {{- message.content | trim }}
    {{- "<|im_end|>\\n" -}}
{% endfor %}
{%- if add_generation_prompt -%}
    {{ "<|im_start|>assistant\\n" }}
{%- endif %}
"""
CHATML_TEXT = """{% for message in messages %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
QWEN25 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are made of tests.' }}
    {%- endif %}
    {{- "\\n\\nTools:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools> {\\"name\\": <name>}<|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are made of tests.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
QWEN3 = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and index > ns.last_query_index %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
QWEN3_ALWAYS = QWEN3.replace("assistant\\n' }}\n    {%- if enable_thinking is defined and enable_thinking is false %}\n        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}", "assistant\\n<think>\\n' }}")
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
)
LLAMA31 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none and tools is defined %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + message.tool_calls[0].name + '"}' }}
        {{- "<|eom_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL1 = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Turns must alternate.') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}"
    "{% else %}{{ raise_exception('No such role.') }}{% endif %}{% endfor %}"
)
MISTRAL3 = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST]" + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST]" + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS][" }}
        {{- message.tool_calls | tojson + "]" + eos_token }}
    {%- elif message["role"] == "assistant" %}
        {{- message["content"] + eos_token}}
    {%- endif %}
{%- endfor %}
"""
MISTRAL_FIRST = (
    MISTRAL3.replace("loop.last", "loop.first").replace('"[INST]"', '" [INST] "')
    .replace('"[/INST]"', '" [/INST]"')
    .replace('{{- message["content"] + eos_token}}', '{{- " " + message["content"]|trim + eos_token}}')
)  # fmt: skip
MISTRAL7 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST]' + message['content'] + '[/INST]' }}{% elif message['role'] == 'system' %}"
    "{{ '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('No such role.') }}{% endif %}{% endfor %}"
)

LLAMA = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
MISTRAL = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
# By name: family, template, tokens.
FORMATS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "chatml": ("ChatML", CHATML, {"bos_token": None}),
    "chatml_bos": ("ChatML", "{{bos_token}}" + CHATML, {"bos_token": "<s>"}),
    "chatml_default": ("ChatML", CHATML_DEFAULT, {}),
    "chatml_lines": ("ChatML", CHATML_LINES, {}),
    "chatml_text": ("ChatML", CHATML_TEXT, {}),
    "qwen25": ("ChatML", QWEN25, {"bos_token": None, "eos_token": "<|im_end|>"}),
    "qwen3": ("ChatML", QWEN3, {"bos_token": None, "eos_token": "<|im_end|>"}),
    "qwen3_always": ("ChatML", QWEN3_ALWAYS, {"bos_token": None}),
    "llama3": ("Llama 3", LLAMA3, LLAMA),
    "llama31": ("Llama 3", LLAMA31, LLAMA),
    "mistral1": ("Mistral", MISTRAL1, MISTRAL),
    "mistral3": ("Mistral", MISTRAL3, MISTRAL),
    "mistral_first": ("Mistral", MISTRAL_FIRST, MISTRAL),
    "mistral7": ("Mistral", MISTRAL7, MISTRAL),
}

SYSTEMS = ["", "Be brief.", " \n Answer in\nverse.\n"]
CONVERSATIONS = [
    ["Hello"],
    ["\n  What is 17 + 4?  \n\n", "21.", "and \u00e9\u00e8 \u65e5\u672c\u8a9e \U0001f469\u200d\U0001f467?"],
    ["One", " <think>\nHm, 1 </think> 2?\n</think>\n\nTwo, \n I think.\n ", "Three", "", "x  y\t\n", "Five\n\n", "\t six"],
]  # fmt: skip


def environment() -> jinja2.Environment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    made.globals["raise_exception"] = raise_exception
    return made


def text_of(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token or ""


def record(name: str, tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    family, source, tokens = FORMATS[name]
    template = environment().from_string(source)
    cases = []
    for system in SYSTEMS if name != "mistral1" else SYSTEMS[:1]:
        for texts in CONVERSATIONS:
            messages = [{"role": "system", "content": system}] if system else []
            messages += [{"role": ("user", "assistant")[i % 2], "content": text}
                         for i, text in enumerate(texts)]  # fmt: skip
            text = template.render(messages=messages, add_generation_prompt=True,
                                   bos_token=text_of(tokens.get("bos_token")),
                                   eos_token=text_of(tokens.get("eos_token")))  # fmt: skip
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            cases.append({"system": system, "texts": texts, "text": text, "ids": ids})
    return {"name": name, "family": family, "config": {"chat_template": source, **tokens},
            "cases": cases}  # fmt: skip


def main() -> None:
    file = merge_patch(json.loads(BASE.read_text(encoding="utf-8")), PATCH)
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(file))
    lines = []
    for name in FORMATS:
        made = record(name, tokenizer)
        cases = ",\n".join(json.dumps(case) for case in made.pop("cases"))
        lines.append(json.dumps(made)[:-1] + ', "cases": [\n' + cases + "\n]}")
    versions = f"jinja2 {jinja2.__version__}, tokenizers {tokenizers.__version__}"
    head = json.dumps({"made_with": versions, "tokenizer_patch": PATCH})[:-1]
    (DATA / "chat_cases.json").write_text(
        head + ', "formats": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")  # fmt: skip


if __name__ == "__main__":
    main()
