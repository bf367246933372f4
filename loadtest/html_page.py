"""A report's page: its look, and the pieces that reports are put together of.

One HTML file that needs nothing else: no script, no font, no picture from outside. Light or dark
as the reader's system is, narrow or wide, and on paper. All texts given here are escaped here,
except those whose names say ``html``.
"""

from collections.abc import Mapping, Sequence
from html import escape

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1b1b1f; --dim: #5c5c66; --faint: #dcdce2; --panel: #f6f6f8;
  --link: #0060a0; --warn: #8a4b00; --warn-paper: #fff5e0; --good: #00694d; --bad: #b03a00;
  --s0: #0072b2; --s1: #d55e00; --s2: #009e73; --s3: #b65c92; --s4: #b98300; --s5: #3b9bd6;
  --s6: #6b6b70;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --paper: #16171a; --ink: #e6e6ea; --dim: #a0a0aa; --faint: #3a3b42; --panel: #1f2024;
    --link: #79bdf0; --warn: #ffc970; --warn-paper: #33270f; --good: #4fd0a5; --bad: #ff9a5c;
    --s0: #4aa8e8; --s1: #ff8a3d; --s2: #2fc79a; --s3: #e08bc0; --s4: #e6b23c; --s5: #9bd4ff;
    --s6: #b4b4bc;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 68rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-bottom: .3rem;
  border-bottom: 1px solid var(--faint); }
h3 { font-size: 1rem; margin: 1.75rem 0 .5rem; }
p { margin: .5rem 0; max-width: 48rem; }
a { color: var(--link); }
.dim { color: var(--dim); }
.verdict { font-size: 1.1rem; font-weight: 600; margin: 1rem 0; max-width: none; }
.warning { border-left: 4px solid var(--warn); background: var(--warn-paper); padding: .5rem .8rem;
  margin: .75rem 0; max-width: none; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem;
  margin: 1rem 0; padding: 0; list-style: none; }
.tiles li { background: var(--panel); border: 1px solid var(--faint); border-radius: 6px;
  padding: .6rem .8rem; }
.tiles b { display: block; font-size: 1.35rem; line-height: 1.3;
  font-variant-numeric: tabular-nums; }
.tiles span { display: block; color: var(--dim); font-size: .82rem; }
.scroll { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--dim); padding-bottom: .3rem; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--faint);
  white-space: nowrap; }
th { font-weight: 600; color: var(--dim); }
thead th { vertical-align: bottom; border-bottom-color: var(--dim); }
th:first-child, td:first-child, .left { text-align: left; padding-left: 0; color: var(--ink); }
td.left, th.left { padding-left: .6rem; }
tbody.group tr:last-child > * { border-bottom-color: var(--dim); }
tbody tr:hover { background: var(--panel); }
.good { color: var(--good); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(26rem, 100%), 1fr));
  gap: 1.25rem 1.5rem; margin: 1rem 0; align-items: start; }
.plots figure { margin: 0; min-width: 0; break-inside: avoid; }
svg.plot { display: block; width: 100%; height: auto; max-width: 36rem; stroke-linejoin: round; }
svg.plot text { font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0;
  margin: .75rem 0; font-size: .88rem; }
