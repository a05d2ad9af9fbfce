"""The table of docs/metrics.md: every metric that proxies and workers have, as they define it.

`python -m tests.helm.metrics_page` writes it anew; a test fails when it is stale.
"""

from __future__ import annotations

from pathlib import Path

from policies.settings import Settings
from proxy.metrics import Metrics
from proxy.outage import Outage
from tests.support.valkey import Valkey
from verifier_pool import metrics
from verifier_pool.link.exposition import label_name, metric_name
from verifier_pool.link.meters import Family, Meters
from verifier_pool.link.processes import watch_process

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
BEGIN = "<!-- Made by `python -m tests.helm.metrics_page` from the program's definitions. -->\n"
END = "<!-- Until here. -->\n"
ANYBODY, ADMINS, WORKER = "proxy", "proxy, with token", "worker"

_REFERENCE = {"kind": "vllm_http", "url": "http://127.0.0.1:9"}
SETTINGS = Settings.model_validate(
    {
        "models": {"m": {"reference": _REFERENCE, "second_reference": _REFERENCE, "second_profile": "unread"}},
        "backends": [{"name": "b", "url": "http://127.0.0.1:9", "model": "m"}],
        "webhook": {"url": "https://hooks.example.com", "secret": "whsec_AAAA"},
    }
)


def families() -> list[tuple[str, Family]]:
    """All metrics, with who shows them."""
    with Valkey() as valkey:
        proxy = Metrics()
        proxy.watch(list)
        proxy.count_flights(int)
        proxy.count_unasked(int)
        proxy.count_unpublished(int)
        proxy.watch_store(Outage())
        public = {family.name for family in proxy.read()}
        proxy.start(valkey.url, SETTINGS)
        try:
            found = [(ANYBODY if each.name in public else ADMINS, each) for each in proxy.read(private=True)]
        finally:
            proxy.close()
    worker = Meters()
    watch_process(worker, "worker")
    found += [(WORKER, each) for each in [*metrics.METERS.read(), *worker.read()]]
    return found


def rows() -> list[tuple[str, str, str, str, str, str]]:
    """Name in Prometheus, kind, unit, labels, who shows it, meaning."""
    merged: dict[str, tuple[Family, list[str]]] = {}
    for who, family in families():
        name = metric_name(family.name, family.unit, family.kind)
        known = merged.setdefault(name, (family, []))[1]
        if who not in known:
            known.append(who)
    return [
        (
            name,
            family.kind,
            family.unit,
            ", ".join(f"`{label}`" for label in sorted(map(label_name, family.labels))),
            "; ".join(who),
            family.help,
        )
        for name, (family, who) in sorted(merged.items())
    ]


def table() -> str:
    """The table, in Markdown."""
    lines = ["| metric | kind | unit | labels | shown by | meaning |", "|---|---|---|---|---|---|"]
    lines += [f"| `{name}` | {' | '.join(rest)} |" for name, *rest in rows()]
    return "\n".join(lines) + "\n"


def page() -> str:
    """What the committed page should hold."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
