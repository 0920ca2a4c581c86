"""How the page of answers looks, and the rules by which its radio buttons filter it. Nothing here is anyone else's text."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --back: #fbfaf8; --card: #fff; --text: #1d1c1a; --soft: #6a675f; --line: #dfdcd4;
  --accent: #1f5f99; --right: #1c6b3c; --wrong: #a3341f; --quote: #f3f1ec; }
@media (prefers-color-scheme: dark) {
  :root { --back: #161615; --card: #1f1f1d; --text: #ebe9e4; --soft: #a5a198; --line: #3a3935;
    --accent: #7db7ee; --right: #74cf95; --wrong: #f0937e; --quote: #292826; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 56rem; background: var(--back); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
input { position: fixed; top: 0; opacity: 0; pointer-events: none; }
h1 { margin: 0; font-size: 1.4rem; }
header p, .meta, .who, small, caption { color: var(--soft); font-size: .85rem; }
header p { margin: .2rem 0 1rem; }
nav { position: sticky; top: 0; padding: .5rem 0; background: var(--back); border-bottom: 1px solid var(--line); z-index: 1; }
nav div { display: flex; gap: .4rem; overflow-x: auto; padding: .2rem; }
label { flex: none; padding: .3rem .8rem; border: 1px solid var(--line); border-radius: 1rem; cursor: pointer;
  font-size: .9rem; max-width: 16rem; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.figures { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
caption { text-align: left; caption-side: bottom; padding-top: .3rem; }
th, td { padding: .3rem .7rem .3rem 0; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
th:first-child { text-align: left; max-width: 14rem; overflow-wrap: break-word; }
td small { display: block; white-space: nowrap; }
article { margin: 1rem 0; padding: .8rem 1rem; background: var(--card); border: 1px solid var(--line);
  border-left: .3rem solid var(--wrong); border-radius: .4rem; }
article.right { border-left-color: var(--right); }
.meta { display: flex; flex-wrap: wrap; gap: 0 .6rem; margin: 0; }
.meta strong { color: var(--wrong); }
.right .meta strong { color: var(--right); }
h2 { margin: .3rem 0 .6rem; font-size: 1.05rem; white-space: pre-wrap; }
dl { display: grid; grid-template-columns: 5.5rem 1fr; gap: .2rem .6rem; margin: 0 0 .6rem; }
dt { color: var(--soft); }
dd { margin: 0; white-space: pre-wrap; }
summary { cursor: pointer; color: var(--accent); }
.who { margin: .8rem 0 .2rem; }
pre { margin: 0; padding: .6rem; max-height: 24rem; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere;
  background: var(--quote); border-radius: .3rem; font: .85rem/1.45 ui-monospace, monospace; }
pre.model { border-left: .2rem solid var(--accent); }
pre.error { color: var(--wrong); }
.none { display: none; color: var(--soft); }
"""

_CHOSEN = (
    "{chosen} ~ nav label[for={name}] {{ background: var(--text); color: var(--back); border-color: var(--text); }}\n"
)
_FOCUS = "#{name}:focus-visible ~ nav label[for={name}] {{ outline: 2px solid var(--accent); outline-offset: 2px; }}\n"


def filter_rules(sets: int) -> str:
    """Rules that hide what is not chosen, for so many sets: their articles have the class `set-N`, their button the id
    `of-N`; verdicts are the classes `right` and `wrong`, the buttons `is-right` and `is-wrong`."""
    buttons = ["is-all", "is-right", "is-wrong", "of-all", *(f"of-{number}" for number in range(sets))]
    rules = [_CHOSEN.format(chosen=f"#{name}:checked", name=name) + _FOCUS.format(name=name) for name in buttons]
    rules += [
        f"#is-{chosen}:checked ~ main article.{other} {{ display: none; }}\n"
        for chosen, other in (("right", "wrong"), ("wrong", "right"))
    ]
    rules += [
        f"#of-{number}:checked ~ main article:not(.set-{number}) {{ display: none; }}\n" for number in range(sets)
    ]
    return "\n" + "".join(rules) + _empty_rules(sets)


def _empty_rules(sets: int) -> str:
    """Say that nothing is left where no article has both of what is chosen."""
    rules = ["main:not(:has(article)) .none { display: block; }\n"]
    for verdict in ("right", "wrong"):
        rules.append(f"#is-{verdict}:checked ~ main:not(:has(article.{verdict})) .none {{ display: block; }}\n")
        rules += [
            f"#is-{verdict}:checked ~ #of-{number}:checked ~ main:not(:has(article.{verdict}.set-{number})) .none "
            "{ display: block; }\n"
            for number in range(sets)
        ]
    return "".join(rules)
