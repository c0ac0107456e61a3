"""Random schemas, random texts of their grammars, and an independent judge: Python's jsonschema.

    python3 tests/python/response_format_test.py [SCHEMAS [SEED]]        (default 300; the long run: 20000)

Needs jsonschema (Debian: python3-jsonschema) and build/schema_samples.
"""

import datetime
import json
import os
import pathlib
import random
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("GODWIT_BUILD", ROOT / "build"))

try:
    import jsonschema
except ImportError:
    debian = "/usr/bin/python3"  # where Debian's package is, if this is another Python
    if sys.executable != debian and pathlib.Path(debian).exists() and not os.environ.get("GODWIT_RETRIED"):
        os.environ["GODWIT_RETRIED"] = "1"
        os.execv(debian, [debian, *sys.argv])
    print("skipped: no Python with jsonschema (Debian: python3-jsonschema)")
    sys.exit(0)

WORDS = ["a", "b", "name", "key \"q\"", "ä€", "x\ny", "", "long_property_name", "😀", "ab", "abc"]
PATTERNS = ["^[a-z]+$", "^a{2,4}b?$", "x|yz", "^(foo|ba[rz])-\\d{1,3}$", "^[^a-c\"]*$", "\\.\\w\\s?", "^\\S+@\\S+$", "^[\\u00e0-\\u00ff]{1,2}$", "^.{3}$",
            "^(?:[A-F0-9]{2}:)*[A-F0-9]{2}$", "^\\d{4}-\\d{2}$", "q+$"]
FORMATS = ["date", "time", "date-time", "email", "hostname", "ipv4", "ipv6", "uuid", "duration"]


class Maker:
    """A random schema of the kinds that are supported; `depth` bounds it, `names` are the $defs it may refer to."""

    def __init__(self, rng):
        self.rng = rng
        self.names = ["node", "leaf", "list"][: rng.randrange(4)]

    def whole(self):
        schema = self.schema(3)
        if self.names:
            if not isinstance(schema, dict):
                schema = {"anyOf": [schema]}
            schema["$defs"] = {name: self.schema(2) for name in self.names}
        return schema

    def value(self, depth=1):
        r = self.rng
        kinds = [lambda: r.choice(WORDS), lambda: r.randrange(-50, 50), lambda: r.choice([0.5, -1.25, 1e-3]), lambda: r.choice([True, False]), lambda: None]
        if depth:
            kinds += [lambda: [self.value(0) for _ in range(r.randrange(3))], lambda: {r.choice(WORDS): self.value(0)}]
        return r.choice(kinds)()

    def schema(self, depth):
        r = self.rng
        kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "any", "many"]
        if depth:
            kinds += ["object", "object", "object", "array", "array", "anyOf"] + (["ref"] * 2 if self.names else [])
        kind = r.choice(kinds)
        schema = getattr(self, "make_" + kind)(depth)
        if isinstance(schema, dict) and r.random() < 0.2 and kind != "ref":
            schema["description"] = "d"
        return schema

    def make_string(self, _):
        r = self.rng
        schema = {"type": "string"}
        kind = r.randrange(5)
        if kind == 0:
            schema["pattern"] = r.choice(PATTERNS)
        elif kind == 1:
            schema["format"] = r.choice(FORMATS)
        elif kind == 2:
            schema["minLength"] = r.randrange(4)
            if r.random() < 0.7:
                schema["maxLength"] = schema["minLength"] + r.randrange(5)
        return schema

    def limits(self, schema, numbers):
        r = self.rng
        low, high = sorted((r.choice(numbers), r.choice(numbers)))
        if r.random() < 0.6:
            schema[r.choice(["minimum", "exclusiveMinimum"])] = low
        if r.random() < 0.6:
            schema[r.choice(["maximum", "exclusiveMaximum"])] = high
        return schema

    def make_integer(self, _):
        schema = self.limits({"type": "integer"}, [-1000, -37, -10, -1, 0, 1, 5, 9, 10, 99, 100, 12345, 0.5, -2.5, 10**15])
        if self.rng.random() < 0.2:
            schema["multipleOf"] = self.rng.choice([1, 2, 3, 7, 10, 128])
        return schema

    def make_number(self, _):
        return self.limits({"type": "number"}, [-1000, -37.5, -1, -0.001, 0, 0.1, 0.25, 1, 3.14159, 9.99, 10, 100.5, 1e6, 1e-7])

    def make_boolean(self, _):
        return {"type": "boolean"}

    def make_null(self, _):
        return {"type": "null"}

    def make_enum(self, _):
        return {"enum": [self.value() for _ in range(self.rng.randrange(1, 5))]}

    def make_const(self, _):
        return {"const": self.value()}

    def make_any(self, _):
        return self.rng.choice([True, {}, {"type": "object"}, {"type": "array"}])

    def make_many(self, _):
        return {"type": self.rng.sample(["string", "integer", "null", "boolean", "array", "object", "number"], 2)}

    def make_object(self, depth):
        r = self.rng
        keys = r.sample(WORDS, r.randrange(5))
        schema = {"type": "object", "properties": {key: self.schema(depth - 1) for key in keys}, "required": [key for key in keys if r.random() < 0.6]}
        kind = r.randrange(4)
        if kind < 2:
            schema["additionalProperties"] = False
        elif kind == 2:
            schema["additionalProperties"] = self.schema(depth - 1)
        return schema

    def make_array(self, depth):
        r = self.rng
        schema = {"type": "array", "items": self.schema(depth - 1)}
        if r.random() < 0.4:
            schema["minItems"] = r.randrange(4)
        if r.random() < 0.4:
            schema["maxItems"] = schema.get("minItems", 0) + r.randrange(4)
        if r.random() < 0.2:
            schema["prefixItems"] = [self.schema(depth - 1) for _ in range(r.randrange(1, 3))]
            if r.random() < 0.5:
                schema["items"] = False
                schema.pop("minItems", None)
        return schema

    def make_anyOf(self, depth):
        return {"anyOf": [self.schema(depth - 1) for _ in range(self.rng.randrange(1, 4))]}

    def make_ref(self, _):
        return {"$ref": "#/$defs/" + self.rng.choice(self.names)}