svg.mark { width: 28px; height: 12px; vertical-align: -1px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: .75rem 0; }
dt { color: var(--dim); }
dd { margin: 0; overflow-wrap: anywhere; }
pre { background: var(--panel); border: 1px solid var(--faint); border-radius: 6px;
  padding: .7rem .9rem; overflow-x: auto; font-size: .85rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
ul.words { padding-left: 1.2rem; max-width: 52rem; }
ul.words li { margin: .2rem 0; }
details { margin: .75rem 0; }
summary { cursor: pointer; color: var(--link); }
nav { margin: 1rem 0; }
nav a { margin-right: 1.2rem; }
@media (max-width: 40rem) {
  body { padding: 1.25rem .9rem 3rem; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .4rem; }
}
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  .plots { grid-template-columns: 1fr 1fr; }
  .scroll { overflow: visible; }
  details::details-content { content-visibility: visible; height: auto; }
  h2, h3 { break-after: avoid; }
  tr { break-inside: avoid; }
}
"""

DEFINITIONS = {
    "Latency figures": "Only of requests that ended well. Percentiles interpolate linearly between"
    " the two nearest values.",
    "TTFT": "Time to first token: from when a request was sent to the first chunk of its answer.",
    "E2E": "From when a request was sent to the last chunk of its answer.",
    "TPOT": "Time per output token after the first: (E2E − TTFT) ÷ (output tokens − 1), one value a"
    " request, output tokens as the server counts them. Answers of one token have none, and meet"
    " any TPOT objective.",
    "ITL": "Inter-token latency: the time between a chunk and the next, all gaps of all requests"
    " together. A chunk may hold several tokens.",
    "Throughput": "Requests that ended well, and their tokens, over the duration: from the start of"
    " the run to the end of the last answer.",
    "Goodput": "Requests that met all objectives of their class (SLO), over the duration.",
    "Attainment": "Share of requests that met all objectives. A request that failed met none. One"
    " that the load test itself cut off does not count.",
    "Client lag": "How much later than planned a request was sent. It is the load test's own"
    " lateness and no part of any latency.",
}
"""In our words, what ``vllm bench serve`` computes; it has no attainment and no lag."""


def page(title: str, *body_html: str) -> str:
    """The whole file."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(filter(None, body_html))
        + "\n</body>\n</html>\n"
    )


def table(
    head: Sequence[str],
    groups_html: Sequence[Sequence[Sequence[str]]],
    caption: str = "",
    left: Sequence[int] = (),
) -> str:
    """Rows in groups, a line between the groups; cells are HTML. ``left``: columns of words."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(
            f"<{tag}{' class=left' if place in left else ''}>{cell}</{tag}>"
            for place, cell in enumerate(cells)
        ) + "</tr>"  # fmt: skip

    bodies = "".join(
        f"<tbody class=group>{''.join(row(cells, 'td') for cells in group)}</tbody>\n"
        for group in groups_html
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    header = row([escape(name) for name in head], "th")
    return f"<div class=scroll><table>{title}<thead>{header}</thead>\n{bodies}</table></div>"


def facts(values: Mapping[str, str]) -> str:
    """Names and values, a line each; empty values are left out."""
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>"
        for name, value in values.items()
        if value
    )
    return f"<dl>{items}</dl>"


def tiles(values: Mapping[str, tuple[str, str]]) -> str:
    """The few figures that matter: name → figure, and what it says in small."""
    items = "".join(
        f"<li><span>{escape(name)}</span><b>{escape(figure)}</b><span>{escape(note)}</span></li>"
        for name, (figure, note) in values.items()
    )
    return f"<ul class=tiles>{items}</ul>"


def warnings(sentences: Sequence[str]) -> str:
    """Each in a box."""
    return "".join(f'<p class="warning">{escape(sentence)}</p>' for sentence in sentences)


def bullets(sentences: Sequence[str]) -> str:
    """A list of sentences."""
    return "<ul class=words>" + "".join(f"<li>{escape(s)}</li>" for s in sentences) + "</ul>"


def plots(*svgs_html: str) -> str:
    """Side by side where there is room."""
    return "<div class=plots>" + "".join(f"<figure>{svg}</figure>" for svg in svgs_html) + "</div>"


def details(summary: str, body_html: str) -> str:
    """Folded away on a screen, shown on paper."""
    return f"<details><summary>{escape(summary)}</summary>{body_html}</details>"


def definitions() -> str:
    """What each figure means."""
    return (
        "<h2>Definitions</h2><p>Figures are computed as <code>vllm bench serve</code> computes"
        f" them.</p>{facts(DEFINITIONS)}"
    )


def reproduce(command: str) -> str:
    """The command line, if it is known."""
    if not command:
        return ""
    return f"<h2>How to reproduce</h2><pre>{escape(command)}</pre>"
