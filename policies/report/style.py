"""How the page looks: light and dark, on a screen and on paper."""

from __future__ import annotations

import base64
from hashlib import sha256

STYLE = """
:root { color-scheme: light dark; --ink: #1c1f24; --soft: #5c6470; --paper: #ffffff; --line: #d5d9df; --wash: #f4f6f8;
  --good: #10652f; --bad: #a3191f; --open: #7a5200; --s1: #fff1b8; --s2: #ffd27d; --s3: #ff9f5a; --s4: #e8553f;
  --dot: #7d8794; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #a2abb8; --paper: #14171c; --line: #363d48;
  --wash: #1d2229; --good: #6fd08c; --bad: #ff8a80; --open: #f0c060; --s1: #4a4016; --s2: #6e4f10; --s3: #93430f;
  --s4: #b3261e; --dot: #77818e; } }
@media print { :root { --ink: #000; --soft: #444; --paper: #fff; --line: #bbb; --wash: #fff; --good: #10652f;
  --bad: #a3191f; --open: #7a5200; --s1: #fff1b8; --s2: #ffd27d; --s3: #ff9f5a; --s4: #e8553f; --dot: #777; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } section { break-inside: avoid-page; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 62rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.3; margin: 0 0 .5rem; border-left: .4rem solid var(--line);
  padding-left: .8rem; overflow-wrap: anywhere; }
h1.good { border-color: var(--good); } h1.bad { border-color: var(--bad); } h1.open { border-color: var(--open); }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); padding-bottom: .2rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p { margin: .4rem 0; } .note { color: var(--soft); font-size: .9rem; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 600; }
.numbers td, .numbers th { font-variant-numeric: tabular-nums; }
.words td:nth-child(-n+2), .words th, .worst th, .worst td + td + td { white-space: nowrap; }
.worst { display: block; overflow-x: auto; }
.facts td:first-child, .numbers td:first-child { white-space: nowrap; }
.facts td:first-child, .findings td:first-child { color: var(--soft); }
code, pre, .answer, .numbers bdi { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
code { font-size: .85em; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--wash); padding: .7rem; font-size: .85rem;
  border: 1px solid var(--line); unicode-bidi: isolate; }
.answer { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--wash); border: 1px solid var(--line);
  padding: .8rem; line-height: 1.9; overflow: hidden; }
bdi { unicode-bidi: isolate; } .answer bdi { border-radius: 2px; cursor: help; }
.s1 { background: var(--s1); } .s2 { background: var(--s2); } .s3 { background: var(--s3); }
.s4 { background: var(--s4); color: #fff; }
.lost { text-decoration: underline wavy 1px; text-underline-offset: 3px; }
.legend bdi { padding: .1rem .5rem; margin-right: .3rem; border: 1px solid var(--line); font-size: .85rem;
  color: var(--ink); } .legend .s4 { color: #fff; }
.pass, .holds { color: var(--good); font-weight: 600; }
.reject, .withheld, .fails { color: var(--bad); font-weight: 600; }
.inconclusive { color: var(--open); font-weight: 600; }
svg { width: 100%; max-width: 42.5rem; height: auto; display: block; margin: .4rem 0; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); } svg .label, svg .end { text-anchor: end; }
svg .middle { text-anchor: middle; } svg .start { text-anchor: start; }
svg circle { fill: var(--dot); fill-opacity: .45; } svg line.this { stroke: var(--bad); stroke-width: 2; }
svg text.this { fill: var(--ink); font-weight: 600; }
summary { cursor: pointer; color: var(--soft); }
"""

CSP = (
    "default-src 'none'; style-src 'sha256-"
    + base64.b64encode(sha256(STYLE.encode()).digest()).decode()
    + "'; base-uri 'none'; form-action 'none'"
)
"""The page's own policy: nothing but its one style sheet, by its hash. No script, image, font, frame or form."""
