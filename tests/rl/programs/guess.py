# A whole environment: guess a number from 1 to 20 with the tool `guess`; three answers.
import json
import random
import sys

TOOLS = [{"type": "function", "function": {
    "name": "guess", "description": "higher, lower or right",
    "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}}]


def reply(**answer):
    print(json.dumps(answer), flush=True)


for line in sys.stdin:
    request = json.loads(line)
    if "reset" in request:
        secret = random.Random(request["reset"]).randint(1, request["options"].get("largest", 20))
        left = 3
        reply(messages=[{"role": "user", "content": "Guess my number."}], tools=TOOLS)
        continue
    calls = request["turn"].get("tool_calls", [])
    if not calls:
        reply(messages=[{"role": "user", "content": "Use the tool."}])
        continue
    n = json.loads(calls[0]["function"]["arguments"]).get("n", 0)
    left -= 1
    word = "right" if n == secret else ("higher" if n < secret else "lower")
    reply(messages=[{"role": "tool", "tool_call_id": calls[0]["id"], "content": word}], state=[left, word],
          done=n == secret or left == 0, success=float(n == secret))
