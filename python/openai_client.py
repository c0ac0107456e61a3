"""Runs the official `openai` client (pip install openai) through what `godwit serve` offers.

    build/godwit serve --model runs/quickstart/model --port 8080 &
    python3 python/openai_client.py http://127.0.0.1:8080

The model need not know how to chat: what is checked is the protocol. Exits 1 at the first thing that is not as it should be.
"""

import json
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
check("finish reason", reason == whole.choices[0].finish_reason, reason)

again = client.chat.completions.create(**common)
check("same seed, same answer", again.choices[0].message == message, again)
# The second time the prompt's whole pages come from the prefix cache.
check("cached tokens", again.usage.prompt_tokens < 65 or again.usage.prompt_tokens_details.cached_tokens > 0, again.usage)

several = client.chat.completions.create(**common, n=3)
check("n", len(several.choices) == 3 and several.choices[0].message == message, several)

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

text = client.completions.create(model=model, prompt="And it came to pass", max_tokens=40, temperature=0)
check("completions", text.usage.completion_tokens <= 40 and text.choices[0].text, text)
stop = text.choices[0].text[8:12]
cut = client.completions.create(model=model, prompt="And it came to pass", max_tokens=40, temperature=0, stop=[stop])
check("stop strings", cut.choices[0].text == text.choices[0].text[: text.choices[0].text.index(stop)] and cut.choices[0].finish_reason == "stop", cut)
both = client.completions.create(model=model, prompt=["In the", "And the"], max_tokens=4, n=2)
check("several prompts", [c.index for c in both.choices] == [0, 1, 2, 3], both)
banned = client.completions.create(model=model, prompt=[10, 11], max_tokens=8, temperature=0)
check("prompt as ids", banned.choices[0].finish_reason == "length", banned)

for name, action, status in [
    ("unknown model", lambda: client.chat.completions.create(**{**common, "model": "nobody"}), 404),
    ("bad temperature", lambda: client.chat.completions.create(**common, temperature=9), 400),
    ("too long a prompt", lambda: client.completions.create(model=model, prompt=[5] * 2_000_000), 400),
]:
    try:
        action()
        check(name, False, "was accepted")
    except openai.APIStatusError as e:
        check(name, e.status_code == status and e.body["message"], e)

metrics = urllib.request.urlopen(base + "/metrics").read().decode()
check("metrics", "godwit_drawn_tokens_total" in metrics, metrics)
print(f"{len(done)} checks passed: {', '.join(done)}")
