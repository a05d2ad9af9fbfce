"""The table of all values in the chart's README: names and defaults from `values.yaml`, what they are from the comments
there, what they may be from the schema. Those of `settings` are the program's.

`python -m tests.helm.table` writes it anew; a test fails when it is stale.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml

from tests.helm import schema, settings_table
from tests.helm.settings_schema import LARGEST

VALUES = schema.CHART / "values.yaml"
README = schema.CHART / "README.md"
MARK = "<!-- Made by `python -m tests.helm.table`: change values.yaml instead. -->"

_HEAD = ("| value | default | may be | what it is |", "|---|---|---|---|")

_WHOLE = frozenset({"settings", "files"})
"""Values that are rows as they are, whatever is in them."""

_SETTINGS = "The program's own; `NAME` is a name that you give, `N` a position in a list. Secrets are no values."

# What means the same wherever it stands, said once.
_COMMON = {
    "replicas": "pods",
    "enabled": "whether there are any",
    "env": "more variables, as Kubernetes has them; none with a secret in the open",
    "resources": "requests and limits",
    "resources.requests": "what a pod is given",
    "resources.limits": "what it may use at most",
    "podAnnotations": "more annotations of the pods",
    "podLabels": "more labels of the pods",
    "nodeSelector": "where they run",
    "tolerations": "taints they bear",
    "affinity": "Kubernetes' own",
    "priorityClassName": "Kubernetes' own",
    "startupSeconds": "how long a start may take before the pod counts as broken",
    "annotations": "more annotations",
    "labels": "more labels",
    "repository": "name of the image",
    "tag": "its tag",
    "digest": "its digest, which wins over the tag",
    "pullPolicy": "when it is pulled",
    "create": "whether the chart makes it",
    "existingSecretKey": "the key in that Secret",
    "minReplicas": "fewest pods",
    "maxReplicas": "most pods",
    "size": "room on the claim",
    "storageClass": "its class; the cluster's default when empty",
    "maxmemory": "where it refuses more",
    "type": "of the Service",
    "port": "where it listens",
    "service.port": "of the Service",
    "serviceMonitor.enabled": "whether there is one",
    "rules.labels": "those by which your Prometheus finds them",
    "name": "its name, when it is not the release's",
    "waiting": "generations without a verdict for each pod",
    "scaleDownSeconds": "how long fewer must have been enough",
    "interval": "between two scrapes",
    "nameOverride": "instead of the chart's name in labels and names",
    "fullnameOverride": "instead of the release's name in names",
    "imagePullSecrets": "for all pods",
    "commonLabels": "labels of everything",
    "existingClaim": "a claim with them",
    "mountPath": "where pods find it",
    "maxUnavailable": "pods of one Deployment that may be away at once",
}


@dataclass(frozen=True)
class Row:
    """One value: its dotted name, its default, the comment about it and what it may be."""

    name: str
    default: Any
    comment: str
    kind: str


def sections() -> dict[str, tuple[str, list[Row]]]:
    """Rows by the top-level key that they are under, with the comment about it."""
    text = VALUES.read_text(encoding="utf-8")
    lines = text.splitlines()
    found = {}
    tree = yaml.compose(text)
    assert isinstance(tree, yaml.MappingNode)
    whole = schema.build()
    for key, node in tree.value:
        name = str(key.value)
        rows = list(_rows(name, node, lines, whole["properties"][name]))
        found[name] = (_comment(lines, key.start_mark.line), rows)
    return found


def _rows(name: str, node: yaml.Node, lines: list[str], form: dict[str, Any]) -> Iterator[Row]:
    if isinstance(node, yaml.MappingNode) and not node.flow_style and name not in _WHOLE:
        for key, inner in node.value:
            below = f"{name}.{key.value}"
            rows = list(_rows(below, inner, lines, form.get("properties", {}).get(key.value, {})))
            yield from _described(rows, _comment(lines, key.start_mark.line))
        return
    line = lines[node.start_mark.line]
    default = None if name in _WHOLE else yaml.safe_load(yaml.serialize(node))
    own = line[node.end_mark.column :] if node.end_mark.line == node.start_mark.line else ""
    trailing = own.partition("# ")[2].strip()
    yield Row(name, default, trailing, _kind(form))


def _described(rows: list[Row], comment: str) -> list[Row]:
    """Rows with the comment about the key that they are under: the first of them that has none of its own tells it."""
    silent = next((at for at, row in enumerate(rows) if not row.comment), None)
    if comment and silent is not None:
        rows[silent] = replace(rows[silent], comment=comment)
    return rows


def _comment(lines: list[str], at: int) -> str:
    """The comment right above a line, without examples, which are indented more."""
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    found: list[str] = []
    for line in reversed(lines[:at]):
        if not line.startswith(f"{indent}# "):
            break
        text = line[len(indent) + 2 :]
        if not text.startswith(" "):
            found.insert(0, text)
    return " ".join(found).removesuffix(":")


def _kind(form: dict[str, Any]) -> str:
    if "enum" in form:
        return " \\| ".join(f"`{word}`" for word in form["enum"])
    if "anyOf" in form:
        return " or ".join(dict.fromkeys(_kind(one) for one in form["anyOf"] if one.get("type") != "null"))
    kind = str(form.get("type", "any"))
    if form.get("maximum") == LARGEST:
        form = {word: value for word, value in form.items() if word != "maximum"}
    if "minimum" in form or "maximum" in form or "exclusiveMinimum" in form:
        signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
        return f"{kind} " + ", ".join(f"{sign} {form[word]}" for word, sign in signs.items() if word in form)
    return {"object": "map", "array": "list", "boolean": "true or false", "string": "text"}.get(kind, kind)


def comment_of(row: Row) -> str:
    """What a row says; empty where nothing is known."""
    parts = row.name.split(".")
    for start in range(len(parts)):
        if (
            not row.comment
            and not row.name.startswith("settings.")
            and (common := _COMMON.get(".".join(parts[start:])))
        ):
            return common
    return row.comment


def text() -> str:
    """What the README should hold from the mark on."""
    every = sections()
    single = [(rows[0], about) for name, (about, rows) in every.items() if [row.name for row in rows] == [name]]
    parts = [MARK, "", *_table(single)]
    for name, (about, rows) in every.items():
        if [row.name for row in rows] != [name]:
            parts += ["", f"### {name}", "", *([about, ""] if about else []), *_table([(row, "") for row in rows])]
    parts += ["", "### settings", "", _SETTINGS, "", *_HEAD, *(line(*row) for row in settings_table.rows())]
    parts += ["", "What is no value, and what decides it:", "", "| setting | decided by |", "|---|---|"]
    parts += [f"| `{path}` | {why} |" for path, why in settings_table.elsewhere()]
    return "\n".join(parts) + "\n"


def _table(rows: list[tuple[Row, str]]) -> list[str]:
    return [*_HEAD, *(_line(row.name, row.default, row.kind, about or comment_of(row)) for row, about in rows)]


def line(name: str, default: Any, form: dict[str, Any], said: str) -> str:
    """The row of one setting, by its schema."""
    return _line(name, default, _kind(form), said)


def _line(name: str, default: Any, kind: str, said: str) -> str:
    shown = "" if default is None else f"`{json.dumps(default, ensure_ascii=False)}`"
    return f"| `{name}` | {shown} | {kind} | {said.replace('|', chr(92) + '|')} |"


def readme() -> str:
    """The whole README, with the part by hand as it is."""
    by_hand = README.read_text(encoding="utf-8").partition(MARK)[0]
    return by_hand + text()


if __name__ == "__main__":
    README.write_text(readme(), encoding="utf-8")