def formats():
    """jsonschema's own judges, where they mean the formats of today, and Python's readers of times."""
    checker = jsonschema.FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])
    checker.checkers = dict(checker.checkers)
    checker.checkers["time"] = (lambda text: datetime.time.fromisoformat(text) is not None, ValueError)
    checker.checkers["date-time"] = (lambda text: datetime.datetime.fromisoformat(text) is not None, ValueError)
    return checker


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    rng = random.Random(seed)
    schemas = [Maker(rng).whole() for _ in range(count)]
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
    lines = "".join(json.dumps(schema) + "\n" for schema in schemas)
    run = subprocess.run([BUILD / "schema_samples", ROOT / "tests/fixtures/tokenizer", "4", "80", str(seed)], input=lines, capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"schema_samples ended with {run.returncode}: {run.stderr[-2000:]}")
    texts, refused, judge_formats = 0, {}, formats()
    for schema, line in zip(schemas, run.stdout.splitlines(), strict=True):
        answer = json.loads(line)
        if "error" in answer:
            # What no text fits is refused, and nothing else that this file makes.
            reason = answer["error"]
            if "no text fits" not in reason and "is more than there may be" not in reason and "no number of up to" not in reason:
                sys.exit(f"refused: {reason}\n{json.dumps(schema)}")
            refused[reason] = refused.get(reason, 0) + 1
            continue
        judge = jsonschema.Draft202012Validator(schema, format_checker=judge_formats)
        for text in answer["samples"]:
            texts += 1
            try:
                judge.validate(json.loads(text))
            except RecursionError:  # of the judge, at references that lead in a circle
                texts -= 1
            except (ValueError, jsonschema.ValidationError) as e:
                sys.exit(f"not valid: {text}\n{json.dumps(schema)}\n{str(e)[:1000]}")
    if texts < 2.5 * count:
        sys.exit(f"only {texts} texts of {count} schemas: {refused}")
    print(f"{texts} texts of {count} schemas are valid; {sum(refused.values())} schemas that nothing fits were refused")


if __name__ == "__main__":
    main()
