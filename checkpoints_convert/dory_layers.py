"""The layers of a config.json of Dory: letters, the three sections and the rotary bases, from either dialect's keys."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

LETTER_OF = {"sliding_attention": "S", "full_attention": "*", "mlp": "-"}
BLOCK = "S-S-S-*-"
"""The order both ports start from where a file names none."""
TRANSFORMERS_BASES = {"S": 10_000.0, "*": 10_000_000.0}
VLLM_BASE = 10_000.0
_ROPE_KEYS = {"rope_theta", "rope_theta_2", "rope_profile_layers"}

Table = Mapping[str, Any]


class Layers(NamedTuple):
    """The three strings, and the rotary base of each attention letter."""

    prelude: str
    core: str
    coda: str
    bases: dict[str, float]


def read_layers(data: Table, ports: set[str], problems: list[str]) -> Layers:
    """The layers of a table without nulls; what is wrong with it goes to `problems`, and the result is void then."""
    known = len(problems)
    letters, unit = _letters(data, ports, problems)
    if len(problems) > known:
        return Layers("", "", "", {})
    prelude, core, coda = _sections(data, letters, unit, ports, problems)
    return Layers(prelude, core, coda, _bases(data, letters, ports, problems))


def _letters(data: Table, ports: set[str], problems: list[str]) -> tuple[str, int]:
    """The letters of all layers, and how many sub-layers one layer of the file's counts is."""
    found = {}
    if "hybrid_layer_pattern" in data:
        found["hybrid_layer_pattern"] = _pattern(data["hybrid_layer_pattern"], problems)
    if "layer_types" in data:
        found["layer_types"] = _types(data["layer_types"], problems)
    if not found:
        return _default_letters(data, ports, problems)
    if len(set(found.values())) > 1:
        problems.append(" contradicts ".join(f"{key}={data[key]!r}" for key in found))
    key, letters = next(iter(found.items()))
    blocks = "layer_types" in data and "mlp" not in data["layer_types"]
    count = data.get("num_hidden_layers")
    if count is None:
        return letters, 2 if blocks and len(found) == 1 else 1
    unit = 2 if blocks and type(count) is int and 2 * count == len(letters) else 1
    if type(count) is not int or unit * count != len(letters):
        problems.append(f"num_hidden_layers={count!r} contradicts {key}={data[key]!r}, which has {len(letters)} layers")
    return letters, unit


