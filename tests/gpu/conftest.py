"""Tests on a real GPU. Without one they are not collected, so that no count hides what did not run."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["*"]
collect_ignore = [] if torch.cuda.device_count() > 1 else ["test_two_gpus.py"]
