"""One thread for every test: tiny tensors gain nothing from more, and workers side by side lose."""

import torch

torch.set_num_threads(1)
