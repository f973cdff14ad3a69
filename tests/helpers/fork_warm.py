"""What the server that fork_tools forks from does once, so that a run need not: imports, patterns,
tidying up."""

import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the server has no path of ours

import fork_tools  # noqa: F401
import torch.distributed.checkpoint.state_dict  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import tyro  # noqa: F401
import wandb  # noqa: F401
from datasets.packaged_modules.json import json  # noqa: F401
from transformers import conversion_mapping
from transformers.models.auto import modeling_auto, tokenization_auto  # noqa: F401
from transformers.models.gpt2 import modeling_gpt2, tokenization_gpt2  # noqa: F401
from transformers.utils import peft_utils  # noqa: F401

conversion_mapping.get_checkpoint_conversion_mapping("gpt2")  # compiles a thousand of them
gc.freeze()
