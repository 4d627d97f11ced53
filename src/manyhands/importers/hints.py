"""What to write in place of an unknown key: one phrase, from our keys, other tools' names and their translations."""

import difflib

from manyhands.config.keys import sections, table
from manyhands.importers.names import find_key, find_note
from manyhands.importers.recognize import describe_key


def nearest(path: str) -> str | None:
    """The key or section that another tool's name, or one with a typo, means; None if none is similar."""
    path = _normalize(path)
    if find_note(path):
        return None
    if theirs := find_key(path):
        return theirs
    parts = path.split(".")
    section, leaf = (parts[0] if len(parts) > 1 else ""), parts[-1]
    known = [*table(), *sections()]
    same_leaf = [key for key in known if key.rsplit(".", 1)[-1] == leaf]
    if same_leaf:  # a run's own key before one that only `submit` reads
        same_leaf = [key for key in same_leaf if section == "submit" or not key.startswith("submit.")] or same_leaf
        return difflib.get_close_matches(path, same_leaf, n=1, cutoff=0.0)[0]
    here = [key for key in table() if key.startswith(section + ".")] if section in sections() else []
    for choice in (here, known):  # a wrong key in an existing section: look there first
        leaves = {key.rsplit(".", 1)[-1]: key for key in reversed(choice)}
        typos = {name: _count_typos(leaf, name) for name in leaves}
        typos |= {name: 1 for name in leaves if choice is here and len(leaf) >= 4 and name.startswith(leaf)}
        best = min(typos, key=lambda name: typos[name], default="")
        if best and typos[best] <= max(1, len(leaf) // 4):
            return leaves[best]
    return None


def _normalize(path: str) -> str:
    return path.replace("-", "_").lower()


def _count_typos(first: str, second: str) -> int:
    """Damerau-Levenshtein distance: insertions, deletions, substitutions and swaps of neighbors."""
    counts = [[i + j if not i * j else 0 for j in range(len(second) + 1)] for i in range(len(first) + 1)]
    for i, one in enumerate(first, 1):
        for j, other in enumerate(second, 1):
            counts[i][j] = min(counts[i - 1][j] + 1, counts[i][j - 1] + 1, counts[i - 1][j - 1] + (one != other))
            if i > 1 and j > 1 and one == second[j - 2] and first[i - 2] == other:
                counts[i][j] = min(counts[i][j], counts[i - 2][j - 2] + 1)
    return counts[-1][-1]


def hint(path: str, value: object = None) -> str:
    """What to write in place of an unknown key (and its value): a phrase that follows the key's name."""
    path = _normalize(path)
    if note := find_note(path):
        return f": {note}"
    is_theirs = not find_key(path) and all(key.rsplit(".", 1)[-1] != path.rsplit(".", 1)[-1] for key in table())
    if is_theirs and (told := describe_key(path, value)):
        return f": {told}"
    near = nearest(path)
    if near is None:
        return "; `manyhands config` lists all keys"
    sentence = table()[near].sentence if near in table() else "It is a section."
    return f": here it is `{near}`. {sentence}" if find_key(path) else f": did you mean `{near}`? {sentence}"
