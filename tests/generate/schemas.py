"""JSON schemas for tests: that can be enforced, that cannot, and that are meant to do harm."""

from typing import Any

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def of(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, **more}


def closed(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    needed = list(properties) if required is None else required
    return of("object", properties=properties, required=needed, additionalProperties=False)


SCHEMAS: list[dict[str, Any]] = [
    of("object"), of("string", maxLength=5), of("integer"), of("boolean"), of("null"),
    of("array", items=of("integer"), maxItems=4), of("array", maxItems=2, items=of("string", maxLength=3)),
    of("array", minItems=2, maxItems=3, items=of("boolean")), of("array", minItems=1, maxItems=1),
    of("array", prefixItems=[of("integer"), of("string", maxLength=2)], items=False, minItems=2),
    of("integer", minimum=3, maximum=7), of("integer", exclusiveMinimum=-3, exclusiveMaximum=1),
    of("integer", multipleOf=5, minimum=0, maximum=100), of("number", minimum=-1.5, maximum=2.5),
    of("number", exclusiveMinimum=0, maximum=1), of("string", minLength=2, maxLength=4),
    of("string", pattern="^[a-z]{2,4}-[0-9]+$", maxLength=12), of("string", pattern="^(red|green)$"),
    of("string", pattern="^\\d{3}-\\d{4}$"), of("string", format="date"), of("string", format="date-time"),
    of("string", format="time"), of("string", format="ipv4"), of("string", format="uuid"),
    {"enum": ["a", "b", 3, None, True]}, {"enum": [[1, 2], {"x": 1}]}, {"const": "only this"},
    {"const": {"a": [1, "é"]}},
    {"enum": ["quote \" and \\ and \n", "größe"]}, {"anyOf": [of("integer"), of("boolean")]},
    {"anyOf": [closed(a=of("integer")), closed(b=of("null"))]}, {"oneOf": [of("boolean"), of("null")]},
    {"allOf": [closed(a=of("integer", minimum=2)), of("object", maxProperties=3)]},
    {"type": ["string", "null"], "maxLength": 3}, {"type": ["integer", "boolean"]},
    PERSON, TREE, closed(), closed(a=PERSON, b=of("array", items=PERSON, maxItems=2)),
    of("number", minimum=0, maximum=9),
    closed(["a"], a=of("integer"), b=of("string", maxLength=3)), closed([], a=of("boolean"), b=of("null")),
    closed(a=closed(b=closed(c=closed(d=of("integer"))))),
    of("object", properties={"a": of("integer")}, required=["a", "z"], additionalProperties=of("boolean"),
       maxProperties=4),
    of("object", additionalProperties=of("integer"), maxProperties=2),
    of("object", patternProperties={"^x": of("integer")}, additionalProperties=False, maxProperties=2),
    of("object", properties={"kind": {"const": "circle"}, "r": of("integer")}, required=["kind", "r"]),
    {"$defs": {"c": {"enum": ["r", "g"]}}, **closed(c={"$ref": "#/$defs/c"}, d={"$ref": "#/$defs/c"})},
    {"definitions": {"p": PERSON}, **closed(who={"$ref": "#/definitions/p"})},
    closed(items=of("array", minItems=1, maxItems=2, items={"anyOf": [PERSON, of("null")]})),
    closed(**{"key with \"quotes\"": of("integer"), "größe": of("boolean")}),
    {"title": "T", "description": "d", "$schema": "https://json-schema.org/draft/2020-12/schema",
     **closed(a=of("null"))},
    closed(a=of("integer", default=3, examples=[4], description="d", title="t")),
    closed(lat=of("number", minimum=-90, maximum=90), lon=of("number", minimum=-180, maximum=180)),
    closed(tags=of("array", items=of("string", enum=["x", "y"]), maxItems=3), n={"type": ["number", "null"]}),
]  # fmt: skip

UNSUPPORTED = [
    (of("array", uniqueItems=True), "uniqueItems"),
    ({"not": of("string")}, "not"),
    ({"if": of("string"), "then": {}, "else": {}}, "if"),
    (of("string", format="color"), "color"),
    (of("string", pattern="(?=a)b"), "look"),
    (of("string", pattern="("), "unclosed"),
    (of("strin"), "strin"),
    ({"$ref": "http://127.0.0.1:9/schema"}, "127.0.0.1"),
    ({"$ref": "#/nowhere"}, "nowhere"),
    (of("array", contains=of("integer")), "contains"),
]


def attacks() -> dict[str, Any]:
    deep: dict[str, Any] = of("string")
    for _ in range(200):
        deep = closed(a=deep)
    bomb = {"allOf": [{"anyOf": [closed([], **{f"p{i}": {"const": j}}) for j in range(6)]} for i in range(12)]}
    return {
        "nested": deep,
        "repetitions": of("string", pattern="^((a{1000}){1000}){1000}$"),
        "ranges": of("string", pattern="^(([a-z]{1,999}){1,999})+$"),
        "product": bomb,
        "large": {"enum": [f"value number {i}" for i in range(30_000)]},
        "wide": closed([], **{f"p{i}": of("integer") for i in range(3_000)}),
        "endless reference": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 2}}},
        "long pattern": of("string", pattern="(a|b)*" * 2_000),
        "lookalikes": {"anyOf": [of("string", pattern=f"a.*{i}.*b{i}.*c") for i in range(400)]},
        "quadratic": of("string", pattern=".*a.{0,300}b.{0,300}c.{0,300}d"),
        "many items": of("array", minItems=10**6, maxItems=10**9, items=of("string", minLength=10**6)),
        "loop": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    }  # fmt: skip