def _default_letters(data: Table, ports: set[str], problems: list[str]) -> tuple[str, int]:
    unit = 1 if ports == {"vllm"} else 2
    count = data.get("num_hidden_layers", 72 // unit)
    if len(ports) > 1:
        problems.append("neither hybrid_layer_pattern nor layer_types says what the layers are: state one")
    elif type(count) is not int or count < 1:
        problems.append(f"num_hidden_layers={count!r} is no count of layers")
    elif unit == 1:
        if count % len(BLOCK):
            problems.append(f"num_hidden_layers={count} is no multiple of 8: state hybrid_layer_pattern")
        return BLOCK * (count // len(BLOCK)), 1
    else:
        return (BLOCK * count)[: 2 * count], 2
    return "", 1


def _pattern(pattern: Any, problems: list[str]) -> str:
    if not isinstance(pattern, str) or not pattern or set(pattern) - set("S*-"):
        problems.append(f"hybrid_layer_pattern={pattern!r} is not made of S, * and -")
        return ""
    return pattern


def _types(kinds: Any, problems: list[str]) -> str:
    """Letters of `layer_types`, with or without its "mlp" entries."""
    known = [kind for kind in kinds if isinstance(kind, str) and kind in LETTER_OF] if isinstance(kinds, list) else []
    if not known or len(known) < len(kinds):
        problems.append(f"layer_types={kinds!r} is not a list of {', '.join(LETTER_OF)}")
        return ""
    letters = "".join(LETTER_OF[kind] for kind in known)
    if "-" not in letters:
        return "".join(f"{letter}-" for letter in letters)
    if not re.fullmatch("([S*]-)+", letters):
        problems.append(f"layer_types={kinds!r} does not alternate attention and mlp")
    return letters


def _sections(data: Table, letters: str, unit: int, ports: set[str], problems: list[str]) -> tuple[str, str, str]:
    total = len(letters) // unit
    starts = {"vllm": 0, "transformers": 8}
    counts = {}
    for key in ("n_input_layers", "n_output_layers", "n_recurrent_layers"):
        choices = {starts[port] for port in ports}
        if key not in data and key != "n_recurrent_layers" and len(choices) > 1:
            problems.append(f"{key} is absent and the ports differ in its default (0 in vllm, 8 in transformers)")
        default = total - sum(counts.values()) if key == "n_recurrent_layers" else max(choices)
        counts[key] = data.get(key, default)
        if type(counts[key]) is not int or counts[key] < 0:
            problems.append(f"{key}={counts[key]!r} is no count of layers")
            return "", "", ""
    told = " + ".join(f"{key}={count}" for key, count in counts.items())
    first, last, middle = (unit * count for count in counts.values())
    if first + middle + last != len(letters):
        problems.append(f"{told} contradicts the {total} layers there are")
    sections = letters[:first], letters[first : first + middle], letters[first + middle :]
    if "layer_types" in data and not all(re.fullmatch("([S*]-)*", section) for section in sections):
        problems.append(f"{told} cuts a pair of attention and mlp in two, which layer_types can't tell")
    return sections


def _bases(data: Table, letters: str, ports: set[str], problems: list[str]) -> dict[str, float]:
    """Rotary base of each attention letter; one that the model lacks gets a base too."""
    vllm = _vllm_bases(data, letters, problems)
    transformers = _transformers_bases(data, letters, problems)
    bases = {}
    for letter, usual in TRANSFORMERS_BASES.items():
        told = dict([*vllm.get(letter, {}).items(), *transformers.get(letter, {}).items()])
        choices = set(told.values()) or {{"vllm": VLLM_BASE, "transformers": usual}[port] for port in ports}
        if len(choices) > 1 and letter in letters:
            found = " contradicts ".join(f"{key}={value!r}" for key, value in told.items())
            problems.append(found or f"the rotary base of {letter!r} layers is absent and the ports differ: state it")
        bases[letter] = float(next(iter(told.values()), usual if len(choices) > 1 else min(choices)))
    return bases


def _vllm_bases(data: Table, letters: str, problems: list[str]) -> dict[str, dict[str, float]]:
    """For each letter the key that gives its base, and the base: profile 1 is `rope_theta`, 2 `rope_theta_2`."""
    if any(_per_layer(data, "no_rope_layers", [0] * len(letters), problems)):
        problems.append(f"no_rope_layers={data['no_rope_layers']!r} is not supported: all layers need positions")
    if not _ROPE_KEYS & data.keys():
        return {}
    first = data.get("rope_theta", VLLM_BASE)
    thetas = {1: ("rope_theta", first), 2: ("rope_theta_2", data.get("rope_theta_2", first))}
    profiles = _per_layer(data, "rope_profile_layers", [1] * len(letters), problems)
    wrong = [f"{key}={base!r} is no positive number" for key, base in thetas.values() if not _positive(base)]
    if any(profile not in (1, 2) for profile in profiles):
        wrong.append(f"rope_profile_layers={profiles!r} may hold 1 and 2 alone")
    problems += wrong
    if wrong:
        return {}
    # a letter without layers would be of the profile that it has in every known checkpoint
    found = {"S": dict([thetas[1]]), "*": dict([thetas[2]])}
    for kind in set(letters) - {"-"}:
        found[kind] = dict(thetas[profile] for letter, profile in zip(letters, profiles, strict=True) if letter == kind)
    return found


def _per_layer(data: Table, key: str, default: list[int], problems: list[str]) -> list[Any]:
    values = data.get(key, default)
    if isinstance(values, list) and len(values) == len(default):
        return values
    problems.append(f"{key}={values!r} is not one number for each of the {len(default)} layers")
    return default


def _transformers_bases(data: Table, letters: str, problems: list[str]) -> dict[str, dict[str, float]]:
    if "rope_parameters" not in data:
        return {}
    found, table = {}, data["rope_parameters"]
    for kind, letter in LETTER_OF.items():
        entry = table.get(kind) if isinstance(table, dict) else None
        if letter == "-" or (letter not in letters and entry is None):
            continue
        if not isinstance(entry, dict) or not _positive(entry.get("rope_theta")):
            problems.append(f"rope_parameters={table!r} has no rope_theta for {kind}")
        elif entry.get("rope_type", "default") != "default":
            problems.append(f"rope_parameters.{kind}.rope_type={entry['rope_type']!r} is not supported, only 'default'")
        else:
            found[letter] = {f"rope_parameters.{kind}.rope_theta": entry["rope_theta"]}
    return found


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and value > 0
