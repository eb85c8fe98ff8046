"""Which setting is flatter? A small study of SAM, batch size and weight decay on handwritten digits.

Networks that differ in one setting alone, with the same seed, are compared: every measure, loss, error and gap, with
95 % intervals over the other settings and seeds. Then there is a plot for each setting. The same on the command line:

    saltflat study effects demo/flatter --axis sam --out sam.png
"""

import argparse
import os
from pathlib import Path

from saltflat import Study

QUICK = os.environ.get("SALTFLAT_QUICK") == "1"
MEASURES = ["normalized_sharpness", "rho", "minimum_sharpness", "hessian_trace", "squared_norm"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="With SALTFLAT_QUICK=1 in the environment training stops after 2 epochs, and 50 examples are measured.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the results (default: %(default)s)")
    out: Path = parser.parse_args().out
    study = Study(
        "flatter",
        data="digits",
        axes={"sam": [0, 0.05, 0.2], "batch_size": [32, 128], "weight_decay": [0, 0.001]},
        seeds=3,
        settings={"width": 32, "depth": 2, "lr": 0.05, "momentum": 0.9, "dropout": 0.1},
        stop={"epochs": 2 if QUICK else 40},
        measures=MEASURES,
        measure={"examples": 50 if QUICK else 500},
    )
    results = study.run(out / "flatter")
    effects = results.effects()
    print(effects)
    for axis in effects:
        path = out / f"flatter_{axis}.png"
        effects.plot(axis).savefig(path, dpi=150)
        print(f"Wrote {path}.")


if __name__ == "__main__":
    main()
