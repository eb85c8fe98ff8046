"""Train many networks, keep every run, and see which measures go with the generalization gap."""
