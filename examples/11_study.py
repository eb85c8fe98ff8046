"""Which measures correlate with the generalization gap? A small study on handwritten digits, from training to web page.

Networks of three widths are trained with several learning rates and fractions of random labels, two seeds each, all of
one width at once. Every run is saved in a folder: if interrupted, the script resumes where it stopped. Then every
measure is scored against the gap, beside controls such as the training loss, and everything is put on one web page.
 `examples/digits.yaml` is the same study for the command line:

    saltflat study run examples/digits.yaml --out demo/study
    saltflat study report demo/study --out demo/study.html
"""

import argparse
import os
from pathlib import Path

import saltflat
from saltflat import Study
from saltflat.studies.rebuild import load_trained_network

QUICK = os.environ.get("SALTFLAT_QUICK") == "1"
AUDITED = 1 if QUICK else 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="With SALTFLAT_QUICK=1 in the environment training stops after 3 epochs, and 50 examples are measured.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the results (default: %(default)s)")
    out: Path = parser.parse_args().out
    definition = Study.from_file(Path(__file__).parent / "digits.yaml").to_dict()
    if QUICK:
        definition |= {"stop": {"epochs": 3}, "measure": {"examples": 50}}
    results = Study.from_dict(definition).run(out / "study")
    scores = results.scores()
    print(f"{results}\n\nKendall's tau with the gap between test and training error, 95 %\n")
    found = [score for score in scores.scores.values() if "kendall_b" in score.intervals]
    for score in sorted(found, key=lambda score: -abs(score.kendall_b)):
        low, high = score.intervals["kendall_b"]
        kind = "" if score.kind == "measure" else "   control"
        print(f"{score.name:<22}{score.kendall_b:>6.2f}{low:>9.2f} to {high:5.2f}{kind}")
    print(f"By chance alone, the best of as many measures would have {scores.chance:.2f} or more half of the time.")

    # The loss around the networks with the smallest and the largest gap.
    finished = [row for row in results.rows.values() if row.readings]
    ends = {
        f"{name} gap": pick(finished, key=lambda row: row.gap["loss"])
        for name, pick in {"smallest": min, "largest": max}.items()
    }
    examples = results.study.data.examples()
    landscapes = {}
    for name, row in ends.items():
        network = load_trained_network(results, row.key, examples)
        data = (network.inputs[:200].double(), network.labels[:200])
        landscapes[name] = saltflat.compute_landscape(network.model.double(), data, points=21, progress=False)
    page = results.write_html(out / "study.html", audits=AUDITED, landscapes=landscapes, progress=False)
    print(f"\nAll scores, effects, audits and landscapes are on one page: {page}. The runs are in {results.folder}.")


if __name__ == "__main__":
    main()
