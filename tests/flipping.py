"""A program that damages the files of a study, one at a time, and looks at what the study makes of it.

    python flipping.py FOLDER flips SEED COUNT [KIND ...]   COUNT bits in every region of every kind of file
    python flipping.py FOLDER damages SEED COUNT            files cut, emptied, swapped, replaced by noise or a folder;
                                                            COUNT of them, or all if it is 0
    python flipping.py FOLDER kills SEED 0                  a flip in every kind of file, and a kill after every change
                                                            of a file in the life that heals it
    python flipping.py FOLDER short SEED COUNT              a flip in every region, and COUNT damages

Every damaged folder is verified, run, run again and verified again. Torch is imported once; every life of the study is
a fork of this process, so that a crash of the interpreter would be noticed, too.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from killing import child, dying, ended
from killing import study as trained_here
from safetensors.torch import load
from study_cases import Told, own, put

from saltflat.errors import SaltflatError
from saltflat.studies import Results, Row, Study, verify
from saltflat.studies.store.folder import Store

# The state of the folder, the files in it, and the region of the file: its header in full, what is written beside the
# tensors, or the tensors.
KINDS = {
    "rows": ("finished", "rows/*.json", "all"),
    "study.json": ("finished", "study.json", "all"),
    "weights, header": ("finished", "weights/*.safetensors", "header"),
    "weights, facts": ("finished", "weights/*.safetensors", "facts"),
    "weights, tensors": ("finished", "weights/*.safetensors", "tensors"),
    "initial, header": ("own", "weights/*.initial.safetensors", "header"),
    "initial, tensors": ("own", "weights/*.initial.safetensors", "tensors"),
    "checkpoints, header": ("begun", "partial/*.safetensors", "header"),
    "checkpoints, facts": ("begun", "partial/*.safetensors", "facts"),
    "checkpoints, tensors": ("begun", "partial/*.safetensors", "tensors"),
}
# What of a run is there besides its weights: a row, no row since it was killed before, or the row of a failure.
AROUND = ("finished", "killed", "failed")


def in_a_fork(work: Callable[[], list[dict[str, Any]]], answers: Path) -> list[dict[str, Any]]:
    """Return what the work returns, or how its process ended."""
    answers.unlink(missing_ok=True)

    def life() -> None:
        torch.set_num_threads(1)
        answers.write_text(json.dumps(work()))

    code = ended(child(life))
    found: list[dict[str, Any]] = json.loads(answers.read_text()) if code == 0 else []
    return found or [{"error": f"the process ended with {code}", "told": [], "files": []}] * 2


def run(chosen: Study, folder: Path, retry: bool) -> dict[str, Any]:
    told = Told()
    try:
        results = chosen.run(folder, progress=told, every=0.0, retry_failed=retry)
    except SaltflatError as problem:
        return {"error": None, "stopped": str(problem), "told": told.texts}
    except Exception as problem:
        return {"error": repr(problem), "told": told.texts}
    return {"error": None, "told": told.texts, "counts": results.counts}


def problems(folder: Path) -> dict[str, Any]:
    try:
        return {"error": None, "files": [f"{each.file}: {each.why}" for each in verify(folder).problems]}
    except Exception as problem:
        return {"error": repr(problem), "files": []}


class Attack:
    """Folders to damage, and what each of them should become."""

    def __init__(self, root: Path) -> None:
        self.root = root
        small = trained_here(seeds=2, epochs=3, methods=((0.1, 0.05, 0.0),), widths=(4,), batches=(20, 40))
        self.studies = {"finished": small, "begun": small, "own": own()}
        for state in ("finished", "own"):
            self.studies[state].run(root / state, progress=False)
        self._begin(root / "begun")

    def _begin(self, folder: Path) -> None:
        """Leave a group in the middle of its training."""
        for at in range(1, 100):
            shutil.rmtree(folder, ignore_errors=True)

            def life(at: int = at) -> None:
                torch.set_num_threads(1)
                dying(at, "after")
                self.studies["begun"].run(folder, progress=False, every=0.0)

            assert ended(child(life)) != 0
            for path in folder.glob("partial/*.safetensors"):
                facts = json.loads(_facts(path.read_bytes())["facts"])
                if facts["stacks"] and facts["stacks"][0]["epoch"] == 2:
                    return
        raise AssertionError("no checkpoint in the middle of a training")

    def calm(self, state: str) -> str:
        """Return the folder of the same study that was left alone."""
        return state if state == "own" else "finished"

    def copied(self, state: str, around: str) -> Path:
        folder = self.root / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.root / state, folder)
        if around != "finished" and state != "begun":
            for key, row in Results.load(folder).rows.items():
                store = Store(folder)
                if around == "failed":
                    store.write_row(Row(key, row.config, "failed", failure={"error": "Error: no", "traceback": ""}))
                else:
                    store.remove(store.row_path(key))
        return folder

    def survived(self, state: str, around: str, damage: Callable[[Path], str]) -> dict[str, Any]:
        """What became of one damage."""
        folder, answers = self.copied(state, around), self.root / "answers.json"
        where = damage(folder)
        retry = around == "failed"
        seen, first = in_a_fork(lambda: [problems(folder), run(self.studies[state], folder, retry)], answers)
        same = first.get("counts") is not None and _outcome(folder) == _outcome(self.root / self.calm(state))
        second, after = in_a_fork(lambda: [run(self.studies[state], folder, retry), problems(folder)], answers)
        noticed = bool(first["told"]) or "stopped" in first
        found = "noticed and healed" if noticed and same else "harmless" if same else "noticed" if noticed else "silent"
        wrong = {
            "silent": found == "silent",
            "differ": not same,
            "raw error": first["error"] or seen["error"] or after["error"],
            "permanent": second["error"]
            or second.get("stopped")
            or _outcome(folder) != _outcome(self.root / self.calm(state)),
            "verify is of another opinion": bool(seen["files"]) != noticed,
            "wrong afterwards": after["files"],
        }
        return {"found": found, "where": where, "wrong": {name: each for name, each in wrong.items() if each}}


def _facts(content: bytes) -> dict[str, str]:
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    facts: dict[str, str] = header["__metadata__"]
    return facts


def _outcome(folder: Path) -> Any:
    """The table and all weights, bit for bit; not the seconds that trainings took."""
    found: dict[str, Any] = {"table": (folder / "table.csv").read_text()}
    for path in sorted(folder.glob("weights/*.safetensors")):
        try:
            found[path.name] = {name: each.tolist() for name, each in sorted(load(path.read_bytes()).items())}
        except Exception as problem:
            found[path.name] = repr(problem)
    return found


def region(content: bytes, part: str) -> range:
    if part == "all":
        return range(len(content))
    begin = 8 + int.from_bytes(content[:8], "little")
    if part == "tensors":
        return range(begin, len(content))
    if part == "header":
        return range(begin)
    text = content[:begin].decode("latin-1")
    opening = text.index("{", text.index('"__metadata__"'))
    return range(opening, json.JSONDecoder().raw_decode(text, opening)[1])


def flipped(folder: Path, files: str, part: str, draws: random.Random) -> str:
    path = draws.choice(sorted(folder.glob(files)))
    content = bytearray(path.read_bytes())
    place, bit = draws.choice(region(bytes(content), part)), draws.randrange(8)
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return f"{path.relative_to(folder)}, byte {place}, bit {bit}"


def flips(attack: Attack, seed: int, count: int, *kinds: str) -> dict[str, Any]:
    found = {}
    for kind in kinds or KINDS:
        draws = random.Random(f"{seed} {kind}")
        state, files, part = KINDS[kind]
        around = AROUND[:1] if part == "all" or state == "begun" else AROUND

        def damage(folder: Path, files: str = files, part: str = part, draws: random.Random = draws) -> str:
            return flipped(folder, files, part, draws)

        found[kind] = summary(attack.survived(state, draws.choice(around), damage) for _ in range(count))
    return found


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "cut in the middle": lambda path, other: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "cut by a byte": lambda path, other: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path, other: path.write_bytes(b""),
    "longer by a byte": lambda path, other: path.write_bytes(path.read_bytes() + b"\x00"),
    "noise": lambda path, other: path.write_bytes(random.Random(0).randbytes(path.stat().st_size)),
    "zeros": lambda path, other: path.write_bytes(bytes(path.stat().st_size)),
    "another of its kind": lambda path, other: path.write_bytes(other.read_bytes()),
    "swapped": lambda path, other: _swap(path, other),
    "a folder": lambda path, other: put(path, "folder"),
    "a pipe": lambda path, other: put(path, "pipe"),
    "JSON of another shape": lambda path, other: path.write_text('{"schema": "saltflat.row/1", "finished": []}'),
}


def _swap(path: Path, other: Path) -> None:
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)


def damages(attack: Attack, seed: int, count: int) -> dict[str, Any]:
    files = {kind.partition(",")[0]: (state, pattern) for kind, (state, pattern, _) in KINDS.items()}
    cases = [
        (state, around, pattern, name)
        for state, pattern in files.values()
        for around in (AROUND if pattern.startswith("weights") else AROUND[:1])
        for name in DAMAGES
    ]
    if count:
        cases = random.Random(seed).sample(cases, count)

    def damaged(pattern: str, name: str) -> Callable[[Path], str]:
        def damage(folder: Path) -> str:
            paths = sorted(folder.glob(pattern))
            DAMAGES[name](paths[0], paths[-1])
            return f"{paths[0].relative_to(folder)}: {name}"

        return damage

    return {"damages": summary(attack.survived(state, around, damaged(*rest)) for state, around, *rest in cases)}


def kills(attack: Attack, seed: int, _: int) -> dict[str, Any]:
    found = {}
    for kind, (state, files, part) in KINDS.items():
        wrong: list[dict[str, Any]] = []
        for at in range(1, 1000):
            folder, chosen = attack.copied(state, "finished"), attack.studies[state]
            flipped(folder, files, part, random.Random(f"{seed} {kind}"))

            def dies(at: int = at, chosen: Study = chosen, folder: Path = folder) -> None:
                torch.set_num_threads(1)
                dying(at, "after")
                chosen.run(folder, progress=False, every=0.0)

            def heals(chosen: Study = chosen, folder: Path = folder) -> list[dict[str, Any]]:
                return [run(chosen, folder, False), problems(folder)]

            if ended(child(dies)) == 0:  # it has fewer changes than that
                break
            after = in_a_fork(heals, attack.root / "answers.json")[1]
            if after["error"] or after["files"] or _outcome(folder) != _outcome(attack.root / attack.calm(state)):
                wrong.append({"at": at, **after})
        found[kind] = {"kills": at - 1, "wrong": wrong}
    return found


def short(attack: Attack, seed: int, count: int) -> dict[str, Any]:
    return {**flips(attack, seed, 1), **damages(attack, seed, count)}


def summary(found: Iterator[dict[str, Any]]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    wrong = []
    for each in found:
        counts[each["found"]] += 1
        if each["wrong"]:
            wrong.append({**each["wrong"], "where": each["where"]})
    return {**counts, "wrong": wrong}


def main() -> None:
    root, mode = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    attack = Attack(root)
    modes: dict[str, Callable[..., dict[str, Any]]] = {
        "flips": flips,
        "damages": damages,
        "kills": kills,
        "short": short,
    }
    print(json.dumps(modes[mode](attack, int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])))


if __name__ == "__main__":
    main()
