"""Runs the official `openai` client (pip install openai) through what `godwit serve` offers.

    build/godwit serve --model runs/quickstart/model --port 8080 &
    python3 python/openai_client.py http://127.0.0.1:8080

The model need not know how to chat: what is checked is the protocol. Exits 1 at the first thing that is not as it should be.
"""

import base64
import json
import pathlib
import sys
import urllib.request

import openai

base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
client = openai.OpenAI(base_url=base + "/v1", api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Count to three. <|end_of_msg|> Grüße"}]
common = dict(model=model, messages=messages, max_tokens=24, seed=7)
done = []


def check(name, ok, what=""):
    if not ok:
        sys.exit(f"{name}: {what}")
    done.append(name)


check("models", client.models.retrieve(model).id == model)
whole = client.chat.completions.create(**common)
check("chat", whole.choices[0].message.role == "assistant" and whole.usage.completion_tokens <= 24, whole)

parts = {"content": "", "reasoning_content": ""}
usage = reason = None
for event in client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}):
    if event.usage:
        usage = event.usage
    for choice in event.choices:
        reason = choice.finish_reason or reason
        for key in parts:
            parts[key] += getattr(choice.delta, key, None) or ""
message = whole.choices[0].message
check("streaming equals whole", parts["content"] == (message.content or "") and parts["reasoning_content"] == (getattr(message, "reasoning_content", None) or ""), parts)
check("usage of a stream", usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage)
check("reasoning tokens", 0 <= usage.completion_tokens_details.reasoning_tokens <= usage.completion_tokens, usage)
counts = [e.usage.completion_tokens for e in client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}) if e.usage]
check("continuous usage", counts == sorted(counts) and counts[-1] == whole.usage.completion_tokens, counts)
check("finish reason", reason == whole.choices[0].finish_reason, reason)

again = client.chat.completions.create(**common)
check("same seed, same answer", again.choices[0].message == message, again)
# The second time the prompt's whole pages come from the prefix cache.
check("cached tokens", again.usage.prompt_tokens < 65 or again.usage.prompt_tokens_details.cached_tokens > 0, again.usage)

several = client.chat.completions.create(**common, n=3)
check("n", len(several.choices) == 3 and several.choices[0].message == message, several)

low = client.chat.completions.create(**common, reasoning_effort="low")
none = client.chat.completions.create(**common, reasoning_effort="none")
check("reasoning effort", low.usage.prompt_tokens > whole.usage.prompt_tokens and none.usage.completion_tokens_details.reasoning_tokens == 0, low)
told = [client.chat.completions.create(**{**common, "messages": [{"role": role, "content": "Be brief."}, *messages]}).choices[0].message for role in ("developer", "system")]
check("developer", told[0] == told[1], told)
check("what means nothing here", client.chat.completions.create(**common, user="me", metadata={"a": "b"}, store=False, service_tier="auto").choices[0].message == message, "")
least = client.chat.completions.create(**common, extra_body={"min_tokens": 20, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1})
check("min_tokens", least.usage.completion_tokens >= 20, least)

logprobs = client.chat.completions.create(**common, logprobs=True, top_logprobs=3).choices[0].logprobs.content
check("logprobs", all(t.logprob <= 0 and len(t.top_logprobs) == 3 and t.top_logprobs[0].logprob >= t.top_logprobs[1].logprob for t in logprobs), logprobs)

tools = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}}}]
with_tools = client.chat.completions.create(**common, tools=tools, tool_choice="auto")
check("tools are declared", with_tools.usage.prompt_tokens > whole.usage.prompt_tokens, with_tools.usage)
history = messages + [
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 1, "b": 2})}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
]
check("tool results", client.chat.completions.create(**{**common, "messages": history}, tools=tools).choices[0].finish_reason, "")

person = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
                                         "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}},
          "required": ["name", "age", "tags"], "additionalProperties": False}
longer = {**common, "max_tokens": 160}


def is_person(value):
    return list(value) == ["name", "age", "tags"] and isinstance(value["name"], str) and 0 <= value["age"] <= 150 and set(value["tags"]) <= {"a", "b"} and len(value["tags"]) <= 3


form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": person}}
for thinking in (True, False):
    formed = client.chat.completions.create(**longer, n=3, response_format=form, extra_body={"thinking": thinking})
    check(f"json_schema, thinking {thinking}", all(is_person(json.loads(c.message.content)) for c in formed.choices), formed)
pieces = client.chat.completions.create(**longer, response_format=form, stream=True, extra_body={"thinking": False})
check("json_schema streamed", "".join(e.choices[0].delta.content or "" for e in pieces) == formed.choices[0].message.content, formed)
free = client.chat.completions.create(**longer, response_format={"type": "json_object"}, extra_body={"thinking": False})
check("json_object", isinstance(json.loads(free.choices[0].message.content), dict), free)
strict = [{"type": "function", "function": {"name": name, "parameters": person, "strict": True}} for name in ("first", "second")]
for choice, names in (("required", {"first", "second"}), ({"type": "function", "function": {"name": "second"}}, {"second"})):
    called = client.chat.completions.create(**{**longer, "max_tokens": 400}, tools=strict, tool_choice=choice, extra_body={"thinking": False}).choices[0].message
    check(f"tool_choice {choice}", called.tool_calls and all(c.function.name in names and is_person(json.loads(c.function.arguments)) for c in called.tool_calls), called)
allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "second"}}]}}
some = client.chat.completions.create(**{**longer, "max_tokens": 400}, tools=strict, tool_choice=allowed, extra_body={"thinking": False})
check("allowed_tools", some.choices[0].message.tool_calls and all(c.function.name == "second" for c in some.choices[0].message.tool_calls), some)
arguments, pieces, reason = {}, 0, None
for event in client.chat.completions.create(**{**longer, "max_tokens": 400}, tools=strict, tool_choice=allowed, stream=True, extra_body={"thinking": False}):
    reason = event.choices[0].finish_reason or reason
    for part in event.choices[0].delta.tool_calls or []:
        pieces += 1
        arguments[part.index] = arguments.get(part.index, "") + (part.function.arguments or "")
check("arguments are streamed", reason in ("tool_calls", "length") and pieces > 3 * len(arguments) and [arguments[i] for i in sorted(arguments)] == [c.function.arguments for c in some.choices[0].message.tool_calls], arguments)
one = client.chat.completions.create(**{**longer, "max_tokens": 400}, tools=strict, tool_choice="required", parallel_tool_calls=False, extra_body={"thinking": False})
check("parallel_tool_calls", len(one.choices[0].message.tool_calls) == 1, one)

if json.load(urllib.request.urlopen(urllib.request.Request(base + "/v1/models", headers={"authorization": "Bearer none"})))["data"][0].get("vision"):
    png = base64.b64encode((pathlib.Path(__file__).resolve().parent.parent / "tests/fixtures/images/rgb.png").read_bytes()).decode()
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64," + png}}]
    seen = client.chat.completions.create(**{**common, "messages": [{"role": "user", "content": parts}]})
    check("pictures", seen.usage.prompt_tokens > 0, seen)

text = client.completions.create(model=model, prompt="And it came to pass", max_tokens=40, temperature=0)
check("completions", text.usage.completion_tokens <= 40 and text.choices[0].text, text)
stop = text.choices[0].text[8:12]
cut = client.completions.create(model=model, prompt="And it came to pass", max_tokens=40, temperature=0, stop=[stop])
check("stop strings", cut.choices[0].text == text.choices[0].text[: text.choices[0].text.index(stop)] and cut.choices[0].finish_reason == "stop", cut)
kept = client.completions.create(model=model, prompt="And it came to pass", max_tokens=40, temperature=0, stop=[stop], extra_body={"include_stop_str_in_output": True})
check("include_stop_str_in_output", kept.choices[0].text == cut.choices[0].text + stop, kept)
check("echo", client.completions.create(model=model, prompt="And it came to pass", max_tokens=40, temperature=0, echo=True).choices[0].text == "And it came to pass" + text.choices[0].text, "")
legacy = client.completions.create(model=model, prompt="And", max_tokens=4, temperature=0, logprobs=2).choices[0].logprobs
check("legacy logprobs", len(legacy.tokens) == len(legacy.token_logprobs) == len(legacy.top_logprobs) == len(legacy.text_offset), legacy)
forced = dict(model=model, prompt="And", max_tokens=4, temperature=0, logit_bias={"65": 100})
check("logit bias", client.completions.create(**forced).choices[0].finish_reason == "length")
ended = client.completions.create(**forced, extra_body={"stop_token_ids": [65]})
check("stop ids", ended.choices[0].text == "" and ended.choices[0].finish_reason == "stop", ended)
both = client.completions.create(model=model, prompt=["In the", "And the"], max_tokens=4, n=2)
check("several prompts", [c.index for c in both.choices] == [0, 1, 2, 3], both)
banned = client.completions.create(model=model, prompt=[10, 11], max_tokens=8, temperature=0)
check("prompt as ids", banned.choices[0].finish_reason == "length", banned)

for name, action, status in [
    ("an unknown key", lambda: client.chat.completions.create(**common, extra_body={"no_such_key": 1}), 400),
    ("functions", lambda: client.chat.completions.create(**common, functions=[{"name": "f"}]), 400),
    ("two tools of a name", lambda: client.chat.completions.create(**common, tools=[tools[0], tools[0]]), 400),
    ("an unknown model by id", lambda: client.models.retrieve("nobody"), 404),
    ("unknown model", lambda: client.chat.completions.create(**{**common, "model": "nobody"}), 404),
    ("bad temperature", lambda: client.chat.completions.create(**common, temperature=9), 400),
    ("a schema that is not supported", lambda: client.chat.completions.create(**common, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}), 400),
    ("a picture by its address", lambda: client.chat.completions.create(**{**common, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]}]}), 400),
    ("too long a prompt", lambda: client.completions.create(model=model, prompt="word " * 1_100_000), 400),
]:
    try:
        action()
        check(name, False, "was accepted")
    except openai.APIStatusError as e:
        check(name, e.status_code == status and e.body["message"] and (status == 404 or e.param), e)

metrics = urllib.request.urlopen(base + "/metrics").read().decode()
for name in ("godwit_drawn_tokens_total", "godwit_requests_waiting", "godwit_queue_seconds_bucket", "godwit_request_seconds_bucket", "godwit_http_answers_total", "godwit_tokens_per_second", 'godwit_cache_hit_tokens_total{group="kda"}',
             'godwit_cache_hit_tokens_total{group="mla"}', "godwit_time_to_first_token_seconds_bucket", "godwit_inter_token_seconds_bucket"):
    check("metrics", name in metrics, metrics)
print(f"{len(done)} checks passed: {', '.join(dict.fromkeys(done))}")
